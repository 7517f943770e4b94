"""``RecordedLayers``: all layers of a step as one call of the native library, on a CPU.

What a layer does is the same in each step but for the number of tokens and where their keys and values lie. So the
layers are run once while the native library keeps the operations (``ops/native_runtime.py``), and from then on that
list is run again: some hundred calls from Python become one. The counterpart of CUDA graphs. Made by ``ModelEngine``
at start; tried there against the layers themselves, and done without where the two differ or the layers do something
that is not an operation of the library.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.layers.parts import LayerCache, LayerStep
from backend_engine.logger import get_logger
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.model_inputs import ModelInputs
from backend_engine.ops.fused_ops import fuse
from backend_engine.ops.native_runtime import NativeRuntime, NativeStep, Recording, native_runtime

log = get_logger(__name__)

# Numbers of tokens: of the step that is recorded (one would leave strides open), and of those it is tried with.
_RECORDED_TOKENS = 2
_TRIED_TOKENS = (3, 1)
Ropes = tuple[tuple[Tensor, Tensor], ...]


class RecordedLayers:
    """``CausalLM.run_layers``, replayed."""

    def __init__(self, recording: Recording, runtime: NativeRuntime, step: NativeStep) -> None:
        """``step``: as the attention backend prepares it, at one address."""
        self.recording = recording
        self._runtime = runtime
        self._step = step
        self._x: Tensor | None = None
        self._ropes: Ropes = ()
        self._results: tuple[Tensor, Tensor] | None = None

    def record(self, model: CausalLM, x: Tensor, step: LayerStep) -> None:
        """Run the layers and keep what they do."""
        num_tokens = x.shape[0]
        x_in = self._input(x)
        ropes = tuple((self._input(cos), self._input(sin)) for cos, sin in step.ropes)
        with self._runtime.record(self.recording):
            results = model.run_layers(x_in[:num_tokens], step._replace(ropes=_first(ropes, num_tokens)))
        for result in results:
            self._runtime_check(result)
        if self.recording.why_not is None:
            fuse(self.recording)
            self._x, self._ropes = x_in, ropes
            self._results = (self.recording.whole(results[0]), self.recording.whole(results[1]))

    def __call__(self, x: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
        """See ``CausalLM.run_layers``; the results are valid until the next call."""
        assert self._x is not None and self._results is not None, "replayed before it was recorded"
        num_tokens = x.shape[0]
        assert self._step.num_tokens == num_tokens, (self._step.num_tokens, num_tokens)
        self._x[:num_tokens].copy_(x)
        for (cos_in, sin_in), (cos, sin) in zip(self._ropes, step.ropes, strict=True):
            cos_in[:num_tokens].copy_(cos)
            sin_in[:num_tokens].copy_(sin)
        self._runtime.replay(self.recording, self._step)
        return self._results[0][:num_tokens], self._results[1][:num_tokens]

    def profile(self, repeats: int) -> list[tuple[int, float]]:
        """Kind and mean seconds of each operation, of the step that was run last."""
        seconds = np.zeros(len(self.recording.ops))
        for _ in range(repeats):
            seconds += self._runtime.profile(self.recording, self._step)
        kinds = [int(op.kind) for op in self.recording.ops]
        return list(zip(kinds, (seconds / repeats).tolist(), strict=True))

    def _input(self, like: Tensor) -> Tensor:
        """Memory for as many tokens as may come."""
        capacity, shape = self.recording.capacity, like.shape[1:]
        return self.recording.empty(capacity, shape.numel()).view(capacity, *shape)

    def _runtime_check(self, result: Tensor) -> None:
        if not self.recording.holds(result):
            self.recording.why_not = self.recording.why_not or "the layers end with something that torch computes"


def record_layers(
    loaded: LoadedModel, caches: Sequence[LayerCache], pool: KVPool, max_num_tokens: int
) -> RecordedLayers | None:
    """The layers of ``loaded``, recorded and tried; ``None`` where that cannot be, and the log says why. Keys and
    values of a few tokens are written into the first blocks of the pool, which must be free.
    """
    model, step, runtime = loaded.model, loaded.attention.native_step, native_runtime()
    if not isinstance(model, CausalLM) or step is None or runtime is None or loaded.options.dtype != torch.float32:
        return None
    most_tokens = max(_RECORDED_TOKENS, *_TRIED_TOKENS)
    if max_num_tokens < most_tokens or pool.num_blocks * pool.tokens_per_block < most_tokens:
        return None
    recording = Recording(max_num_tokens)
    recorded = RecordedLayers(recording, runtime, step)
    recorded.record(model, *_trial(model, loaded.attention, caches, pool, _RECORDED_TOKENS))
    if recording.why_not is not None:
        log.info("chosen: layers are run operation by operation: %s", recording.why_not)
        return None
    for num_tokens in _TRIED_TOKENS:
        x, layer_step = _trial(model, loaded.attention, caches, pool, num_tokens)
        expected = model.run_layers(x, layer_step)
        if not all(torch.equal(a, b) for a, b in zip(recorded(x, layer_step), expected, strict=True)):
            log.warning("layers are run operation by operation: recorded, they give other numbers")
            return None
    log.info("chosen: layers are recorded, %d operations", len(recording.ops))
    return recorded


def _trial(
    model: CausalLM, attention: AttentionBackend, caches: Sequence[LayerCache], pool: KVPool, num_tokens: int
) -> tuple[Tensor, LayerStep]:
    """A text of ``num_tokens`` tokens in the first blocks of the pool, prepared."""
    size = pool.tokens_per_block
    positions = torch.arange(num_tokens, dtype=torch.int32)
    counts = torch.tensor([num_tokens], dtype=torch.int32)
    tables = torch.arange(-(-num_tokens // size), dtype=torch.int32).unsqueeze(0)
    metadata = AttentionMetadata(
        num_contexts=1,
        num_ctx_tokens=num_tokens,
        tokens_per_block=size,
        q_lens=counts,
        kv_lens=counts,
        block_tables=tables,
        slot_mapping=positions,
        q_lens_host=counts.numpy(),
        kv_lens_host=counts.numpy(),
        block_tables_host=tables.numpy(),
    )
    ids = positions % model.spec.vocab_size
    inputs = ModelInputs(ids, positions, counts.expand(num_tokens), positions[-1:], metadata, ())
    attention.prepare(metadata)
    return model.embed(inputs), model.layer_step(inputs, caches)


def _first(ropes: Ropes, num_tokens: int) -> Ropes:
    return tuple((cos[:num_tokens], sin[:num_tokens]) for cos, sin in ropes)
