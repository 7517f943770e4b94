"""``PagedStep``: attention of a transformers model over our paged cache, one call of its interface after another.

``TransformersModel`` owns one and hands it to every module that attends; ``paged_attention`` is the function that these
modules call. It decides nothing: what each call is, was learnt at load by ``recording.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.attention.paged_kv import PagedKv
from backend_engine.layers.parts import LayerCache

# Under this name the function is registered with transformers.
PAGED = "inflight_paged"
# Name of the attribute by which a module that attends finds its step.
STEP = "inflight_step"


@dataclass(frozen=True)
class PagedCall:
    """One call of the interface in a forward pass. ``value_dim``: width of the values that the module hands over; keys,
    values and queries are padded with zeros to ``spec.head_dim`` where they are narrower.
    """

    module: nn.Module
    spec: AttentionSpec
    key_dim: int
    value_dim: int


class PagedStep:
    """Answers the calls of one forward pass in the order in which they were recorded. Serves one thread."""

    def __init__(self, calls: Sequence[PagedCall], backend: AttentionBackend, dtype: torch.dtype) -> None:
        """``dtype``: of queries, keys and values; others are converted."""
        self._calls = tuple(calls)
        self._backend = backend
        self._dtype = dtype
        self._caches: Sequence[LayerCache] = ()
        self._next = 0

    def begin(self, caches: Sequence[LayerCache]) -> None:
        """Start a forward pass over ``caches``, one for each call."""
        assert len(caches) == len(self._calls), (len(caches), len(self._calls))
        self._caches = caches
        self._next = 0

    def end(self) -> None:
        """Let go of the caches; every call must have come."""
        assert self._next == len(self._calls), f"{self._next} of {len(self._calls)} calls of attention came"
        self._caches = ()

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """q ``[1, num_heads, num_tokens, key_dim]``, k and v alike -> ``[1, num_tokens, num_heads, value_dim]``."""
        index = self._next
        call = self._calls[index]
        assert call.module is module, f"call {index} of attention comes from another module than at load"
        self._next = index + 1
        spec, cache = call.spec, self._caches[index]
        assert isinstance(cache, PagedKv), f"call {index} has no cache of keys and values"
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        width = spec.head_dim
        if call.key_dim < width:
            q, k = F.pad(q, (0, width - call.key_dim)), F.pad(k, (0, width - call.key_dim))
        if call.value_dim < width:
            v = F.pad(v, (0, width - call.value_dim))
        q, k, v = (x.to(self._dtype) for x in (q, k, v))
        out = self._backend.forward(q, k, v, spec, cache, sinks)
        return out[None, :, :, : call.value_dim] if call.value_dim < width else out.unsqueeze(0)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What a module of transformers calls in place of its own attention."""
    out = getattr(module, STEP).attend(module, query, key, value, kwargs.get("s_aux"))
    return (out if out.dtype == query.dtype else out.to(query.dtype)), None
