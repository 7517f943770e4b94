"""Plays the executor for tests of the scheduler and the KV cache, without threads, tensors or time.

``SimulatedMemory`` stands for the tensors: each computed token leaves a fingerprint of the whole text up to it, so a
block that was reused for another beginning, overwritten while shared or evicted too early is noticed at once.
"""

from collections import deque
from collections.abc import Iterable, Set

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.protocols import KvCapacity, PrefixMatch
from backend_engine.core.request import DEFAULT_PRIORITY, FinishReason, LlmRequest, StopConditions
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler

_PARAMS = SamplingParams()


def make_request(
    request_id: int,
    prompt: int | list[int],
    max_output_tokens: int = 4,
    *,
    arrival_time: float = 0.0,
    cache_salt: str = "",
    priority: int = DEFAULT_PRIORITY,
    params: SamplingParams = _PARAMS,
) -> LlmRequest:
    """A request; an integer prompt stands for that many tokens that no other request has."""
    tokens = [request_id * 100_000 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return LlmRequest(
        request_id, tokens, params, StopConditions(max_output_tokens), lambda output: None,
        arrival_time=arrival_time, cache_salt=cache_salt, priority=priority,
    )  # fmt: skip


class AmpleKv:
    """A cache that is never short of blocks and has nothing to reuse; counts how often it is asked for a match."""

    tokens_per_block = 16
    num_total_blocks = 1_000_000
    num_free_blocks = 1_000_000

    def __init__(self) -> None:
        self.num_matches = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def num_blocks_of(self, request_id: int) -> int:
        return 0

    def num_releasable_blocks(self, request_id: int) -> int:
        return 0

    def match_prefix(self, request: LlmRequest, claimed: Set[bytes] = frozenset()) -> PrefixMatch:
        self.num_matches += 1
        return PrefixMatch(0, 0, False)


class SimulatedMemory:
    """What the blocks hold: (block id, offset) to the fingerprint of the text up to that token."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._cells: dict[tuple[int, int], int] = {}
        self._texts: dict[int, list[int]] = {}
        self._fingerprints: dict[int, list[int]] = {}

    def run(self, output: SchedulerOutput, block_tables: dict[int, list[int]]) -> dict[int, int]:
        """Compute the rows; request id to new token for those that need logits."""
        size = self._tokens_per_block
        written: set[tuple[int, int]] = set()
        tokens: dict[int, int] = {}
        for row in output.rows:
            request_id, table = row.request.request_id, block_tables[row.request.request_id]
            self._learn(row.request)
            end = row.start + row.num_tokens
            for position in range(row.start, end):
                cell = (table[position // size], position % size)
                assert cell not in written, f"request {request_id} writes {cell}, which is written in this step already"
                written.add(cell)
                self._cells[cell] = self._fingerprints[request_id][position]
        for row in output.rows:
            request_id, table = row.request.request_id, block_tables[row.request.request_id]
            end = row.start + row.num_tokens
            seen = [self._cells.get((table[p // size], p % size)) for p in range(end)]
            assert seen == self._fingerprints[request_id][:end], f"request {request_id} reads what is not its text"
            if row.needs_logits:
                assert end == len(self._texts[request_id]), (end, row.request)
                tokens[request_id] = next_token(self._texts[request_id])
                self._append(request_id, row.request.cache_salt, [tokens[request_id]])
        return tokens

    def _learn(self, request: LlmRequest) -> None:
        if request.request_id not in self._texts:
            self._texts[request.request_id] = []
            self._fingerprints[request.request_id] = []
            self._append(request.request_id, request.cache_salt, request.prompt_token_ids)

    def _append(self, request_id: int, salt: str, token_ids: Iterable[int]) -> None:
        fingerprints = self._fingerprints[request_id]
        for token_id in token_ids:
            fingerprints.append(hash((fingerprints[-1] if fingerprints else salt, token_id)))
            self._texts[request_id].append(token_id)


def next_token(token_ids: list[int]) -> int:
    """The simulated model; few different tokens, so that texts meet again."""
    return hash(tuple(token_ids)) % 7


class Driver:
    """Runs ``RequestScheduler`` with a ``KVCacheManager``, or with any other ``KvCapacity`` and no memory.

    ``depth`` steps may be on their way before the tokens of the oldest are known.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        kv: KvCapacity,
        *,
        depth: int = 1,
        check: bool = True,
        memory: SimulatedMemory | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.manager = kv if isinstance(kv, KVCacheManager) else None
        self.memory = memory or SimulatedMemory(kv.tokens_per_block)
        self.requests: dict[int, LlmRequest] = {}
        self.steps: list[SchedulerOutput] = []
        self.num_paused = 0
        self._depth = depth
        self._check = check
        self._launched: deque[tuple[SchedulerOutput, dict[int, int]]] = deque()

    def add(self, *requests: LlmRequest) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.scheduler.add(request)
        self.check_integrity()

    def cancel(self, request: LlmRequest) -> None:
        """End a request wherever it is."""
        request.finish(FinishReason.CANCELLED)
        self._forget(request)
        self.check_integrity()

    def step(self) -> SchedulerOutput:
        before = [(r, r.num_computed_tokens, r.num_tokens) for r in self.requests.values()] if self._check else []
        output = self.scheduler.schedule(self.kv)
        for request, num_computed, num_tokens in before:
            assert (request.num_computed_tokens, request.num_tokens) == (num_computed, num_tokens), request
        self.steps.append(output)
        self.num_paused += len(output.paused)
        assert output.batch_size or not output.paused, output
        if output.batch_size:
            self._launch(output)
        if self._launched and (len(self._launched) >= self._depth or not output.batch_size):
            self._settle(*self._launched.popleft())
        self.check_integrity()
        return output

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.requests:
                return
            self.step()
        raise AssertionError(f"still unfinished after {max_steps} steps: {list(self.requests.values())}")

    def check_integrity(self) -> None:
        if self.manager is not None and self._check:
            self.manager.check_integrity(self.requests.values())

    def _launch(self, output: SchedulerOutput) -> None:
        for request in output.paused:
            request.pause()
        tokens = {row.request.request_id: next_token([row.start]) for row in output.logits_rows}
        if self.manager is not None:
            self.manager.prepare_resources(output)
        for row in output.rows:
            if row.num_reused_tokens:
                row.request.reuse(row.num_reused_tokens)
            assert row.start == row.request.num_computed_tokens, row
        if self.manager is not None:
            tables = self.manager.block_tables(output)
            assert tables.shape[0] == output.batch_size
            by_id = {}
            for row, table in zip(output.rows, tables.tolist(), strict=True):
                block_ids = self.manager.block_ids(row.request.request_id)
                assert table == block_ids + [0] * (len(table) - len(block_ids))
                by_id[row.request.request_id] = block_ids
            tokens = self.memory.run(output, by_id)
        for row in output.rows:
            row.request.advance(row.num_tokens)
            if row.needs_logits:
                row.request.promise()
        self._launched.append((output, tokens))

    def _settle(self, output: SchedulerOutput, tokens: dict[int, int]) -> None:
        finished = []
        for row in output.logits_rows:
            request = row.request
            if request.is_finished:
                continue
            request.append_token(tokens[request.request_id])
            if len(request.output_token_ids) == request.stop.max_output_tokens:
                request.finish(FinishReason.LENGTH)
                finished.append(request)
        if self.manager is not None:
            self.manager.update_resources(output)
        for request in finished:
            self._forget(request)

    def _forget(self, request: LlmRequest) -> None:
        if self.manager is not None:
            self.manager.free_resources(request)
        self.scheduler.remove(request)
        del self.requests[request.request_id]
