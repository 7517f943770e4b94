"""Logits that requests asked for: picked out of a step's, brought to the host, and sorted by request.

Called by ``Decoder``. They are the model's own: no temperature, no mask, no penalty has touched them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from backend_engine.core.outputs import LogitsArray
from backend_engine.core.request import LlmRequest
from backend_engine.ops.step_logits import StepLogits


class RequestedLogits(NamedTuple):
    """``generation``: ids of ``n`` requests and ``[n, vocab_size]``, or ``None``; ``context``: as in ``StepLogits``."""

    generation_ids: tuple[int, ...]
    generation: Tensor | None
    context: tuple[tuple[int, Tensor], ...]

    def to_host(self) -> "RequestedLogits":
        """The same on the CPU; from CUDA the copies may still be under way."""
        generation = None if self.generation is None else self.generation.to("cpu", non_blocking=True)
        context = tuple((request_id, part.to("cpu", non_blocking=True)) for request_id, part in self.context)
        return RequestedLogits(self.generation_ids, generation, context)

    def by_request(self) -> tuple[dict[int, LogitsArray], dict[int, LogitsArray]]:
        """Generation logits ``[1, vocab_size]`` and context logits ``[n, vocab_size]`` by request id, on the host."""
        generation: dict[int, LogitsArray] = {}
        if self.generation is not None:
            rows = self.generation.float().numpy()
            generation = {request_id: rows[i : i + 1] for i, request_id in enumerate(self.generation_ids)}
        return generation, {request_id: part.float().numpy() for request_id, part in self.context}


def requested_logits(logits: StepLogits, requests: Sequence[LlmRequest]) -> RequestedLogits:
    """What ``requests``, aligned with ``logits.next_token``, asked for."""
    rows = [i for i, request in enumerate(requests) if request.sampling_params.return_generation_logits]
    ids = tuple(requests[i].request_id for i in rows)
    # A copy of the chosen rows: a view would keep those of the whole step alive.
    generation = logits.next_token[rows] if rows else None
    return RequestedLogits(ids, generation, logits.context)
