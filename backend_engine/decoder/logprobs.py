"""Log probabilities of chosen tokens and of the likeliest ones, from the model's own distribution.

Called by ``Decoder`` for the rows that asked, with the logits as the model gave them: no temperature, no mask, no
penalty. Values are natural logarithms, always finite, never below ``LOGPROB_FLOOR``. Computes on the device, and turns
into Python objects only once the tensors are on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.core.outputs import LOGPROB_FLOOR, TokenLogprobs
from backend_engine.decoder.ranking import ranked, row_chunks


class LogprobTensors(NamedTuple):
    """Log probabilities of ``n`` rows and the ``width`` likeliest tokens: ``[n]``, ``[n]``, twice ``[n, width]``."""

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor

    def to_host(self) -> "LogprobTensors":
        """The same on the CPU; from CUDA the copies may still be under way."""
        return LogprobTensors(*(tensor.to("cpu", non_blocking=True) for tensor in self))


def compute_logprobs(logits: Tensor, token_ids: Tensor, width: int) -> LogprobTensors:
    """Log probabilities for rows ``logits [n, vocab_size]`` of which ``token_ids [n]`` were chosen.

    ``width`` likeliest tokens each, 0 for none. Rank 1 is the likeliest; equals share the better rank.
    """
    num_rows = len(logits)
    chosen = torch.empty((num_rows, 1), dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    top = torch.empty((num_rows, width), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_rows, width), dtype=torch.int64, device=logits.device)
    for part in row_chunks(num_rows, logits):
        rows = logits[part].float()
        chosen_ids = token_ids[part].unsqueeze(1)
        logprobs = rows.log_softmax(-1)
        chosen[part] = logprobs.gather(1, chosen_ids)
        rank[part] = (rows > rows.gather(1, chosen_ids)).sum(-1) + 1
        if width:
            top_ids[part] = ranked(rows, width)[1]
            top[part] = logprobs.gather(1, top_ids[part])
    return LogprobTensors(_finite(chosen).squeeze(1), rank, top_ids, _finite(top))


def token_logprobs(tensors: LogprobTensors, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Python objects for rows whose tensors are on the host; row ``i`` gets its ``num_top[i]`` likeliest tokens."""
    chosen, rank = tensors.chosen.tolist(), tensors.rank.tolist()
    top_ids, top = tensors.top_ids.tolist(), tensors.top.tolist()
    return [
        TokenLogprobs(
            token_id, chosen[i], rank[i], tuple(zip(top_ids[i][: num_top[i]], top[i][: num_top[i]], strict=True))
        )
        for i, token_id in enumerate(token_ids)
    ]


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR).clamp(LOGPROB_FLOOR, 0.0)
