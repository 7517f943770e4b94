"""Scales of a quantized KV cache that a checkpoint brings: one number for the keys and one for the values of a layer.

Used by ``loader.py``. Knows the names that ModelOpt, compressed-tensors and older exports of vLLM give them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from backend_engine.errors import ModelLoadError

if TYPE_CHECKING:
    from backend_engine.checkpoint.stored_weights import TensorFiles

# Beside the attention's products (``self_attn.k_scale``), at the products, or one for both.
_NAME = re.compile(
    r".*\.layers\.(?P<layer>\d+)\.(?:self_attn|attn|attention)\."
    r"(?:(?:attn\.)?(?P<which>[kv])_scale|(?P<product>[kv])_proj\.(?:[kv]_scale|output_scale)|(?P<both>kv_scale))"
)


def find_kv_scales(names: Iterable[str]) -> dict[int, list[str]]:
    """The tensors that hold scales, by layer."""
    found: dict[int, list[str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            found.setdefault(int(match["layer"]), []).append(name)
    return found


def read_kv_scales(files: "TensorFiles", names: Mapping[int, list[str]]) -> dict[int, tuple[float, float]]:
    """Scale of keys and of values by layer; one that is not stored is 1."""
    return {layer: _layer_scales(files, tensors) for layer, tensors in sorted(names.items())}


def _layer_scales(files: "TensorFiles", names: list[str]) -> tuple[float, float]:
    scales = {"k": 1.0, "v": 1.0}
    for name in names:
        match = _NAME.fullmatch(name)
        assert match is not None, name
        shape, _ = files.describe(name)
        where = f"{files.file_of(name)}: tensor {name}"
        if shape not in ((), (1,)):
            raise ModelLoadError(f"{where} has shape {list(shape)}; expected one number, the scale of a KV cache")
        value = float(files.read(name).float().item())
        if not 0 < value < float("inf"):
            raise ModelLoadError(f"{where} is {value}; expected a number above 0, the scale of a KV cache")
        for which in "kv" if match["both"] else (match["which"] or match["product"]):
            scales[which] = value
    return scales["k"], scales["v"]
