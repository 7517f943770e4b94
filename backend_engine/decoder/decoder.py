"""``Decoder``: the room that turns the logits of a step into one token a row.

Called by ``PyExecutor`` once a step; ``remove`` when a request ends. What it keeps of a request is made at its first
row from the request itself, so pausing needs no call. Never changes a request, a ``SchedulerOutput`` or the logits.
"""

import torch
from torch import Tensor

from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.outputs import DecoderOutput, TokenLogprobs
from backend_engine.core.request import LlmRequest
from backend_engine.decoder.logprobs import LogprobTensors, compute_logprobs, token_logprobs
from backend_engine.decoder.requested_logits import RequestedLogits, requested_logits
from backend_engine.decoder.sampling_batch import RequestSampling, SamplingBatch
from backend_engine.ops.step_logits import StepLogits


class DecodeHandle:
    """Tokens of one step, and the logits that requests asked for, that the device may still be working on."""

    def __init__(
        self, token_ids: Tensor, logprobs: LogprobTensors | None, logits: RequestedLogits, batch: SamplingBatch
    ) -> None:
        is_cuda = token_ids.is_cuda
        # Copies to the host without blocking land in pinned memory; the event says when they are there.
        self._token_ids = token_ids.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.to_host()
        self._logits = logits.to_host()
        self._batch = batch
        self._failures = batch.failures
        self._event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> DecoderOutput:
        """Block until the tokens are on the host; rows are aligned with ``SchedulerOutput.logits_rows``."""
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = self._token_ids.tolist()
        generation_logits, context_logits = self._logits.by_request()
        logprobs: list[TokenLogprobs | None] | None = None
        if self._logprobs is not None:
            rows = self._batch.logprob_row_ids
            asked = token_logprobs(self._logprobs, [token_ids[row] for row in rows], self._batch.num_top_logprobs)
            logprobs = [None] * len(token_ids)
            for row, entry in zip(rows, asked, strict=True):
                logprobs[row] = entry
        return DecoderOutput(token_ids, logprobs, generation_logits, context_logits, self._failures)


class Decoder:
    """Decodes with each request's own ``SamplingParams``, ``StopConditions.min_output_tokens`` and ``seed``.

    A row's token depends on its logits and its request alone, never on the rest of the batch.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._samplings: dict[int, RequestSampling] = {}
        self._batch = SamplingBatch((), vocab_size, self._device)

    @torch.inference_mode()
    def decode_async(self, step_logits: StepLogits, output: SchedulerOutput) -> DecodeHandle:
        """Choose the next token of each of ``output.logits_rows`` from ``step_logits``.

        Any floating type. The work is done on return on a CPU and launched on CUDA. Each request must know all its
        tokens so far: the next one's random number goes by ``len(output_token_ids)``.
        """
        requests = [row.request for row in output.logits_rows]
        logits = step_logits.next_token
        assert logits.shape == (len(requests), self._vocab_size), (logits.shape, len(requests), self._vocab_size)
        if not self._batch.is_current(requests):
            self._batch = SamplingBatch(
                [self._sampling_of(request) for request in requests], self._vocab_size, self._device
            )
        batch = self._batch
        token_ids = batch.choose(logits)
        logprobs = None
        if batch.logprob_row_ids:
            rows = batch.logprob_rows
            asked = (logits, token_ids) if rows is None else (logits[rows], token_ids[rows])
            logprobs = compute_logprobs(*asked, max(batch.num_top_logprobs))
        return DecodeHandle(token_ids, logprobs, requested_logits(step_logits, requests), batch)

    def remove(self, request_id: int) -> None:
        """Forget a request; unknown ids are fine."""
        sampling = self._samplings.pop(request_id, None)
        if sampling is not None and self._batch.has_request(sampling.request):
            self._batch = SamplingBatch((), self._vocab_size, self._device)

    def _sampling_of(self, request: LlmRequest) -> RequestSampling:
        sampling = self._samplings.get(request.request_id)
        if sampling is None or sampling.request is not request:
            sampling = self._samplings[request.request_id] = RequestSampling(request, self._vocab_size)
        return sampling
