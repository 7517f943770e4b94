"""``TorchFileReader``: tensors that torch.save wrote, such as pytorch_model.bin, read lazily and without running code.

Used by ``open_checkpoint.py``; ``TorchFile`` by the formats that hold such files. The file is mapped, its pickle is
read by ``torch_pickle.py``, and a tensor costs memory once it is read. Never hands the pickle to torch or to Python.
"""

import io
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend_engine.checkpoint.archive import MappedFile, Window, as_file, open_window, stored_members
from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.checkpoint.torch_pickle import (
    MAX_PICKLE,
    MAX_SIZE,
    StorageRef,
    TensorRef,
    Unpickled,
    pickle_length,
    read_pickle,
)
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError, shown

WRAPPERS = ("state_dict", "model", "module")
DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
MAX_DIMS = 64


class StoredTensor(NamedTuple):
    """A dense tensor whose elements lie in ``window``, those of the whole storage: the first at element ``offset``,
    then by ``stride``.
    """

    window: Window
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, DTYPE_NAMES[self.dtype])

    def read(self) -> Tensor:
        """The tensor over the mapped file's memory, which is not to be written; a copy where it lies askew."""
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        num_bytes = _span(self.shape, self.stride) * self.dtype.itemsize
        start = self.window.start + self.offset * self.dtype.itemsize
        data = torch.frombuffer(self.window.file.view(), dtype=torch.uint8, count=num_bytes, offset=start)
        is_askew = start % self.dtype.itemsize != 0
        typed = (data.clone() if is_askew else data).view(self.dtype)
        return typed.as_strided(self.shape, self.stride)


def give_back(file: MappedFile, tensor: Tensor) -> None:
    """Give back the memory of the mapped ``file`` that ``tensor`` lies in; nothing if it lies elsewhere."""
    view = file.view()
    storage = tensor.untyped_storage()
    if len(view) and storage.nbytes():
        start = storage.data_ptr() - torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        if start >= 0 and start + storage.nbytes() <= len(view):
            file.forget(start, storage.nbytes())


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0


class TorchFile:
    """What one torch.save wrote. ``root``: its object, tensors in it as ``TensorRef``. ``stand_ins``: classes that may
    be in it, whose objects are kept as they are stored and never made.
    """

    def __init__(self, window: Window, stand_ins: Collection[str] = ()) -> None:
        self.label = window.label
        if bytes(window.view()[:4]) == b"PK\x03\x04":
            self.root, self._storages = self._open_zip(window, stand_ins)
        else:
            self.root, self._storages = _open_legacy(window, stand_ins)

    def _open_zip(self, window: Window, stand_ins: Collection[str]) -> tuple[Any, dict[str, Window]]:
        members = stored_members(window)
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ModelLoadError(f"{window.label} has no data.pkl; expected a file that torch.save wrote")
        folder = pickles[0].removesuffix("data.pkl")
        if folder + "constants.pkl" in members:
            raise ModelLoadError(f"{window.label} is a TorchScript program; expected tensors that torch.save wrote")
        order = members.get(folder + "byteorder")
        if order is not None and bytes(order.view()[:8]) != b"little":
            raise ModelLoadError(f"{window.label} has byteorder {bytes(order.view()[:8])!r}; expected little")
        root = read_pickle(bytes(members[pickles[0]].view()[: MAX_PICKLE + 1]), window.label, stand_ins).root
        prefix = folder + "data/"
        storages = {name.removeprefix(prefix): part for name, part in members.items() if name.startswith(prefix)}
        return root, storages

    def tensor(self, ref: TensorRef, name: str) -> StoredTensor:
        """The tensor that the pickle describes, checked against the file. ``name``: for messages."""
        where = f"{self.label}: tensor {name}"
        if ref.problem is not None:
            raise ModelLoadError(f"{where} is {ref.problem}; expected a dense tensor")
        if not isinstance(ref.dtype, torch.dtype) or ref.dtype not in DTYPE_NAMES:
            dtype = ref.dtype if isinstance(ref.dtype, torch.dtype) else shown(ref.dtype)
            raise ModelLoadError(f"{where} has dtype {dtype}; expected one of {', '.join(DTYPE_NAMES.values())}")
        if not isinstance(ref.storage, StorageRef) or not _is_plain(ref):
            found = f"shape {shown(ref.shape)}, stride {shown(ref.stride)} and offset {shown(ref.offset)}"
            raise ModelLoadError(f"{where} has {found}; expected integers of at least 0")
        window = self._storages.get(ref.storage.key)
        if window is None:
            raise ModelLoadError(f"{where} lies in storage {ref.storage.key}, which the file does not hold")
        size = ref.dtype.itemsize
        held = min(ref.storage.numel * (ref.storage.dtype.itemsize if ref.storage.dtype else 1), window.size) // size
        needed = max(_span(ref.shape, ref.stride) + ref.offset, math.prod(ref.shape))
        if needed > held:
            raise ModelLoadError(
                f"{where}, shape {list(ref.shape)}, asks for {needed} elements of a storage that holds {held}"
            )
        return StoredTensor(window, ref.dtype, ref.offset, tuple(ref.shape), tuple(ref.stride))


def _is_plain(ref: TensorRef) -> bool:
    """Whether the numbers of a tensor are numbers."""
    both = (ref.shape, ref.stride)
    if not all(isinstance(part, tuple) and len(part) <= MAX_DIMS and all(map(is_size, part)) for part in both):
        return False
    return len(ref.shape) == len(ref.stride) and is_size(ref.offset)


def is_size(value: Any) -> bool:
    """Whether it is a number that a dimension or an offset can have."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def _open_legacy(window: Window, stand_ins: Collection[str]) -> tuple[Any, dict[str, Window]]:
    """The format before torch 1.6: pickles one after the other, then each storage with the number of its elements."""
    file = as_file(window)
    try:
        head = [_next_pickle(file, window, ()).root for _ in range(3)]
        is_known = head[0] == _LEGACY_MAGIC and head[1] == _LEGACY_PROTOCOL and isinstance(head[2], dict)
    except ModelLoadError:
        is_known = False
    if not is_known:
        raise ModelLoadError(f"{window.label} is not a file that torch.save wrote, or only its beginning")
    if head[2].get("little_endian") is not True:
        raise ModelLoadError(f"{window.label} has little_endian {shown(head[2].get('little_endian'))}; expected True")
    root, found = _next_pickle(file, window, stand_ins)
    keys = _next_pickle(file, window, ()).root
    storages: dict[str, Window] = {}
    position = file.tell()
    for key in keys if isinstance(keys, list) else []:
        ref = found.get(str(key)) if isinstance(key, str) or is_size(key) else None
        size = int.from_bytes(bytes(window.view()[position : position + 8]), "little")
        if ref is None or ref.dtype is None or size != ref.numel or str(key) in storages:
            raise ModelLoadError(
                f"{window.label}: storage {shown(key)} has {size} elements; expected those of its tensors"
            )
        num_bytes = size * ref.dtype.itemsize
        if position + 8 + num_bytes > window.size:
            raise ModelLoadError(f"{window.label}: storage {key} is beyond the end of the file ({window.size} bytes)")
        storages[str(key)] = window.part(position + 8, num_bytes, f"{window.label}: storage {key}")
        position += 8 + num_bytes
    return root, storages


def _next_pickle(file: io.BufferedReader, window: Window, stand_ins: Collection[str]) -> Unpickled:
    start = file.tell()
    length = pickle_length(file, window.label)
    return read_pickle(bytes(window.view()[start : start + length]), window.label, stand_ins)


class TorchFileReader(TensorReader):
    """The tensors of one file. Opens it at once; every fault is a one-line ``ModelLoadError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        window = open_window(path)
        file = TorchFile(window)
        self._file = window.file
        self._tensors = {name: file.tensor(ref, name) for name, ref in named_tensors(file.root, file.label).items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> TensorInfo:
        return self._tensors[name].info

    def read(self, name: str) -> Tensor:
        return self._tensors[name].read()

    def release(self, tensor: Tensor) -> None:
        give_back(self._file, tensor)


def named_tensors(root: Any, label: str) -> dict[str, TensorRef]:
    """The tensors of a dict of them, which may be the only dict under one of the keys ``WRAPPERS`` of another.

    Raises ``ModelLoadError`` for anything else in it.
    """
    for _ in WRAPPERS:
        inner = [key for key in WRAPPERS if isinstance(root, dict) and isinstance(root.get(key), dict)]
        if len(inner) == 1:
            root = root[inner[0]]
    if not isinstance(root, dict):
        raise ModelLoadError(f"{label} holds a {type(root).__name__}; expected a dict of tensors by name")
    for name, value in root.items():
        if not isinstance(name, str) or not name.isprintable() or not isinstance(value, TensorRef):
            raise ModelLoadError(
                f"{label} holds a {type(value).__name__} under {shown(name)}; expected tensors by name"
            )
    if not root:
        raise ModelLoadError(f"{label} holds no tensor")
    return dict(root)
