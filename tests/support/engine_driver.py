"""Drives a ``ModelEngine`` by hand: builds rows and shuffled block tables, and keeps every logits row."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.core.request import LlmRequest, StopConditions
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.model_engine.model_backend import Implementations
from backend_engine.model_engine.model_engine import ModelEngine
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.model_engine.model_loader import load_model
from tests.support.attention_cache import spoil

MAX_SEQ_LEN = 160


def new_request(request_id: int, prompt: Sequence[int]) -> LlmRequest:
    """A request as the executor would hold it."""
    return LlmRequest(request_id, list(prompt), SamplingParams(), StopConditions(1000), lambda output: None)


class EngineDriver:
    """An engine over ``num_blocks`` blocks that are handed out in random order, unused places filled with NaN."""

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        tokens_per_block: int = 8,
        num_blocks: int = 100,
        max_attention_window: tuple[int, ...] | None = None,
        model_backend: str = "auto",
        kv_dtype: str | None = None,
        operators: str = "native",
        record_layers: bool = True,
        weight_only_precision: str = "auto",
    ) -> None:
        loaded = load_model(
            folder,
            dtype,
            "cpu",
            Implementations(operators=operators, weight_only_precision=weight_only_precision),
            max_attention_window=max_attention_window,
            model_backend=model_backend,
        )
        self.pool = KVPool(
            loaded.traits.cache_specs,
            num_blocks,
            tokens_per_block,
            KV_DTYPES[kv_dtype or dtype],
            loaded.options.device,
        )
        spoil(self.pool.tensors)
        self.engine = ModelEngine(loaded, self.pool, EngineLimits(8, 256, MAX_SEQ_LEN), record_layers)
        self.traits = loaded.traits
        self._free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self._blocks: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def add(self, request_id: int, prompt: Sequence[int]) -> LlmRequest:
        """A new request with blocks for ``MAX_SEQ_LEN`` tokens."""
        count = -(-MAX_SEQ_LEN // self.pool.tokens_per_block)
        self._blocks[request_id] = [self._free.pop() for _ in range(count)]
        self.logits[request_id] = []
        return new_request(request_id, prompt)

    def step(self, context: Sequence[tuple[LlmRequest, int]] = (), generation: Sequence[LlmRequest] = ()) -> None:
        """Compute ``num_tokens`` of each context request and one of each generation request; take greedy tokens."""
        rows = [self._row(request, num_tokens) for request, num_tokens in context]
        output = SchedulerOutput(0, tuple(rows), tuple(self._row(request, 1) for request in generation))
        tables = np.array([self._blocks[row.request.request_id] for row in output.rows], np.int32)
        logits = self.engine.forward(output, tables).next_token
        assert logits.shape == (len(output.logits_rows), self.engine.vocab_size)
        assert logits.dtype == torch.float32
        for row, values in zip(output.logits_rows, logits, strict=True):
            self.logits[row.request.request_id].append(values.clone())
            row.request.promise()
            row.request.append_token(int(values.argmax()))

    def _row(self, request: LlmRequest, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        request.advance(num_tokens)
        return ScheduledRequest(request, start, num_tokens, start + num_tokens == request.num_tokens)

    def generate(self, request: LlmRequest, num_tokens: int, chunk: int = 10_000) -> list[int]:
        """Context in chunks of ``chunk`` tokens, then one token a step until there are ``num_tokens``."""
        while len(request.output_token_ids) < num_tokens:
            if request.in_context_phase:
                self.step(context=[(request, min(chunk, request.num_pending_tokens))])
            else:
                self.step(generation=[request])
        return request.output_token_ids
