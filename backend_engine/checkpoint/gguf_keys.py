"""``ModelKeys``: the metadata of a GGUF file's model, below the name of its architecture.

Used by what translates it (``gguf_config.py``, ``gguf_rope.py``). Remembers what was read, so that a key that nobody
knows, and that might mean another model, is refused.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from backend_engine.config.gguf_metadata import GgufHeader
from backend_engine.errors import ModelLoadError

# Keys that change what the model computes, each with the values with which they do not.
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
# Keys without a say in it. How many tokens there are is what the embedding has.
_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})


class ModelKeys:
    """Keys are given without the prefix. ``architecture``: what the file calls it (``llama``, ``qwen3moe``)."""

    def __init__(self, header: GgufHeader) -> None:
        self.architecture = header.text("general.architecture")
        self._header = header
        self._read: set[str] = set()

    def refuse(self, key: str, allowed: str) -> ModelLoadError:
        """The error for a value that is not allowed (or missing); the caller raises it."""
        return self._header.refuse(self._full(key), allowed)

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._header

    def get(self, key: str) -> Any:
        """The value as it is; ``None`` when absent. A list of one and the same value for all layers is that value."""
        self._read.add(key)
        value = self._header.get(self._full(key))
        return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value

    def count(self, key: str, default: int | None = None, low: int = 1) -> int:
        """An integer of at least ``low``; without a default it must be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refuse(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without a default it must be there. One that was rounded to float32 is the shortest decimal
        that is rounded to it: 1e-05, not 9.999999747378752e-06.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refuse(key, "a number")
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``false``."""
        self._read.add(key)
        return self._header.flag(self._full(key), default)

    def check_rest(self) -> None:
        """Refuse keys that nobody read and that might mean another model."""
        prefix = self.architecture + "."
        for key in (full.removeprefix(prefix) for full in self._header if full.startswith(prefix)):
            if key in self._read or key in _HARMLESS:
                continue
            if self.get(key) not in _NEUTRAL.get(key, ()):
                allowed = " or ".join(repr(value) for value in _NEUTRAL.get(key, ())) or "no such key"
                raise self.refuse(key, allowed)

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def shortest(value: float) -> float:
    """The shortest decimal that float32 rounds to ``value``; ``value`` itself where it is no float32."""
    single = np.float32(value) if abs(value) <= np.finfo(np.float32).max else None
    return float(str(single)) if single is not None and float(single) == value else float(value)
