"""Checkpoints with ``quant_method`` ``mxfp4`` (GPT-OSS): the experts' stacked weights in blocks of 32 four-bit floats.

Read by name through the catalog. ``Mxfp4`` is ModelOpt's as well. OCP Microscaling Formats, version 1.0, 2023.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.module_patterns import ModulePatterns
from backend_engine.quantization.formats.stored_weight import is_plain
from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
from backend_engine.quantization.weight_format import Leaf, Quantization, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """codes, scales: endings of the tensors' names. Codes are two a byte, the first in the lower half; with
    ``has_blocks`` each block is a dimension of its own. Scales are bytes, powers of two with bias 127.
    """

    codes: str
    scales: str
    has_blocks: bool

    @property
    def scheme(self) -> WeightScheme:
        return Codebook4(E2M1, BLOCK_SIZE, "e8m0")

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        if shape[-1] % BLOCK_SIZE:
            raise ValueError(f"MXFP4 needs a multiple of {BLOCK_SIZE} columns, not {shape[-1]}")
        num_blocks = shape[-1] // BLOCK_SIZE
        packed = (num_blocks, BLOCK_SIZE // 2) if self.has_blocks else (shape[-1] // 2,)
        return {
            self.codes: Leaf((*shape[:-1], *packed), ("U8",)),
            self.scales: Leaf((*shape[:-1], num_blocks), ("U8", "F8_E8M0")),
        }

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        scales = leaves[self.scales]
        codes = leaves[self.codes]
        return {"codes": codes.reshape(*shape[:-1], shape[-1] // 2), "scales": scales.view(codes.dtype)}


STACKED = Mxfp4("_blocks", "_scales", has_blocks=True)


@dataclass(frozen=True)
class Mxfp4Experts(Quantization):
    """Stacks of experts, ``model.layers.0.mlp.experts.down_proj``, are packed unless the checkpoint says otherwise."""

    stored: StoredTensors
    ignored: ModulePatterns

    def format_of(self, module: str) -> WeightFormat | None:
        if is_plain(self.stored, module) or module in self.ignored or "experts" not in module.split("."):
            return None
        return STACKED


def read(config: HfConfig, stored: StoredTensors) -> Quantization:
    """``quant_method`` ``mxfp4``. Raises ``ModelLoadError`` for a value that the format does not have."""
    return Mxfp4Experts(stored, ModulePatterns.read(config, "modules_to_not_convert"))
