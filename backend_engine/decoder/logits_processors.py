"""What changes logits before a token is chosen: embedding bias, bad words, min tokens; then ``penalties``.

Built by ``SamplingBatch`` for one batch composition, applied in this order, each only when a request uses it; those
of plugins (``custom_processors``) come first. Masked means -inf. Ids outside the vocabulary mask nothing. Nothing here
reads the logits back to the host.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend_engine.core.request import LlmRequest
from backend_engine.decoder.upload import upload

# A bias is bounded so that a biased logit stays finite.
_MAX_BIAS = 1e30


class LogitsProcessor(Protocol):
    """One change to the working logits of a batch. ``masks``: it may make logits -inf."""

    masks: ClassVar[bool]

    def apply(self, logits: Tensor) -> None:
        """Change ``logits [num_rows, vocab_size]`` (contiguous float32) in place."""
        ...


class Constraints:
    """What one request's processors need, looked up once: ids in the vocabulary, words by their last-but-one id.

    ``bias_ids`` and ``bias_values`` are the nonzero part of its bias. ``bad_ids`` are always masked;
    ``bad_endings`` maps an id to the ``(beginning, final id)`` of every bad sequence whose beginning ends with it.
    ``end_ids`` are masked for the first ``min_output_tokens`` tokens, which is 0 when there are none.
    """

    def __init__(self, request: LlmRequest, vocab_size: int) -> None:
        params = request.sampling_params
        bias = params.embedding_bias
        self.bias_ids = np.zeros(0, np.int64)
        self.bias_values = np.zeros(0, np.float32)
        if bias is not None:
            assert len(bias) == vocab_size, (len(bias), vocab_size)
            self.bias_ids = bias.nonzero()[0].astype(np.int64)
            self.bias_values = bias[self.bias_ids].clip(-_MAX_BIAS, _MAX_BIAS).astype(np.float32)
        bad_ids: list[int] = []
        self.bad_endings: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in params.bad_token_ids or ():
            *beginning, final = (int(token_id) for token_id in sequence)
            if final >= vocab_size:
                continue
            if beginning:
                self.bad_endings.setdefault(beginning[-1], []).append((beginning, final))
            else:
                bad_ids.append(final)
        self.bad_ids = np.array(bad_ids, np.int64)
        end_ids = sorted(token_id for token_id in request.stop.end_ids if 0 <= token_id < vocab_size)
        self.end_ids = np.array(end_ids, np.int64)
        self.min_output_tokens = request.stop.min_output_tokens if end_ids else 0

    def has_bias(self) -> bool:
        return len(self.bias_ids) > 0

    def has_bad_words(self) -> bool:
        return len(self.bad_ids) > 0 or bool(self.bad_endings)


class EmbeddingBias:
    """Adds each request's bias to its row."""

    masks: ClassVar[bool] = False

    def __init__(self, rows: Sequence[tuple[int, Constraints]], vocab_size: int, device: torch.device) -> None:
        self._index = _flat_index([(row, c.bias_ids) for row, c in rows], vocab_size, device)
        self._values = upload(np.concatenate([c.bias_values for _, c in rows]), device)

    def apply(self, logits: Tensor) -> None:
        flat = logits.view(-1)
        flat[self._index] += self._values


class MinTokens:
    """Masks end ids. The batch is rebuilt when a row reaches its minimum, so every row here is below it."""

    masks: ClassVar[bool] = True

    def __init__(self, rows: Sequence[tuple[int, Constraints]], vocab_size: int, device: torch.device) -> None:
        self._index = _flat_index([(row, c.end_ids) for row, c in rows], vocab_size, device)

    def apply(self, logits: Tensor) -> None:
        logits.view(-1).index_fill_(0, self._index, -torch.inf)


class BadWords:
    """Masks bad ids, and the final id of each bad sequence whose beginning ends the text (prompt and output) so far."""

    masks: ClassVar[bool] = True

    def __init__(
        self, rows: Sequence[tuple[int, LlmRequest, Constraints]], vocab_size: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._index = _flat_index([(row, c.bad_ids) for row, _, c in rows], vocab_size, device)
        self._sequences = [(row, request, c.bad_endings) for row, request, c in rows if c.bad_endings]

    def apply(self, logits: Tensor) -> None:
        flat = logits.view(-1)
        flat.index_fill_(0, self._index, -torch.inf)
        completing = [
            row * self._vocab_size + final
            for row, request, endings in self._sequences
            for final in _completing(request, endings.get(request.last_token_id(), ()))
        ]
        if completing:
            flat.index_fill_(0, upload(np.array(completing), self._device), -torch.inf)


def _completing(request: LlmRequest, endings: Iterable[tuple[list[int], int]]) -> Iterable[int]:
    num_tokens = request.num_tokens
    for beginning, final in endings:
        start = num_tokens - len(beginning)
        if start >= 0 and request.token_ids(start, num_tokens) == beginning:
            yield final


def _flat_index(rows: Sequence[tuple[int, NDArray[np.int64]]], vocab_size: int, device: torch.device) -> Tensor:
    """Positions in the flattened logits of the given ids of the given rows."""
    return upload(np.concatenate([row * vocab_size + ids for row, ids in rows]), device)
