"""A quantization method: int8 with one step a row, for checkpoints with ``"quant_method": "rowwise_int8"``.

A layer ``model.layers.0.mlp.down_proj`` has, instead of its ``.weight``, ``.weight_int8`` (int8, the weight's shape)
and ``.weight_step`` (float32, one a row); a weight is their product. Layers that have a ``.weight`` are plain.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.weight_format import Leaf, Quantization, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme


@dataclass(frozen=True)
class RowwiseInt8(WeightFormat):
    """What the files hold, and how it becomes the form that stays in memory."""

    @property
    def scheme(self) -> WeightScheme:
        # An existing form brings the multiplication along. One of your own says how it is decoded.
        return GroupwiseInt(bits=8, group_size=None, scale_dtype=torch.float32)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        return {".weight_int8": Leaf(shape, ("I8",)), ".weight_step": Leaf(shape[:-1], ("F32",))}

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        # The form counts from 128, the files from 0.
        codes = leaves[".weight_int8"].view(torch.uint8) ^ 128
        return {"codes": codes, "scales": leaves[".weight_step"].unsqueeze(-1)}


@dataclass(frozen=True)
class _Checkpoint(Quantization):
    stored: StoredTensors

    def format_of(self, module: str) -> WeightFormat | None:
        return RowwiseInt8() if self.stored.has(module + ".weight_int8") else None


def read(config: HfConfig, stored: StoredTensors) -> Quantization:
    """``config`` is the checkpoint's quantization config: refuse in it what is not understood."""
    config.choice("granularity", ("row",), "row")
    return _Checkpoint(stored)
