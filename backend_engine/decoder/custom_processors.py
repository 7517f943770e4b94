"""Logits processors of plugins: what a user's class looks like, and how those of a batch are applied.

``SamplingBatch`` applies them before all others, so that bad words, minimum lengths and penalties hold whatever they
do. Each is handed the row of its own sequence and no other.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from backend_engine.core.request import LlmRequest
from backend_engine.errors import EngineError, StepFailedError
from backend_engine.logger import get_logger
from backend_engine.plugins.foreign_code import call_foreign

_log = get_logger(__name__)

# Keeps logits finite: only masked tokens may be -inf.
_MAX_LOGIT = float(torch.finfo(torch.float32).max)


class CustomLogitsProcessor(ABC):
    """Changes the logits of one sequence. Made when the request comes, once a sequence; never shared by two.

    What it does must follow from its arguments and the sequence's tokens. Logits are on the model's device; reading
    them back to the host there makes every step wait.
    """

    @abstractmethod
    def __init__(self, arguments: Mapping[str, Any], vocab_size: int) -> None:
        """``arguments``: what the request gave, of JSON's types. What is raised here refuses the request: raise
        ``ValueError`` with a text that names the argument, its value and what is allowed.
        """

    @abstractmethod
    def apply(self, logits: Tensor, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Change ``logits [vocab_size]`` (float32) in place, before the token after those is chosen.

        -inf forbids a token; when all are forbidden, the likeliest of the model's own logits is taken. NaN counts as
        -inf, and infinity as the largest number. What is raised here ends the request with an error.
        """


class CustomProcessors:
    """Applies the processors of each request of a batch to its row. ``failures``: of the last ``apply``, by request id;
    the token of such a row is of no use.
    """

    masks: ClassVar[bool] = True

    def __init__(self, rows: Sequence[tuple[int, LlmRequest]]) -> None:
        self._rows = [(row, request, tuple(request.prompt_token_ids)) for row, request in rows]
        self.failures: dict[int, EngineError] = {}

    def apply(self, logits: Tensor) -> None:
        """Change the rows of ``logits [num_rows, vocab_size]`` that have processors, in place."""
        self.failures = {}
        for row, request, prompt in self._rows:
            own, output = logits[row], tuple(request.output_token_ids)
            try:
                for label, processor in request.logits_processors:
                    call_foreign(label, "it failed", partial(processor.apply, own, prompt, output), StepFailedError)
            except StepFailedError as error:
                _log.error("request %d: %s", request.request_id, error)
                self.failures[request.request_id] = error
            torch.nan_to_num(own, nan=-torch.inf, posinf=_MAX_LOGIT, neginf=-torch.inf, out=own)
