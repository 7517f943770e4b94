"""A model engine and a decoder without tensors, for tests of the executor, the scheduler and the KV cache.

``FakeModelEngine`` keeps its own paged memory of token ids. Each row writes its tokens into its slots, then
reads its whole text back through its block table: a wrong block, a lost or a foreign token shows at once.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.outputs import DecoderOutput

END_ID = 0
VOCAB_SIZE = 997


def next_token(token_ids: list[int]) -> int:
    """The fake model: the next token is a hash of the whole text, never the end id."""
    digest = hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 1)


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """What the fake model says after ``prompt``."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(prompt) :]


class FakeModelEngine:
    """Answers with ``(row, next token)`` pairs as its "logits"."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.memory = np.full((num_blocks, tokens_per_block), -1, np.int64)
        self.steps: list[SchedulerOutput] = []
        self.before_forward: Callable[[SchedulerOutput], None] = lambda output: None

    def forward(self, output: SchedulerOutput, block_tables: np.ndarray) -> list[int]:
        self.before_forward(output)
        self.steps.append(output)
        size = self.memory.shape[1]
        for row, table in zip(output.rows, block_tables, strict=True):
            for position, token in enumerate(row.request.token_ids(row.start, row.start + row.num_tokens), row.start):
                self.memory[table[position // size], position % size] = token
        tokens = []
        for row, table in zip(output.rows, block_tables, strict=True):
            length = row.start + row.num_tokens
            text = [int(self.memory[table[p // size], p % size]) for p in range(length)]
            assert text == row.request.token_ids(0, length), f"request {row.request.request_id} reads a foreign text"
            if row.needs_logits:
                tokens.append(next_token(text))
        return tokens


class FakeHandle:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def wait(self) -> DecoderOutput:
        return DecoderOutput(self._tokens)


class FakeDecoder:
    """Takes the tokens as they come; knows which requests it was told to forget."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    def decode_async(self, logits: list[int], output: SchedulerOutput) -> FakeHandle:
        return FakeHandle(list(logits))

    def remove(self, request_id: int) -> None:
        self.removed.append(request_id)
