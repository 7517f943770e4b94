"""What transformers knows and what its configurations say, and the form of a refusal.

Used by the transformers room and by the model loader when it chooses a backend. Loads no model.
"""

import difflib
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from backend_engine.errors import ModelLoadError


def causal_lm_names() -> frozenset[str]:
    """Model classes that transformers has as causal language models."""
    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def nearest_causal_lm(architecture: str) -> str | None:
    """The name among them that looks most like ``architecture``; ``None`` when none does."""
    return next(iter(difflib.get_close_matches(architecture, sorted(causal_lm_names()), n=1)), None)


def max_positions(config: Any) -> int | None:
    """``max_position_embeddings`` of a transformers configuration, by whatever name it has it."""
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def exact_up_to(config: Any) -> int | None:
    """Length from which a text changes the rotary frequencies of all its tokens, and of its neighbours in a step, as
    the rope types ``dynamic`` and ``longrope`` of transformers do; ``None`` = none does.
    """
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append(rope.get("original_max_position_embeddings") or text_config.max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(text_config.max_position_embeddings)
    return min(limits, default=None)


def longest_text(config: Any) -> int | None:
    """Tokens of the longest text that can be served; ``None`` when the configuration states no limit."""
    return min((n for n in (max_positions(config), exact_up_to(config)) if n is not None), default=None)


def one_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def refuse(model: nn.Module | str, reason: str) -> ModelLoadError:
    """The error for a model that cannot be run here; the caller raises it."""
    name = model if isinstance(model, str) else type(model).__name__
    return ModelLoadError(f"transformers' {name} cannot be run on the paged cache: {reason}")
