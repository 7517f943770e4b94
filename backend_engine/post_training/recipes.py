"""The formats that a model can be quantized to, by the names that TensorRT-LLM's quantize.py has for them.

Read by ``quantize_model.py`` and ``scripts/quantize.py``. Data: a grid for the weights, what is done to the inputs, and
the algorithms that choose the numbers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backend_engine.errors import ConfigError
from backend_engine.post_training.export import FP8_KV_SCHEME
from backend_engine.quantization.grids.float8_grid import Float8Grid
from backend_engine.quantization.grids.int_grid import IntGrid
from backend_engine.quantization.grids.nvfp4_grid import Nvfp4Grid
from backend_engine.quantization.grids.weight_grid import WeightGrid

DEFAULT_GROUP_SIZE = 32
_PER_TOKEN: Mapping[str, Any] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_INT8_INPUTS: Mapping[str, Any] = {**_PER_TOKEN, "type": "int"}
_FP8_INPUTS: Mapping[str, Any] = {**_PER_TOKEN, "type": "float"}


@dataclass(frozen=True)
class Recipe:
    """grid: of the weights of all layers' products. inputs: how they are rounded, ``input_activations`` of
    compressed-tensors, ``None`` = not at all. smoothing: ``smoothquant``, ``awq`` or ``none``. compensates: whether
    weights are rounded as GPTQ does it, instead of each number for itself. keeps_gated_inputs: whether inputs that are
    the product of a gate and what it lets through are not rounded: such products have outliers of their own in each
    token. keeps_attention_inputs: the same of what queries, keys and values are made of: scores are exponents.
    """

    about: str
    grid: WeightGrid
    inputs: Mapping[str, Any] | None = None
    smoothing: str = "none"
    compensates: bool = False
    keeps_gated_inputs: bool = False
    keeps_attention_inputs: bool = False

    @property
    def is_calibrated(self) -> bool:
        """Whether the weights depend on texts."""
        return self.compensates or self.smoothing != "none"

    @property
    def search_grid(self) -> WeightGrid:
        """The grid without a search for scales, for whoever tries many roundings."""
        return dataclasses.replace(self.grid, clip_search=False) if isinstance(self.grid, IntGrid) else self.grid


def _int8(scale_dtype: torch.dtype, is_packed: bool) -> IntGrid:
    """With eight bits, clipping a row's range makes nothing better."""
    return IntGrid(8, is_packed=is_packed, clip_search=False, scale_dtype=scale_dtype)


def _int8_inputs(scale_dtype: torch.dtype) -> Recipe:
    """One scale for a token is too coarse for the others where some channels are much larger, so they are smoothed."""
    return Recipe(
        "8-bit weights, a scale for each row, and inputs, a scale for each token; SmoothQuant (Xiao et al., 2022), "
        "then rounded as GPTQ does",
        _int8(scale_dtype, False),
        _INT8_INPUTS,
        smoothing="smoothquant",
        compensates=True,
        keeps_gated_inputs=True,
    )


# By name: given columns of a group (int4 only) and the dtype of scales (integers only).
_RECIPES: dict[str, Callable[[int, torch.dtype], Recipe]] = {
    "int8_wo": lambda _, dtype: Recipe("8-bit weights, a scale for each row", _int8(dtype, True)),
    "int8_dyn": lambda _, dtype: _int8_inputs(dtype),
    "int8_sq": lambda _, dtype: _int8_inputs(dtype),
    "int4_awq": lambda size, dtype: Recipe(
        "4-bit weights; AWQ's factors (Lin et al., 2023), then rounded as GPTQ does",
        IntGrid(4, size, scale_dtype=dtype),
        smoothing="awq",
        compensates=True,
    ),
    "int4_gptq": lambda size, dtype: Recipe(
        "4-bit weights by GPTQ (Frantar et al., 2022)", IntGrid(4, size, scale_dtype=dtype), compensates=True
    ),
    "fp8": lambda _, __: Recipe(
        "E4M3 weights, a scale for each row, rounded as GPTQ does; inputs in E4M3, a scale for each token",
        Float8Grid(),
        _FP8_INPUTS,
        compensates=True,
        keeps_gated_inputs=True,
        keeps_attention_inputs=True,
    ),
    "nvfp4": lambda _, __: Recipe("NVFP4 weights, rounded as GPTQ does", Nvfp4Grid(), compensates=True),
}
QFORMATS = tuple(_RECIPES)

# ``kv_cache_scheme`` of compressed-tensors, by the name of the cache's format.
KV_SCHEMES: Mapping[str, Mapping[str, Any] | None] = {
    "auto": None,
    "fp8": FP8_KV_SCHEME,
    "int8": _INT8_INPUTS,
}


def recipe_of(qformat: str, group_size: int | None = None, scale_dtype: torch.dtype = torch.float32) -> Recipe:
    """The recipe called ``qformat``. group_size: of the 4-bit integers, ``None`` = ``DEFAULT_GROUP_SIZE``. scale_dtype:
    of the scales of integers, best the model's, in which others load them. Raises ``ConfigError`` for a name or a group
    size that is not allowed.
    """
    if qformat not in _RECIPES:
        raise ConfigError(f"qformat {qformat!r} is not allowed; use {', '.join(QFORMATS)}")
    if group_size is not None and not qformat.startswith("int4"):
        raise ConfigError(f"group_size {group_size} is not allowed with qformat {qformat}, whose groups are fixed")
    if group_size is not None and group_size < 1:
        raise ConfigError(f"group_size {group_size} is out of range; it must be 1 or more")
    return _RECIPES[qformat](group_size or DEFAULT_GROUP_SIZE, scale_dtype)


def check_kv_dtype(name: str) -> None:
    """Raises ``ConfigError`` for a name that is not in ``KV_SCHEMES``."""
    if name not in KV_SCHEMES:
        raise ConfigError(f"kv_cache_dtype {name!r} is not allowed; use {', '.join(KV_SCHEMES)}")
