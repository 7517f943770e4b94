"""ModelOpt's algorithms by name: which format their weights have, and what they do to the inputs.

Used by ``modelopt.py``. Looks at shapes where a config leaves something out; reads no config.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from backend_engine.quantization.formats.modelopt_ints import ModelOptInt4, ModelOptInt8
from backend_engine.quantization.formats.mxfp4 import Mxfp4
from backend_engine.quantization.formats.nvfp4 import GROUP_SIZE, Nvfp4
from backend_engine.quantization.formats.scaled_float8 import find_scaled_float8
from backend_engine.quantization.formats.stored_shape import stored_scalar
from backend_engine.quantization.weight_format import StoredTensors, WeightFormat

_SCALE, _TENSOR_SCALE = ".weight_scale", ".weight_scale_2"
_FLOAT8_BLOCK, _MX_BLOCK, _INT4_GROUP = 128, (1, 32), 128


class PackedWeight(NamedTuple):
    """A weight whose format is asked for. group_size: as the config has it, ``None`` where the tensors tell."""

    stored: StoredTensors
    module: str
    group_size: int | None


class Algorithm(NamedTuple):
    """rounding: what inputs are rounded to, ``None`` = not. is_static: with a scale that is stored."""

    weight: Callable[[PackedWeight], WeightFormat]
    rounding: str | None = None
    is_static: bool = False


def _float8(weight: PackedWeight) -> WeightFormat:
    return find_scaled_float8(weight.stored, weight.module, (_SCALE,), None)


def _block_float8(weight: PackedWeight) -> WeightFormat:
    size = weight.group_size or _FLOAT8_BLOCK
    return find_scaled_float8(weight.stored, weight.module, (_SCALE,), (size, size))


def _mxfp8(weight: PackedWeight) -> WeightFormat:
    return find_scaled_float8(weight.stored, weight.module, (_SCALE,), _MX_BLOCK)


def _mxfp4(weight: PackedWeight) -> WeightFormat:
    return Mxfp4(".weight", _SCALE, has_blocks=False)


def _nvfp4(weight: PackedWeight, default: int = GROUP_SIZE) -> WeightFormat:
    shape = stored_scalar(weight.stored, weight.module + _TENSOR_SCALE)
    return Nvfp4(tensor_scale_shape=shape, group_size=_group_size(weight, 2, default))


def _int4(weight: PackedWeight) -> WeightFormat:
    second = (_TENSOR_SCALE, stored_scalar(weight.stored, weight.module + _TENSOR_SCALE))
    has_second = weight.stored.has(weight.module + _TENSOR_SCALE)
    return ModelOptInt4(_group_size(weight, 1, _INT4_GROUP), (second,) if has_second else ())


def _int8(weight: PackedWeight) -> WeightFormat:
    return ModelOptInt8()


def _group_size(weight: PackedWeight, codes_per_byte: int, default: int) -> int:
    """The config's; without one, what the shapes of codes and scales come to."""
    if weight.group_size is not None:
        return weight.group_size
    codes = weight.stored.tensors.get(weight.module + ".weight")
    scales = weight.stored.tensors.get(weight.module + _SCALE)
    if codes is None or scales is None or not codes.shape or not scales.shape or not scales.shape[-1]:
        return default
    size, rest = divmod(codes.shape[-1] * codes_per_byte, scales.shape[-1])
    return default if rest or not size else size


ALGORITHMS: Mapping[str, Algorithm] = {
    "FP8": Algorithm(_float8, "fp8", is_static=True),
    "FP8_PB_WO": Algorithm(_block_float8),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(_float8, "fp8"),
    "MXFP4": Algorithm(_mxfp4),
    "MXFP8": Algorithm(_mxfp8),
    "NVFP4": Algorithm(_nvfp4),
    "NVFP4_AWQ": Algorithm(_nvfp4),
    "W4A16_AWQ": Algorithm(_int4),
    "W4A16_NVFP4": Algorithm(_nvfp4),
    "W4A8_AWQ": Algorithm(_int4, "fp8", is_static=True),
    "W4A8_MXFP4_FP8": Algorithm(_mxfp4),
    "W4A8_NVFP4_FP8": Algorithm(partial(_nvfp4, default=32), "fp8", is_static=True),
    "W8A16": Algorithm(_int8),
    "W8A8_SQ_PER_CHANNEL": Algorithm(_int8, "int8", is_static=True),
}
# Names that ModelOpt has for the same inside, and writes where it has no other.
ALIASES = {
    "FP8_PC_PT": "FP8_PER_CHANNEL_PER_TOKEN",
    "INT4_AWQ": "W4A16_AWQ",
    "INT8_SQ": "W8A8_SQ_PER_CHANNEL",
    "INT8_WO": "W8A16",
}
