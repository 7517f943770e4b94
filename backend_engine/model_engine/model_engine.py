"""``ModelEngine``: one step's rows in, logits out. Owns the inputs' buffers; runs model, attention and KV pool.

Called by the executor thread alone. Never looks at a request beyond its token ids, and decides nothing.
"""

from collections.abc import Mapping, Sequence

import torch

from backend_engine.attention.interface import IntArray
from backend_engine.attention.paged_kv import KvScales, paged_kv
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.kv_spec import CacheSpec, StateSpec
from backend_engine.errors import ConfigError
from backend_engine.kv_cache.kv_pool import KVPool, LayerTensors
from backend_engine.layers.parts import LayerCache
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.model_engine.model_inputs import EngineLimits, ModelInputsBuilder
from backend_engine.model_engine.recorded_layers import RecordedLayers, record_layers
from backend_engine.models.causal_lm import CausalLM
from backend_engine.ops.step_logits import StepLogits


class ModelEngine:
    """Runs ``loaded`` over ``pool`` for steps within ``limits``."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        limits: EngineLimits,
        records_layers: bool = True,
        is_batch_invariant: bool = False,
    ) -> None:
        """records_layers: whether the layers become one call where they can (``recorded_layers.py``).
        is_batch_invariant: whether a token's logits have to have the same bits whatever is computed beside it; layers
        that can be recorded give that.

        Raises ``ConfigError`` where that cannot be had, and when ``max_seq_len`` goes beyond what the model's positions
        allow.
        """
        exact_up_to = loaded.traits.exact_up_to
        if exact_up_to is not None and limits.max_seq_len > exact_up_to:
            raise ConfigError(
                f"max_seq_len {limits.max_seq_len} is out of range; the positions of this model (a learned table, or "
                f"rope_type 'dynamic') serve up to max_position_embeddings {exact_up_to}"
            )
        self._loaded = loaded
        # Held, since the caches are views of its tensors.
        self._pool = pool
        self._caches = layer_caches(loaded.traits.cache_specs, pool.layers, loaded.kv_scales)
        self._inputs = ModelInputsBuilder(limits, pool.tokens_per_block, loaded.options.device)
        self.recorded_layers: RecordedLayers | None = None
        if records_layers:
            self._record_layers(limits.max_num_tokens)
        if is_batch_invariant and self.recorded_layers is None:
            raise ConfigError(
                "batch_invariant true cannot be had: the layers of this model are not, on this machine and with these "
                "parameters, native operations alone; leave it unset or false"
            )

    @torch.inference_mode()
    def _record_layers(self, max_num_tokens: int) -> None:
        self.recorded_layers = record_layers(self._loaded, self._caches, self._pool, max_num_tokens)
        if self.recorded_layers is not None and isinstance(self._loaded.model, CausalLM):
            self._loaded.model.run_by(self.recorded_layers)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._loaded.traits.vocab_size

    @torch.inference_mode()
    def forward(self, output: SchedulerOutput, block_tables: IntArray) -> StepLogits:
        """Compute the rows, writing their keys and values into their blocks.

        ``block_tables``: int32 ``[batch_size, max_blocks]``, aligned with ``output.rows``.
        """
        inputs = self._inputs.build(output, block_tables)
        self._loaded.attention.prepare(inputs.attention)
        logits: torch.Tensor = self._loaded.model(inputs, self._caches)
        num_next = len(output.logits_rows)
        if not inputs.context_logits:
            return StepLogits(logits)
        parts = torch.split(logits[num_next:], [count for _, count in inputs.context_logits])
        context = zip((request_id for request_id, _ in inputs.context_logits), parts, strict=True)
        return StepLogits(logits[:num_next], tuple(context))


def layer_caches(
    specs: Sequence[CacheSpec], layers: Sequence[LayerTensors], kv_scales: Mapping[int, KvScales]
) -> list[LayerCache]:
    """The pool's layers as models take them, in order; ``kv_scales``: see ``LoadedModel``."""
    caches: list[LayerCache] = []
    for i, (spec, layer) in enumerate(zip(specs, layers, strict=True)):
        if isinstance(spec, StateSpec):
            assert isinstance(layer, tuple), f"layer {i} keeps a state in one tensor"
            caches.append(layer)
        else:
            caches.append(paged_kv(layer, kv_scales.get(i, KvScales())))
    return caches
