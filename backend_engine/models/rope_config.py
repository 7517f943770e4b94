"""Rotary settings of config.json, in both spellings, as a ``RopeDecl``.

transformers 5 writes ``rope_parameters`` (with ``rope_theta`` inside); earlier ones ``rope_theta`` and
``rope_scaling`` (whose kind may be called ``type``). Used by the model families.
"""

import math
from collections.abc import Mapping

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    RopeDecl,
    RopeScaling,
    YarnScaling,
)

_KNOWN = "default, linear, dynamic, llama3, yarn or longrope"
_MOST_TURNS = 1e6
_SETTINGS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "low_freq_factor",
        "high_freq_factor",
        "short_factor",
        "long_factor",
        "partial_rotary_factor",
    }
)


def read_rope(
    config: HfConfig,
    head_dim: int,
    max_positions: int,
    *,
    default_theta: float = 10000.0,
    default_partial: float | None = None,
    default_original: int | None = None,
    aliases: Mapping[str, str] | None = None,
    is_interleaved: bool = False,
) -> RopeDecl:
    """Read the rotary settings of the whole model. An unknown kind, or a value out of range, is a ``ModelLoadError``
    naming it. default_partial: share of a head that is rotated when none is stated; ``None`` for a model that always
    rotates all of it. default_original: length that a stretched model was first made for when none is stated,
    ``None`` = max_positions. aliases: what the family means by the name of a kind, where that differs.
    """
    theta = config.number("rope_theta", default_theta)
    if default_partial is None:
        config.require_neutral({"partial_rotary_factor": (1,)})
    dim = _rotated_dim(config, head_dim, head_dim * (default_partial or 1.0))
    settings = config.section("rope_scaling") or config.section("rope_parameters")
    if settings is None:
        return RopeDecl(theta, NoScaling(), dim, is_interleaved)
    theta = settings.number("rope_theta", theta)
    if default_partial is None:
        settings.require_neutral({"partial_rotary_factor": (1,)})
    dim = _rotated_dim(settings, head_dim, dim)
    original = config.get("original_max_position_embeddings")
    original_max_positions = (
        settings.integer("original_max_position_embeddings", default_original or max_positions)
        if original is None
        else config.integer("original_max_position_embeddings")
    )
    scaling, exact_up_to = _read_scaling(settings, theta, dim, original_max_positions, max_positions, aliases or {})
    return RopeDecl(theta, scaling, dim, is_interleaved, exact_up_to)


def read_ropes(
    config: HfConfig, head_dim: int, max_positions: int, default_thetas: Mapping[str, float]
) -> dict[str, RopeDecl]:
    """Read the rotary settings of each kind of layer, ``full_attention`` and ``sliding_attention``, of a model whose
    layers with a window have a scheme of their own: by kind in ``rope_parameters``, or in the earlier spelling that has
    ``rope_local_base_freq`` for it.
    """
    by_kind = config.section("rope_parameters")
    if by_kind is not None and any(kind in by_kind for kind in default_thetas):
        ropes = {
            kind: _read_settings(by_kind.section(kind), head_dim, max_positions, theta)
            for kind, theta in default_thetas.items()
        }
        by_kind.require_neutral(dict.fromkeys(by_kind.unread(), ()))
        return ropes
    full = read_rope(config, head_dim, max_positions, default_theta=default_thetas["full_attention"])
    local_theta = config.number("rope_local_base_freq", default_thetas["sliding_attention"])
    return {"full_attention": full, "sliding_attention": RopeDecl(local_theta, NoScaling(), head_dim)}


def _read_settings(settings: HfConfig | None, head_dim: int, max_positions: int, default_theta: float) -> RopeDecl:
    """The rotary settings of one kind of layer; ``None`` = the usual."""
    if settings is None:
        return RopeDecl(default_theta, NoScaling(), head_dim)
    theta = settings.number("rope_theta", default_theta)
    settings.require_neutral({"partial_rotary_factor": (1,)})
    original = settings.integer("original_max_position_embeddings", max_positions)
    scaling, exact_up_to = _read_scaling(settings, theta, head_dim, original, max_positions, {})
    return RopeDecl(theta, scaling, head_dim, exact_up_to=exact_up_to)


def _rotated_dim(config: HfConfig, head_dim: int, default: float) -> int:
    partial = config.number("partial_rotary_factor", default / head_dim)
    dim = int(head_dim * partial)
    if not 0 < partial <= 1 or dim % 2 or not dim:
        raise config.refuse(
            "partial_rotary_factor", f"a share of head_dim {head_dim} that is an even number of elements"
        )
    return dim


def _read_scaling(
    settings: HfConfig,
    theta: float,
    dim: int,
    original_max_positions: int,
    max_positions: int,
    aliases: Mapping[str, str],
) -> tuple[RopeScaling, int | None]:
    """The scheme of ``rope_scaling`` or ``rope_parameters``, and the length up to which it is what the model knows."""
    key = "type" if settings.get("rope_type") is None and settings.get("type") is not None else "rope_type"
    kind = settings.get(key)
    if isinstance(kind, str):
        kind = aliases.get(kind, kind)
    unknown = sorted(set(settings.unread()) - _SETTINGS)
    if unknown:
        raise settings.refuse(unknown[0], "no such key")
    if kind == "default" or (kind is None and settings.get("factor") is None and settings.get("rope_theta")):
        return NoScaling(), None
    if kind == "linear":
        return LinearScaling(settings.number("factor")), None
    if kind == "dynamic":
        # The frequencies only change once a text is longer than the model was made for.
        settings.number("factor")
        return NoScaling(), max_positions
    if kind == "llama3":
        low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
        if high <= low:
            raise settings.refuse("high_freq_factor", f"a number above low_freq_factor, {low}")
        return Llama3Scaling(settings.number("factor"), low, high, original_max_positions), None
    if kind == "yarn":
        if theta <= 1:
            raise settings.refuse("rope_theta", f"a number above 1 with yarn (it is {theta})")
        return _yarn(settings, original_max_positions, max_positions), None
    if kind in ("longrope", "su"):
        return _longrope(settings, dim, original_max_positions, max_positions), None
    raise settings.refuse(key, _KNOWN)


def _yarn(settings: HfConfig, original_max_positions: int, max_positions: int) -> YarnScaling:
    factor = settings.number("factor", max_positions / original_max_positions)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        attention_factor = yarn_temperature(factor, settings.number("mscale"))
        attention_factor /= yarn_temperature(factor, settings.number("mscale_all_dim"))
    else:
        attention_factor = yarn_temperature(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_positions=original_max_positions,
        attention_factor=settings.number("attention_factor", attention_factor),
        beta_fast=_turns(settings, "beta_fast", 32.0),
        beta_slow=_turns(settings, "beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
    )


def _turns(settings: HfConfig, key: str, default: float) -> float:
    turns = settings.number(key, default)
    if not 1 / _MOST_TURNS <= turns <= _MOST_TURNS:
        raise settings.refuse(key, f"a number from {1 / _MOST_TURNS} to {_MOST_TURNS}")
    return turns


def yarn_temperature(factor: float, weight: float) -> float:
    """What YaRN multiplies cosine and sine with, for a context stretched by ``factor``."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(settings: HfConfig, dim: int, original_max_positions: int, max_positions: int) -> LongRopeScaling:
    factor = settings.number("factor", max_positions / original_max_positions)
    if original_max_positions < 2:
        raise settings.refuse("original_max_position_embeddings", "an integer of at least 2 with longrope")
    default = math.sqrt(1 + math.log(factor) / math.log(original_max_positions)) if factor > 1 else 1.0
    return LongRopeScaling(
        settings.numbers("short_factor", dim // 2),
        settings.numbers("long_factor", dim // 2),
        original_max_positions,
        settings.number("attention_factor", default),
    )
