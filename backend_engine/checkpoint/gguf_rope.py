"""Rotary settings of GGUF metadata as config.json has them (``rope_theta``, ``rope_scaling``).

Used by ``gguf_config.py``. Schemes that the file only has as a tensor of factors are recognised by their numbers.
"""

import itertools
import math
from typing import Any

import torch

from backend_engine.checkpoint.gguf_files import GgufFiles
from backend_engine.checkpoint.gguf_keys import ModelKeys, shortest
from backend_engine.checkpoint.hf_rope import llama3_scaling
from backend_engine.errors import ModelLoadError

FREQUENCY_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FREQUENCY_FACTORS, _LONG, _SHORT)
_DEFAULT_THETA = 10000.0
# The setting of Llama 3.1 and later: original length, factors of the band's ends.
_LLAMA3 = (8192, 1.0, 4.0)
_TOLERANCE = 1e-5
_DIGITS = 6


def rope_config(keys: ModelKeys, files: GgufFiles, dim: int) -> dict[str, Any]:
    """The settings of a model that rotates ``dim`` elements of each head."""
    theta = keys.number("rope.freq_base", _DEFAULT_THETA)
    keys.get("rope.scaling.original_context_length")  # Schemes without need of it may have it.
    scaling = _scaling(keys, files)
    if FREQUENCY_FACTORS in files.tensors:
        factors = files.decode(FREQUENCY_FACTORS).tolist()
        if any(factor != 1.0 for factor in factors):
            if scaling is not None:
                raise keys.refuse("rope.scaling.type", f"none, since there is {FREQUENCY_FACTORS}")
            scaling = _llama3(files, factors, theta, dim)
    return {"rope_theta": theta} if scaling is None else {"rope_theta": theta, "rope_scaling": scaling}


def _scaling(keys: ModelKeys, files: GgufFiles) -> dict[str, Any] | None:
    """What ``rope.scaling`` says; a factor without a type is linear, as it was before there were types."""
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    kind = keys.get("rope.scaling.type")
    if _LONG in files.tensors or kind == "longrope":
        return _longrope(keys, files)
    if kind is None or kind == "linear":
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind == "none":
        return None
    if kind == "yarn":
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        }
        for key in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{key}" in keys:
                found[key] = keys.number(f"rope.scaling.yarn_{key}")
        return found
    raise keys.refuse("rope.scaling.type", "none, linear, yarn or longrope")


def _longrope(keys: ModelKeys, files: GgufFiles) -> dict[str, Any]:
    absent = [name for name in (_LONG, _SHORT) if name not in files.tensors]
    if absent:
        raise ModelLoadError(f"{files.path} does not hold tensor {absent[0]}, which its rotary scheme, longrope, needs")
    original = keys.count("rope.scaling.original_context_length")
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [shortest(factor) for factor in files.decode(_LONG).tolist()],
        "short_factor": [shortest(factor) for factor in files.decode(_SHORT).tolist()],
        "original_max_position_embeddings": original,
    }
    stretch = keys.count("context_length") / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    stated = keys.number("rope.scaling.attn_factor", usual)
    if not math.isclose(stated, usual, rel_tol=_TOLERANCE):
        found["attention_factor"] = stated
    return found


def _llama3(files: GgufFiles, factors: list[float], theta: float, dim: int) -> dict[str, Any]:
    """Llama 3's scheme from its factors, which are all that the file has of it."""
    wavelengths = (2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).tolist()
    factor = shortest(max(factors))
    if len(factors) == len(wavelengths) and factor > 1:
        for original, low, high in itertools.chain((_LLAMA3,), _fitted(wavelengths, factors, factor)):
            expected = [_llama3_factor(original / length, factor, low, high) for length in wavelengths]
            pairs = zip(factors, expected, strict=True)
            if all(math.isclose(found, wanted, rel_tol=_TOLERANCE) for found, wanted in pairs):
                return llama3_scaling(factor, low, high, original)
    raise ModelLoadError(
        f"{files.path}: tensor {FREQUENCY_FACTORS} holds {len(factors)} factors of 1 to {factor:g}; expected those of "
        f"Llama 3's rotary scheme for heads of {dim}"
    )


def _llama3_factor(turns: float, factor: float, low: float, high: float) -> float:
    """What the wavelength that fits ``turns`` times into the original length is stretched by."""
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - kept) / factor + kept)


def _fitted(wavelengths: list[float], factors: list[float], factor: float) -> list[tuple[int, float, float]]:
    """Settings that give the factors between 1 and ``factor``: what is kept falls linearly with the turns."""
    original = _LLAMA3[0]
    band = [
        (original / length, (1 / found - 1 / factor) / (1 - 1 / factor))
        for length, found in zip(wavelengths, factors, strict=True)
        if 1 < found < factor
    ]
    if len(band) < 2:
        return []
    (turns, kept), (fewer_turns, less_kept) = band[0], band[-1]
    slope = (kept - less_kept) / (turns - fewer_turns)
    if slope <= 0:
        return []
    low = turns - kept / slope
    if low <= 0:
        return []
    ratio = (low + 1 / slope) / low
    # Only the lengths at the band's ends count: 1 turn at the lower end, if that is a whole length.
    return [
        (max(1, round(original / low)), 1.0, _rounded(ratio)),
        (original, _rounded(low), _rounded(low * ratio)),
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
