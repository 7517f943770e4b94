"""``TransformersModel``: any causal language model that transformers runs, on our scheduler and our paged cache.

Built while a model is loaded, for architectures without a family file or when asked for. The modules are transformers'
own; attention goes through its attention interface to our backend. Whether a model can be run so is found out before.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.core.kv_spec import KvSpec
from backend_engine.layers.parts import LayerCache
from backend_engine.models.model_inputs import ModelInputs
from backend_engine.models.model_traits import ModelTraits
from backend_engine.models.transformers_room.facts import exact_up_to
from backend_engine.models.transformers_room.paged_attention import PAGED, STEP, PagedCall, PagedStep, paged_attention
from backend_engine.models.transformers_room.recording import (
    RECORDING,
    AttentionCall,
    recording_attention,
    recording_mask,
)


def register_attention() -> None:
    """Make our attention functions known to transformers, by name; they hold nothing. Safe to call again."""
    AttentionInterface.register(RECORDING, recording_attention)
    AttentionMaskInterface.register(RECORDING, recording_mask)
    # Without a mask function of this name, transformers builds no mask.
    AttentionInterface.register(PAGED, paged_attention)


def attention_specs(calls: Sequence[AttentionCall], max_windows: tuple[int, ...] = ()) -> tuple[AttentionSpec, ...]:
    """The calls as layers. ``max_windows``: upper bounds of their windows, repeated over the layers."""
    bounds = [max_windows[i % len(max_windows)] if max_windows else None for i in range(len(calls))]
    return tuple(
        AttentionSpec(
            layer_idx=i,
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=max(call.key_dim, call.value_dim),
            scale=call.scale,
            sliding_window=min((w for w in (call.window, bounds[i]) if w is not None), default=None),
            logit_softcap=call.softcap,
            has_sinks=call.has_sinks,
        )
        for i, call in enumerate(calls)
    )


class TransformersModel(nn.Module):
    """``model`` (with the attention implementation ``PAGED``) as ``ModelEngine`` calls it; serves one thread.

    ``calls``, ``specs``: its calls of attention, in order. ``vocab_size``: width of the logits. ``dtype``: of
    queries, keys and values.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[AttentionCall],
        specs: Sequence[AttentionSpec],
        backend: AttentionBackend,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        self.backend = backend
        self.attention_specs = tuple(specs)
        paged = [
            PagedCall(call.module, spec, call.key_dim, call.value_dim) for call, spec in zip(calls, specs, strict=True)
        ]
        self._step = PagedStep(paged, backend, dtype)
        for call in calls:
            setattr(call.module, STEP, self._step)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def traits(self) -> ModelTraits:
        """What the rest of the engine has to know; every call of attention has a cache of its own."""
        return ModelTraits(
            vocab_size=self.vocab_size,
            cache_specs=tuple(KvSpec(spec.num_kv_heads, spec.head_dim) for spec in self.attention_specs),
            attention_specs=self.attention_specs,
            exact_up_to=exact_up_to(self.model.config),
        )

    def forward(self, inputs: ModelInputs, caches: Sequence[LayerCache]) -> Tensor:
        """All rows as one sequence -> float32 logits ``[num_logits, vocab_size]`` of ``inputs.logits_indices``.

        The attention backend must have been prepared for this step. ``caches``: the pool, call by call.
        """
        wanted = inputs.logits_indices.to(torch.int64)
        self._step.begin(caches)
        logits: Tensor = self.model(
            input_ids=inputs.input_ids.to(torch.int64).unsqueeze(0),
            position_ids=inputs.position_ids.to(torch.int64).unsqueeze(0),
            use_cache=False,
            return_dict=True,
            **({"logits_to_keep": wanted} if self._keeps_logits else {}),
        ).logits.squeeze(0)
        self._step.end()
        return (logits if self._keeps_logits else logits.index_select(0, wanted)).to(torch.float32)
