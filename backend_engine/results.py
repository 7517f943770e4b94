"""What ``LLM.generate`` and ``generate_async`` give back, and the handle that collects it.

``GenerationHandle`` is filled by the executor thread (one append under a lock) and read by the caller, who
pays for detokenizing. The names of fields are those of TensorRT-LLM and vLLM.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from backend_engine.core.outputs import LogitsArray, RequestOutput, TokenLogprobs
from backend_engine.errors import EngineError
from backend_engine.text.text_stream import TextStream


@dataclass(frozen=True)
class CompletionOutput:
    """One sequence so far. ``text`` and ``token_ids`` are cumulative, ``text_diff`` is what is new in them.

    ``generation_logits``: float32 ``[num_tokens, vocab_size]``, when asked for.
    """

    index: int
    text: str
    text_diff: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    generation_logits: LogitsArray | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log probabilities, ``None`` unless asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class GenerationResult:
    """One prompt and its sequences. ``prompt`` is ``None`` when token ids were given.

    ``context_logits``: float32 ``[prompt_tokens, vocab_size]``, when asked for, once all of them are there.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    context_logits: LogitsArray | None = None


class _Sequence:
    """Collects one sequence's outputs. Reader's side only."""

    def __init__(self, index: int, stream: TextStream | None, wants_logprobs: bool) -> None:
        self.index = index
        self._stream = stream
        self._text: list[str] = []
        self._diff = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if wants_logprobs else None
        self._generation_logits: list[LogitsArray] = []
        self._context_logits: list[LogitsArray] = []
        self.last: RequestOutput | None = None
        self.error: EngineError | None = None

    def take(self, output: RequestOutput) -> None:
        self._token_ids.extend(output.token_ids)
        if self._logprobs is not None:
            self._logprobs.extend(output.logprobs or ())
        if output.generation_logits is not None:
            self._generation_logits.append(output.generation_logits)
        if output.context_logits is not None:
            self._context_logits.append(output.context_logits)
        if self._stream is not None:
            piece = self._stream.append(output.token_ids)
            if output.finished:
                piece += self._stream.finish()
            self._diff += piece
        if output.finished:
            self.last = output
            self.error = output.error

    def snapshot(self) -> CompletionOutput:
        diff, self._diff = self._diff, ""
        self._text.append(diff)
        self._text = ["".join(self._text)]
        last = self.last
        return CompletionOutput(
            self.index,
            self._text[0],
            diff,
            list(self._token_ids),
            None if self._logprobs is None else list(self._logprobs),
            str(last.finish_reason) if last and last.finish_reason else None,
            last.stop_reason if last else None,
            np.concatenate(self._generation_logits) if self._generation_logits else None,
        )

    def context_logits(self, num_prompt_tokens: int) -> LogitsArray | None:
        """Those of the whole prompt, or ``None``."""
        if sum(map(len, self._context_logits)) != num_prompt_tokens:
            return None
        self._context_logits = [np.concatenate(self._context_logits)]
        return self._context_logits[0]


class GenerationHandle:
    """One prompt on its way: ``result()`` waits for all of it; ``for`` / ``async for`` yield it as it grows.

    An error of the engine is raised to whoever waits. ``abort()`` ends it; the result then says ``cancelled``.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        streams: list[TextStream | None],
        wants_logprobs: bool,
        abort: Callable[[], None],
    ) -> None:
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._sequences = [_Sequence(i, stream, wants_logprobs) for i, stream in enumerate(streams)]
        self._abort = abort
        self._condition = threading.Condition()
        self._arrived: deque[tuple[int, RequestOutput]] = deque()
        self._wake: Callable[[], object] | None = None
        self._ended = False

    def sink(self, index: int) -> Callable[[RequestOutput], None]:
        """The sink of sequence ``index``, for the executor."""

        def put(output: RequestOutput) -> None:
            with self._condition:
                self._arrived.append((index, output))
                self._condition.notify_all()
                wake = self._wake
            if wake is not None:
                wake()

        return put

    def abort(self) -> None:
        """Ask for the end of all sequences."""
        self._abort()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. ``TimeoutError`` after ``timeout`` seconds without news."""
        while True:
            result = self._next(timeout)
            if result.finished:
                return result

    def __iter__(self) -> Iterator[GenerationResult]:
        while not self._ended:
            result = self._next(None)
            self._ended = result.finished
            yield result

    async def __aiter__(self) -> AsyncIterator[GenerationResult]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with self._condition:
            self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
        while not self._ended:
            if not self._arrived:
                await arrived.wait()
            arrived.clear()
            if self._arrived:
                result = self._next(None)
                self._ended = result.finished
                yield result

    def _next(self, timeout: float | None) -> GenerationResult:
        """Wait for news, take all of it in, and show the state."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._arrived or self._all_finished(), timeout):
                raise TimeoutError(f"no output within {timeout} s")
            arrived = list(self._arrived)
            self._arrived.clear()
        for index, output in arrived:
            self._sequences[index].take(output)
        for sequence in self._sequences:
            if sequence.error is not None:
                self._ended = True
                raise sequence.error
        usages = [s.last.usage for s in self._sequences if s.last is not None and s.last.usage is not None]
        return GenerationResult(
            self._prompt,
            self._prompt_token_ids,
            [sequence.snapshot() for sequence in self._sequences],
            self._all_finished(),
            max((usage.num_cached_tokens for usage in usages), default=0),
            self._sequences[0].context_logits(len(self._prompt_token_ids)),
        )

    def _all_finished(self) -> bool:
        return all(sequence.last is not None for sequence in self._sequences)
