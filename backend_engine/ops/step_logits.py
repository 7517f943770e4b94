"""``StepLogits``: what one forward pass says, on its way from ``ModelEngine`` to ``Decoder``. Data only."""

from typing import NamedTuple

from torch import Tensor


class StepLogits(NamedTuple):
    """Logits of one step, float32.

    next_token: ``[num_logits_rows, vocab_size]``, aligned with ``SchedulerOutput.logits_rows``. context: for each
    request that asked for context logits and had prompt tokens in the step, its id and their ``[n, vocab_size]``.
    """

    next_token: Tensor
    context: tuple[tuple[int, Tensor], ...] = ()
