"""Recurrent states in blocks through the whole engine, step by step: whatever happens to requests, each gets the
answer, and the logits, that it gets alone. The pool starts full of NaN, so a state that nobody has written shows.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend_engine import KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.config.engine_args import EngineArgs
from backend_engine.core.outputs import RequestOutput
from backend_engine.core.request import LlmRequest, StopConditions
from backend_engine.executor.build import create_engine
from tests.support.tiny_models import build_tiny_model

MAX_SEQ_LEN = 160
NUM_REQUESTS = 20
NAMES = ("mamba2", "granite_hybrid")


@dataclass
class Answer:
    """What one request got so far."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    final: RequestOutput | None = None

    def __call__(self, output: RequestOutput) -> None:
        assert self.final is None, "an output after the final one"
        self.token_ids += output.token_ids
        if output.generation_logits is not None:
            self.logits += list(output.generation_logits)
        if output.finished:
            self.final = output


class Machine:
    """An engine whose steps the test makes; nothing runs beside them."""

    def __init__(self, folder: Path, scheduler: dict[str, Any], kv_cache: dict[str, Any]) -> None:
        args = EngineArgs(
            str(folder),
            max_seq_len=MAX_SEQ_LEN,
            scheduler_config=SchedulerConfig(**scheduler),
            kv_cache_config=KvCacheConfig(**kv_cache),
            num_threads=1,
        )
        self.executor, _, self.config = create_engine(args)
        for tensor in self.executor._model_engine._pool.tensors:
            tensor.fill_(float("nan"))
        self._next_id = 1

    def submit(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, Answer]:
        params = SamplingParams(max_tokens=num_tokens, return_generation_logits=True)
        answer = Answer()
        request = LlmRequest(self._next_id, list(prompt), params, StopConditions(num_tokens), answer)
        self._next_id += 1
        self.executor.enqueue([request])
        return request.request_id, answer

    def run(self) -> None:
        for _ in range(5000):
            if not self.executor.step() and self.executor.stats().num_active == 0:
                return
        raise AssertionError("not done after 5000 steps")


@dataclass(frozen=True)
class Work:
    """``prompt`` arrives before step ``arrival``; it is cancelled ``cancelled_after`` steps later, if at all."""

    arrival: int
    prompt: list[int]
    num_tokens: int
    cancelled_after: int | None


def workload(seed: int) -> list[Work]:
    """Texts that share beginnings of many lengths, some with earlier answers' whole prompts."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 96) for _ in range(90)]
    works: list[Work] = []
    for _ in range(NUM_REQUESTS):
        shared = rng.choice([0, 8, 23, 48, 64, 90])
        prompt = stem[:shared] + [rng.randrange(3, 96) for _ in range(rng.choice([1, 2, 5, 16, 33]))]
        if works and rng.random() < 0.2:
            prompt = rng.choice(works).prompt[:]
        cancelled_after = rng.randrange(12) if rng.random() < 0.2 else None
        works.append(Work(rng.randrange(60), prompt, rng.choice([1, 4, 14, 25]), cancelled_after))
    return sorted(works, key=lambda work: work.arrival)


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent") / request.param
    build_tiny_model(request.param, path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[dict[int, list[Answer]]]:
    """The answers to each workload, one request after the other, in one piece, without reuse."""
    answers: dict[int, list[Answer]] = {}
    machine = Machine(folder, {"max_batch_size": 1}, {"tokens_per_block": 32, "enable_block_reuse": False})
    for seed in range(2):
        answers[seed] = []
        for work in workload(seed):
            answers[seed].append(machine.submit(work.prompt, work.num_tokens)[1])
            machine.run()
    yield answers


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pauses in a small pool": (
        {"max_batch_size": 6, "max_num_tokens": 24, "capacity_policy": "max_utilization"},
        {"tokens_per_block": 8, "max_tokens": 8 * 24},
    ),
    "blocks of one token": (
        {"max_batch_size": 5, "max_num_tokens": 40, "capacity_policy": "max_utilization"},
        {"tokens_per_block": 1, "max_tokens": 200},
    ),
    "chunks that fit no block": (
        {
            "max_batch_size": 5,
            "max_num_tokens": 17,
            "chunk_unit_size": 3,
            "context_chunking_policy": "equal_progress",
            "capacity_policy": "max_utilization",
        },
        {"tokens_per_block": 5, "max_tokens": 5 * 40},
    ),
    "whole prompts": ({"max_batch_size": 4, "enable_chunked_context": False}, {"tokens_per_block": 16}),
    "contiguous": ({"max_batch_size": 4, "max_num_tokens": 30}, {"layout": "contiguous"}),
    "the blocks that are chosen": ({"max_batch_size": 4, "max_num_tokens": 30}, {}),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_random_mix_is_answered_as_if_alone(
    folder: Path, alone: dict[int, list[Answer]], name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CHECK_INVARIANTS", "1")
    scheduler, kv_cache = SETTINGS[name]
    machine = Machine(folder, scheduler, kv_cache)
    works = workload(seed)
    answers: list[Answer] = []
    cancels: dict[int, list[int]] = {}
    for step in range(100):
        while len(answers) < len(works) and works[len(answers)].arrival == step:
            work = works[len(answers)]
            request_id, answer = machine.submit(work.prompt, work.num_tokens)
            answers.append(answer)
            if work.cancelled_after is not None:
                cancels.setdefault(step + work.cancelled_after, []).append(request_id)
        for request_id in cancels.get(step, []):
            machine.executor.cancel(request_id)
        machine.executor.step()
    machine.run()
    for work, answer, expected in zip(works, answers, alone[seed], strict=True):
        assert answer.final is not None and answer.final.error is None, answer.final
        if work.cancelled_after is None:
            assert len(answer.token_ids) == work.num_tokens
        num_tokens = len(answer.token_ids)
        assert answer.token_ids == expected.token_ids[:num_tokens]
        if num_tokens:
            found, wanted = np.stack(answer.logits), np.stack(expected.logits[:num_tokens])
            np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)
    stats = machine.executor.stats()
    assert stats.kv_used_blocks == 0
    if machine.config.kv_cache.max_tokens is not None:
        assert stats.num_paused_total > 0, "the pool is too large for this test"
    if machine.config.tokens_per_block < 20:
        hits = {answer.final.usage.num_cached_tokens for answer in answers if answer.final and answer.final.usage}
        assert len(hits - {0}) >= 3, f"beginnings of only these lengths were reused: {hits}"


def test_the_chosen_blocks_hold_as_much_for_tokens_as_for_states(folder: Path) -> None:
    machine = Machine(folder, {}, {})
    layers = machine.executor._model_engine._pool.layers
    num_bytes = [sum(t[0].nbytes for t in layer) if isinstance(layer, tuple) else layer[0].nbytes for layer in layers]
    states = sum(n for n, layer in zip(num_bytes, layers, strict=True) if isinstance(layer, tuple))
    size = machine.config.tokens_per_block
    if states == sum(num_bytes):
        assert size == 32  # a longest request fills at most 16
    else:
        token_bytes = (sum(num_bytes) - states) // size
        assert (size - 32) * token_bytes < states <= size * token_bytes and size % 32 == 0


def test_two_requests_go_on_from_one_state_that_stays_as_it_was(folder: Path) -> None:
    """The blocks of a common beginning are computed once, then read by others that write only their own."""
    machine = Machine(folder, {"max_batch_size": 4}, {"tokens_per_block": 8})
    rng = random.Random(5)
    stem = [rng.randrange(3, 96) for _ in range(24)]
    machine.submit([*stem, 7], 1)
    machine.run()
    states = [t for layer in machine.executor._model_engine._pool.layers if isinstance(layer, tuple) for t in layer]
    written = [i for i in range(states[0].shape[0]) if not states[0][i].isnan().any()]
    assert len(written) == 4
    before = [t[written].clone() for t in states]
    answers = [machine.submit(stem + tail, 6)[1] for tail in ([9, 4], [11], [5] * 30)]
    machine.run()
    assert [answer.final.usage.num_cached_tokens for answer in answers if answer.final and answer.final.usage] == [
        24
    ] * 3
    unchanged = [
        i for i in range(4) if all(torch.equal(kept[i], t[written[i]]) for kept, t in zip(before, states, strict=True))
    ]
    assert len(unchanged) >= 3, f"of the 4 blocks of the first request only {unchanged} still hold their states"
