"""The last output of a request: why it ended, and what it took over its life.

Called by ``PyExecutor`` when a request has ended but its blocks are still known. Reads the request, changes nothing.
"""

from backend_engine.core.outputs import KvUsage, RequestOutput, RequestTimes, Usage
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
        usage=Usage(len(request.prompt_token_ids), request.num_cached_tokens, len(request.output_token_ids)),
        kv_usage=kv_usage,
        times=RequestTimes(
            request.arrival_time, request.first_scheduled_time, request.first_token_time, request.last_token_time
        ),
    )
