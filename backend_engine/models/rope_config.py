"""Rotary settings of config.json, in both spellings, as a ``RopeDecl``.

transformers 5 writes ``rope_parameters`` (with ``rope_theta`` inside); earlier ones ``rope_theta`` and
``rope_scaling`` (whose kind may be called ``type``). Used by the model families.
"""

import math

from backend_engine.layers.rotary import LinearScaling, Llama3Scaling, NoScaling, YarnScaling
from backend_engine.models.arch_spec import RopeDecl
from backend_engine.models.hf_config import HfConfig

_KNOWN = "default, linear, dynamic, llama3 or yarn"


def read_rope(config: HfConfig, max_positions: int, default_theta: float = 10000.0) -> RopeDecl:
    """Read the rotary settings. An unknown kind, or a value out of range, is a ``ModelLoadError`` naming it."""
    theta = config.number("rope_theta", default_theta)
    settings = config.section("rope_scaling") or config.section("rope_parameters")
    if settings is None:
        return RopeDecl(theta, NoScaling())
    theta = settings.number("rope_theta", theta)
    key = "type" if settings.get("rope_type") is None and settings.get("type") is not None else "rope_type"
    kind = settings.get(key)
    settings.require_neutral({"partial_rotary_factor": (1, 1.0)})
    original = config.get("original_max_position_embeddings")
    original_max_positions = (
        settings.integer("original_max_position_embeddings", max_positions)
        if original is None
        else config.integer("original_max_position_embeddings")
    )
    if kind == "default" or (kind is None and settings.get("factor") is None and settings.get("rope_theta")):
        return RopeDecl(theta, NoScaling())
    if kind == "linear":
        return RopeDecl(theta, LinearScaling(settings.number("factor")))
    if kind == "dynamic":
        # The frequencies only change once a text is longer than the model was made for.
        settings.number("factor")
        return RopeDecl(theta, NoScaling(), exact_up_to=max_positions)
    if kind == "llama3":
        low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
        if high <= low:
            raise settings.refuse("high_freq_factor", f"a number above low_freq_factor, {low}")
        return RopeDecl(theta, Llama3Scaling(settings.number("factor"), low, high, original_max_positions))
    if kind == "yarn":
        return RopeDecl(theta, _yarn(settings, original_max_positions, max_positions))
    raise settings.refuse(key, _KNOWN)


def _yarn(settings: HfConfig, original_max_positions: int, max_positions: int) -> YarnScaling:
    factor = settings.number("factor", max_positions / original_max_positions)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        attention_factor = temperature(settings.number("mscale")) / temperature(settings.number("mscale_all_dim"))
    else:
        attention_factor = temperature(1.0)
    return YarnScaling(
        factor=factor,
        original_max_positions=original_max_positions,
        attention_factor=settings.number("attention_factor", attention_factor),
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
    )
