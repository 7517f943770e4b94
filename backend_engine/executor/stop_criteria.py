"""``finish_reason``: does a just-decoded token end its request? A pure function of ids.

Called by ``PyExecutor`` for every new token before ``LlmRequest.append_token``. Stop words, which are text, are
the ``StopMatcher``'s business. Never changes the request.
"""

from typing import NamedTuple

from backend_engine.core.request import FinishReason, LlmRequest


class Finish(NamedTuple):
    """The end of a request, as found for one new token.

    ``stop_reason`` goes with ``STOP``: the id of a stop sequence of one token, or a stop word, else ``None``.
    ``keep_token``: append the token before the request is finished; false for an end id alone.
    """

    reason: FinishReason
    stop_reason: int | str | None
    keep_token: bool


_END_ID = Finish(FinishReason.STOP, None, False)
_SEQUENCE = Finish(FinishReason.STOP, None, True)
_LENGTH = Finish(FinishReason.LENGTH, None, True)


def finish_reason(request: LlmRequest, token_id: int) -> Finish | None:
    """How ``token_id``, not yet appended to ``request``, ends it; ``None`` when it goes on.

    In this order: an end id, once the output without it has ``min_output_tokens`` tokens; a stop sequence (matched
    on output tokens alone, this one last), once the output with it has that many; ``max_output_tokens``.
    """
    stop = request.stop
    output = request.output_token_ids
    num_output = len(output)
    if token_id in stop.end_ids and num_output >= stop.min_output_tokens:
        return _END_ID
    num_output += 1
    if stop.stop_sequences and num_output >= stop.min_output_tokens:
        for sequence in stop.stop_sequences:
            num_before = len(sequence) - 1
            if sequence[-1] != token_id:
                continue
            if num_before == 0:
                return Finish(FinishReason.STOP, token_id, True)
            if tuple(output[-num_before:]) == tuple(sequence[:-1]):
                return _SEQUENCE
    return _LENGTH if num_output >= stop.max_output_tokens else None
