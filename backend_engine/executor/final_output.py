"""The last output of a request: why it ended, and what it took over its life.

Called by ``PyExecutor`` when a request has ended but its blocks are still known, and for outputs that bring more than
tokens. Reads the request, changes nothing.
"""

from backend_engine.core.outputs import DecoderOutput, KvUsage, RequestOutput, RequestTimes, Usage
from backend_engine.core.request import LlmRequest


def final_output(request: LlmRequest, token_ids: list[int], kv_usage: KvUsage) -> RequestOutput:
    """The final output of a finished request, with the ``token_ids`` that its last step brought."""
    return RequestOutput(
        request.request_id,
        token_ids,
        finished=True,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        usage=Usage.of(request),
        kv_usage=kv_usage,
        times=RequestTimes(
            request.arrival_time, request.first_scheduled_time, request.first_token_time, request.last_token_time
        ),
    )


def with_extras(output: RequestOutput, decoded: DecoderOutput, index: int) -> RequestOutput:
    """``output``, of logits row ``index``, with the log probabilities and logits that its request asked for."""
    if not output.token_ids:
        return output  # an end id is no part of the answer, nor are its numbers
    entry = None if decoded.logprobs is None else decoded.logprobs[index]
    logits = decoded.generation_logits.get(output.request_id)
    return output._replace(logprobs=None if entry is None else [entry], generation_logits=logits)
