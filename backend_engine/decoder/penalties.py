"""Repetition, presence and frequency penalties, kept up to date token by token.

``TokenCounts`` belongs to one request, ``Penalties`` to one batch composition. Work per step is proportional to the
distinct tokens of the penalized requests, never to the vocabulary. Used by ``SamplingBatch`` alone.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import LlmRequest
from backend_engine.decoder.upload import upload

# Keeps penalized logits finite: only masked tokens may be -inf.
_MAX_LOGIT = float(torch.finfo(torch.float32).max)
_MAX_PENALTY = 1e30


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties does something."""
    return _has_repetition(params) or params.presence_penalty != 0 or params.frequency_penalty != 0


def _has_repetition(params: SamplingParams) -> bool:
    return (params.repetition_penalty or 1.0) != 1


class TokenCounts:
    """The distinct tokens that one request's penalties act on, and how often each is in the output.

    Prompt tokens are counted in (with 0) only when there is a repetition penalty. Ids outside the vocabulary are
    left out. A token keeps its place, so that ``Penalties`` can refer to it.
    """

    def __init__(self, request: LlmRequest, vocab_size: int) -> None:
        self._request = request
        self._vocab_size = vocab_size
        self._num_taken = 0
        prompt = request.prompt_token_ids if _has_repetition(request.sampling_params) else ()
        known = [token_id for token_id in dict.fromkeys(prompt) if 0 <= token_id < vocab_size]
        self._places = {token_id: place for place, token_id in enumerate(known)}
        self._size = len(known)
        self._ids = np.zeros(max(16, 2 * self._size), np.int64)
        self._ids[: self._size] = known
        self._counts = np.zeros(len(self._ids), np.float64)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct token ids, int64 ``[size]``."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float64]:
        """Occurrences in the output, float64 ``[size]``."""
        return self._counts[: self._size]

    def take_new(self) -> list[int]:
        """Count the output tokens that came since the last call; returns the place of each."""
        output = self._request.output_token_ids
        if self._num_taken == len(output):
            return []
        new = output[self._num_taken :]
        self._num_taken = len(output)
        return [self._count(token_id) for token_id in new if 0 <= token_id < self._vocab_size]

    def _count(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1
        return place


class Penalties:
    """Penalties of a batch: the distinct tokens of all its penalized rows in one list of entries.

    Repetition (Hugging Face): a logit of a token seen in prompt or output is divided by the penalty when positive,
    else multiplied by it. Then presence and frequency (OpenAI): minus ``presence`` if the token is in the output,
    minus ``frequency`` for each time it is.
    """

    masks: ClassVar[bool] = False

    def __init__(
        self, rows: Sequence[tuple[int, LlmRequest, TokenCounts]], vocab_size: int, device: torch.device
    ) -> None:
        self._device = device
        self._row_starts = [row * vocab_size for row, _, _ in rows]
        self._token_counts = [counts for _, _, counts in rows]
        for state in self._token_counts:
            state.take_new()
        self._sizes = [len(state.ids) for state in self._token_counts]
        self._first_entries = [0, *np.cumsum(self._sizes).tolist()]
        # Places of tokens that came later: their entries stand at the end, in order of arrival.
        self._later_entries: list[list[int]] = [[] for _ in self._token_counts]
        self._penalties = np.array([_penalties_of(request.sampling_params) for _, request, _ in rows]).T

        owners = np.repeat(np.arange(len(rows)), self._sizes)
        index = np.concatenate([s.ids + start for s, start in zip(self._token_counts, self._row_starts, strict=True)])
        self._size = len(index)
        capacity = self._size + 64 * len(rows)
        self._index = torch.zeros(capacity, dtype=torch.int64, device=device)
        # Per entry: repetition, presence, frequency, count.
        self._values = torch.zeros((4, capacity), dtype=torch.float64, device=device)
        self._write(0, index, owners, np.concatenate([state.counts for state in self._token_counts]))

    def apply(self, logits: Tensor) -> None:
        """Penalize ``logits [num_rows, vocab_size]`` (contiguous float32) in place; -inf stays -inf."""
        self._add_new_tokens()
        index = self._index[: self._size]
        repetition, presence, frequency, count = self._values[:, : self._size]
        flat = logits.view(-1)
        old = flat[index].double()
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - presence * (count > 0) - frequency * count
        new = torch.where(old == -torch.inf, old, new.clamp_(-_MAX_LOGIT, _MAX_LOGIT))
        flat[index] = new.float()

    def _add_new_tokens(self) -> None:
        """Bring the entries up to date with the tokens that were appended since the last step."""
        index: list[int] = []
        owners: list[int] = []
        counted: list[int] = []
        for owner, state in enumerate(self._token_counts):
            size, later = self._sizes[owner], self._later_entries[owner]
            for place in state.take_new():
                if place < size:
                    counted.append(self._first_entries[owner] + place)
                    continue
                if place - size == len(later):
                    later.append(self._size + len(index))
                    index.append(self._row_starts[owner] + int(state.ids[place]))
                    owners.append(owner)
                counted.append(later[place - size])
        if index:
            self._grow(self._size + len(index))
            self._write(self._size, np.array(index), np.array(owners), np.zeros(len(index)))
            self._size += len(index)
        if counted:
            places = upload(np.array(counted), self._device)
            self._values[3].index_add_(0, places, torch.ones_like(places, dtype=torch.float64))

    def _grow(self, size: int) -> None:
        missing = size - len(self._index)
        if missing > 0:
            extra = max(missing, len(self._index))
            self._index = torch.nn.functional.pad(self._index, (0, extra))
            self._values = torch.nn.functional.pad(self._values, (0, extra))

    def _write(
        self, start: int, index: NDArray[np.int64], owners: NDArray[np.int64], counts: NDArray[np.float64]
    ) -> None:
        part = slice(start, start + len(index))
        self._index[part] = upload(index, self._device)
        values = np.concatenate([self._penalties[:, owners], counts[None]])
        self._values[:, part] = upload(values, self._device)


def _penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    def bounded(value: float) -> float:
        return min(max(value, -_MAX_PENALTY), _MAX_PENALTY)

    repetition = min(max(params.repetition_penalty or 1.0, 1 / _MAX_PENALTY), _MAX_PENALTY)
    return repetition, bounded(params.presence_penalty), bounded(params.frequency_penalty)
