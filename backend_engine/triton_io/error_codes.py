"""Engine errors as Triton Server's error codes, by name, and back.

Names and not constants, because a code travels between our models as text: a BLS call loses Triton Server's own.
"""

from typing import Any

from backend_engine.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OutOfCapacityError,
    ShutdownError,
)

INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED"
CODES = (INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED)
INTERNAL_ERROR_TEXT = "internal error; the server's log has the details"
CANCELLED_TEXT = "the request was cancelled by its client"


class ModelCallError(EngineError):
    """Another of our models answered with an error of class ``code`` (one of ``CODES``, or it counts as internal)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code if code in CODES else INTERNAL


def code_of(error: EngineError) -> str:
    """The code that tells a client what to do: mend the request, try later, or report."""
    if isinstance(error, ModelCallError):
        return error.code
    if isinstance(error, InvalidRequestError):
        return INVALID_ARG
    if isinstance(error, OutOfCapacityError | ShutdownError | DeadlineExceededError):
        return UNAVAILABLE
    return INTERNAL


def triton_error(pb_utils: Any, code: str, message: str) -> Any:
    """A ``TritonError`` of class ``code`` with a message of one line."""
    return pb_utils.TritonError(one_line(message), getattr(pb_utils.TritonError, code))


def one_line(message: str, max_length: int = 1000) -> str:
    """``message`` without line breaks, cut to ``max_length`` characters."""
    return " ".join(message.split())[:max_length]
