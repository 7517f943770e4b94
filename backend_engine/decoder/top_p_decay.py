"""Top-p that decays: factual-nucleus sampling (Lee et al., 2022, "Factuality Enhanced Language Models").

``RequestSampling`` keeps one for a request that asked. The value follows from the request's tokens alone, so a
pause or a neighbour changes nothing.
"""

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import LlmRequest


def has_decay(params: SamplingParams) -> bool:
    """Whether a sampled request's top_p moves."""
    return params.top_p_decay is not None and params.top_p_decay < 1 and not params.is_greedy


class TopPDecay:
    """top_p of the next token: ``top_p * decay ** n``, at least ``top_p_min``, ``n`` tokens after the last reset."""

    def __init__(self, request: LlmRequest) -> None:
        params = request.sampling_params
        self._request = request
        self._start = params.top_p if params.top_p is not None and 0 < params.top_p < 1 else 1.0
        self._decay = params.top_p_decay or 1.0
        self._least = params.top_p_min or 0.0
        self._reset_id = params.top_p_reset_ids
        self._num_seen = 0
        self._num_since_reset = 0

    def top_p(self) -> float:
        """The value in force; reads the tokens that are new since the last call."""
        output = self._request.output_token_ids
        for token_id in output[self._num_seen :]:
            self._num_since_reset = 0 if token_id == self._reset_id else self._num_since_reset + 1
        self._num_seen = len(output)
        decayed = self._start * self._decay**self._num_since_reset
        return min(self._start, max(decayed, self._least))
