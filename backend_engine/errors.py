"""The engine's error classes, one per kind of answer a caller can act on.

Every message names the field or file, the value that was found and what is allowed. Raised anywhere,
turned into a response only at the borders (``LLM``, ``triton_io``). This module never logs.
"""

import reprlib
from typing import Any


class EngineError(Exception):
    """Base class of every error this package raises on purpose."""


class InvalidRequestError(EngineError):
    """A request asks for something that is not allowed; nothing of it was run."""


class ConfigError(EngineError):
    """A setting has a value that is not allowed, or settings contradict each other."""


class ModelLoadError(EngineError):
    """A checkpoint or tokenizer cannot be loaded; the message is one line that names the culprit."""


class OutOfCapacityError(EngineError):
    """The engine has no room for the request now: queue full, or waited too long in it."""


class DeadlineExceededError(EngineError):
    """The request's deadline passed before it produced anything."""


class StepFailedError(EngineError):
    """The step that this request took part in failed; other requests go on."""


class ShutdownError(EngineError):
    """The engine is shutting down or has stopped."""


_MAX_SHOWN = 300
_MAX_SHOWN_BITS = 512


class _Shown(reprlib.Repr):
    """``repr`` with bounds; an object of a class that it does not know is told by its type alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 4, _MAX_SHOWN
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 16

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MAX_SHOWN_BITS else f"an integer of {bits} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, bytes):
            return repr(x[:_MAX_SHOWN])
        return repr(x) if x is None or isinstance(x, bool | float) else f"a {type(x).__name__}"


def shown(value: Any) -> str:
    """A value of a file for a message: ``repr``, of which no more is made than a line can tell. A file may hold
    millions of values in one, or one that holds itself many times over.
    """
    text = _Shown().repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def one_line(error: Exception) -> str:
    """The message of another library for one of ours."""
    text = " ".join(str(error).split())
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
