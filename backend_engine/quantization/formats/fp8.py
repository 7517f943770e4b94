"""Checkpoints with ``quant_method`` ``fp8`` (DeepSeek-V3, Qwen3-FP8, MiniMax-M2 and others) and ``fbgemm_fp8``.

Read by name through the catalog. A dynamic ``activation_scheme`` rounds inputs for the sake of eight-bit products and
says nothing that the checkpoint holds: such weights are decoded, and multiplied in the model's dtype.
"""

from dataclasses import dataclass

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.module_patterns import ModulePatterns
from backend_engine.quantization.formats.scaled_float8 import find_scaled_float8
from backend_engine.quantization.formats.stored_shape import stored_scalar
from backend_engine.quantization.formats.stored_weight import first_stored, is_plain
from backend_engine.quantization.formats.treated_input import TreatedInput
from backend_engine.quantization.weight_format import Quantization, StoredTensors, WeightFormat

_DEFAULT_BLOCK = (128, 128)
_SCALES = (".weight_scale_inv", ".weight_scale")
_INPUT_SCALES = (".input_scale", ".activation_scale")


@dataclass(frozen=True)
class Fp8(Quantization):
    """block: rows and columns that share a scale, ``None`` = whatever the scales' shapes say. rounding: ``static``:
    the input is rounded with the checkpoint's scale; ``dynamic``: each token with its own; ``None``: not at all.
    """

    stored: StoredTensors
    ignored: tuple[ModulePatterns, ...]
    block: tuple[int, int] | None
    rounding: str | None

    def format_of(self, module: str) -> WeightFormat | None:
        if is_plain(self.stored, module) or any(module in patterns for patterns in self.ignored):
            return None
        weight = find_scaled_float8(self.stored, module, _SCALES, self.block)
        if self.rounding == "static":
            scale = first_stored(self.stored, module, _INPUT_SCALES)
            return TreatedInput(weight, "fp8", scale, stored_scalar(self.stored, module + scale))
        return weight if self.rounding is None else TreatedInput(weight, "fp8")


def read(config: HfConfig, stored: StoredTensors) -> Quantization:
    """``quant_method`` ``fp8``. Raises ``ModelLoadError`` for a value that the format does not have."""
    config.choice("fmt", ("e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"), "e4m3")
    config.choice("scale_fmt", ("float", "ue8m0"), "float")
    config.choice("expert_dtype", ("fp8",), "fp8")
    scheme = config.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    ignored = tuple(ModulePatterns.read(config, key) for key in ("modules_to_not_convert", "ignored_layers"))
    return Fp8(stored, ignored, _block(config), "static" if scheme == "static" else None)


def read_fbgemm(config: HfConfig, stored: StoredTensors) -> Quantization:
    """``quant_method`` ``fbgemm_fp8``: rows have scales, tokens are rounded with their own. The bound on those scales
    (``activation_scale_ub``) only keeps outliers out of an eight-bit product; nothing is cut off here.
    """
    config.number("activation_scale_ub", 1200.0)
    return Fp8(stored, (ModulePatterns.read(config, "modules_to_not_convert"),), None, "dynamic")


def _block(config: HfConfig) -> tuple[int, int] | None:
    sizes = config.get("weight_block_size")
    if sizes is None:
        return None if "weight_block_size" in config else _DEFAULT_BLOCK
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise config.refuse("weight_block_size", "two integers of at least 1, rows and columns")
    return sizes[0], sizes[1]
