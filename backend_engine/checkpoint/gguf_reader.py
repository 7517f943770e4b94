"""``GgufFile``: one GGUF file: its header, and its tensors mapped, none of them copied.

Opening it checks the header (``config/gguf_metadata.py``) and, against the file's size, where every tensor lies. Names
and shapes are the file's own; ``gguf_checkpoint.py`` translates them.
"""

import math
import mmap
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from backend_engine.config.gguf_metadata import GgufHeader, GgufTensor, read_gguf_header
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.gguf_blocks import BLOCK_TYPES

_PLAIN = {
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_FEWEST_BYTES_ALIGNED = 8


class _Place(NamedTuple):
    """Of a tensor: shape, dtype, and its bytes in the file."""

    info: TensorInfo
    start: int
    num_bytes: int


class GgufFile:
    """``header``: its metadata. ``tensors``: shape (slowest dimension first, the last one in bytes for packed types)
    and type of each, in the order of the file. A damaged file, or one that says what cannot be, is a
    ``ModelLoadError``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: GgufHeader = read_gguf_header(path)
        alignment = self.header.count("general.alignment", 32)
        if alignment < _FEWEST_BYTES_ALIGNED:
            raise self.header.refuse("general.alignment", f"a power of two of at least {_FEWEST_BYTES_ALIGNED}")
        self._places = {tensor.name: self._place(tensor) for tensor in self.header.tensors}
        self._check_places(path.stat().st_size)
        self.tensors = {name: place.info for name, place in self._places.items()}

    def _place(self, tensor: GgufTensor) -> _Place:
        where = f"{self.path}: tensor {tensor.name}"
        known = {kind.value: kind for kind in GGMLQuantizationType}
        if tensor.type_id not in known:
            raise ModelLoadError(f"{where} is of type {tensor.type_id}; expected one of {', '.join(map(str, known))}")
        kind = known[tensor.type_id]
        shape = tuple(reversed(tensor.dims)) or (1,)
        if min(shape) < 1:
            raise ModelLoadError(f"{where} has shape {list(shape)}; expected sizes of at least 1")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelLoadError(f"{where} has rows of {shape[-1]}; expected a multiple of {block} for {kind.name}")
        row_bytes = shape[-1] // block * block_bytes
        stored = shape if kind.name in _PLAIN else (*shape[:-1], row_bytes)
        return _Place(TensorInfo(stored, kind.name), tensor.offset, math.prod(shape[:-1]) * row_bytes)

    def _check_places(self, size: int) -> None:
        in_order = sorted(self._places, key=lambda name: self._places[name].start)
        for name, place in self._places.items():
            if place.start + place.num_bytes > size:
                raise ModelLoadError(
                    f"{self.path} is cut off: it has {size} bytes, and tensor {name} of {place.num_bytes} bytes begins "
                    f"at {place.start}"
                )
        for name, other in pairwise(in_order):
            if self._places[name].start + self._places[name].num_bytes > self._places[other].start:
                raise ModelLoadError(f"{self.path}: tensors {name} and {other} lie over each other")

    def read(self, name: str, entry: int | None = None) -> Tensor:
        """The tensor as it is stored, or one ``entry`` along its first dimension; packed types are bytes.

        Its memory is mapped, and given back once nobody holds the tensor.
        """
        info, start, num_bytes = self._places[name]
        shape = info.shape if entry is None else info.shape[1:]
        if entry is not None:
            num_bytes //= info.shape[0]
            start += entry * num_bytes
        skipped = start % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                # Private: whoever writes to the tensor does not change the file.
                mapped = mmap.mmap(file.fileno(), skipped + num_bytes, access=mmap.ACCESS_COPY, offset=start - skipped)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self.path}: tensor {name} cannot be read: {error}") from None
        dtype = _PLAIN.get(info.dtype, torch.uint8)
        return torch.frombuffer(mapped, dtype=dtype, count=num_bytes // dtype.itemsize, offset=skipped).view(shape)

    def decode(self, name: str) -> Tensor:
        """The tensor as float32 numbers, whatever its type."""
        kind, stored = self.tensors[name].dtype, self.read(name)
        if kind in _PLAIN:
            return stored.to(torch.float32)
        if kind not in BLOCK_TYPES:
            raise ModelLoadError(f"{self.path}: tensor {name} is of type {kind}, which cannot be decoded")
        return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType[kind]))
