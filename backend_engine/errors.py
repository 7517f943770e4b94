"""The engine's error classes, one per kind of answer a caller can act on.

Every message names the field or file, the value that was found and what is allowed. Raised anywhere,
turned into a response only at the borders (``LLM``, ``triton_io``). This module never logs.
"""


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
