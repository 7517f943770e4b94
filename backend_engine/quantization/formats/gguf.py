"""Weights of GGUF files: the type of each tensor says how it is packed.

Looked up as ``gguf`` in ``plugins/catalog.QUANT_METHODS``. Tensors are named as Hugging Face does, with the type's name
as their dtype and rows of bytes (``checkpoint/gguf_checkpoint.py``). What each type means is in ``gguf_blocks.py``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.gguf_blocks import BLOCK_TYPES
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, Quantization, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

_LEAF = ".weight"
# Numbers that are unpacked at a time; what is needed in between is some 16 bytes for each.
_CHUNK_NUMBERS = 1 << 20


@dataclass(frozen=True)
class GgufFormat(WeightFormat):
    """kind: a key of ``BLOCK_TYPES``."""

    kind: str

    @property
    def scheme(self) -> WeightScheme:
        return BLOCK_TYPES[self.kind].scheme

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        block = BLOCK_TYPES[self.kind]
        if shape[-1] % block.num_columns:
            raise ValueError(f"{self.kind} packs {block.num_columns} columns together, which do not divide {shape[-1]}")
        row_bytes = shape[-1] // block.num_columns * block.num_bytes
        return {_LEAF: Leaf((*shape[:-1], row_bytes), (self.kind,))}

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        block, rows = BLOCK_TYPES[self.kind], leaves[_LEAF].flatten(0, -2)
        num_rows, in_features = math.prod(shape[:-1]), shape[-1]
        found = {
            name: torch.empty(num_rows, *component.shape, dtype=component.dtype)
            for name, component in self.scheme.components(in_features).items()
        }
        step = max(1, _CHUNK_NUMBERS // in_features)
        for start in range(0, num_rows, step):
            chunk = rows[start : start + step]
            parts = block.unpack(chunk.reshape(-1, block.num_bytes))
            for name, tensor in found.items():
                tensor[start : start + step] = parts[name].reshape(chunk.shape[0], -1)
        return {name: tensor.view(*shape[:-1], *tensor.shape[1:]) for name, tensor in found.items()}


class GgufQuantization(Quantization):
    """By the types of the stored tensors."""

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored

    def format_of(self, module: str) -> WeightFormat | None:
        """Raises ``ModelLoadError`` for a type that is not known how to decode."""
        name = module + _LEAF
        if not self._stored.has(name):
            return None
        kind = self._stored.tensors[name].dtype
        if kind in FLOAT_DTYPES:
            return None
        if kind not in BLOCK_TYPES:
            allowed = ", ".join((*FLOAT_DTYPES, *BLOCK_TYPES))
            raise ModelLoadError(f"{self._stored.where}: tensor {name} is of type {kind}; expected one of {allowed}")
        return GgufFormat(kind)


def read(config: HfConfig, stored: StoredTensors) -> Quantization:
    """What the file's types say; ``config`` only names the method."""
    config.choice("quant_method", ("gguf",))
    return GgufQuantization(stored)
