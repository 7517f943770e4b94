"""Every environment variable the package reads: name, type, default and help, in one table.

``VARIABLE.get()`` reads the environment at call time; a value of the wrong form is a ``ConfigError``.
``docs/parameters.md`` is checked against ``TABLE`` by a test.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from backend_engine.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One environment variable. ``parse`` raises ``ValueError`` on a bad value; ``allowed`` says what is good."""

    name: str
    default: T
    parse: Callable[[str], T]
    allowed: str
    help: str

    def get(self) -> T:
        """Value from the environment, or the default when unset or empty. Raises ``ConfigError``."""
        raw = os.environ.get(self.name, "")
        if not raw:
            return self.default
        try:
            return self.parse(raw)
        except ValueError:
            raise ConfigError(f"environment variable {self.name}={raw!r} is not allowed; use {self.allowed}") from None


def _flag(raw: str) -> bool:
    if raw not in ("0", "1"):
        raise ValueError(raw)
    return raw == "1"


def _ops(raw: str) -> str:
    if raw not in ("native", "torch"):
        raise ValueError(raw)
    return raw


def _level(raw: str) -> str:
    if raw.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError(raw)
    return raw.lower()


ENGINE_LOG = EnvVar("ENGINE_LOG", "info", _level, "debug, info, warning or error", "Log level of the package.")
ENGINE_CHECK_INVARIANTS = EnvVar(
    "ENGINE_CHECK_INVARIANTS", False, _flag, "0 or 1", "Recompute and check the KV cache's bookkeeping after each step."
)
ENGINE_DUMP_STEPS = EnvVar(
    "ENGINE_DUMP_STEPS", "", str, "a file path", "Append one redacted JSON record per step to this file."
)
ENGINE_DRAIN_FILE = EnvVar(
    "ENGINE_DRAIN_FILE",
    "",
    str,
    "a file path",
    "When this file appears, the engine model ends its streams and refuses new requests (the launcher's doing).",
)
ENGINE_HEALTH_FILE = EnvVar(
    "ENGINE_HEALTH_FILE",
    "",
    str,
    "a file path",
    "When the engine is stuck or has failed, the engine model writes the reason here (for the launcher).",
)
ENGINE_OPS = EnvVar(
    "ENGINE_OPS",
    "native",
    _ops,
    "native or torch",
    "What computes on a CPU: a C library, compiled on this machine where it can be, or torch alone.",
)
ENGINE_PLUGINS = EnvVar(
    "ENGINE_PLUGINS",
    "",
    str,
    "modules and paths, separated by commas",
    "Plugins that are loaded when the parameter plugins is unset; see docs/plugins.md.",
)
INFLIGHT_CACHE = EnvVar(
    "INFLIGHT_CACHE",
    "~/.cache/inflight",
    str,
    "a folder",
    "Where compiled libraries, and the models that the scripts fetch, are kept.",
)
PYTHONPATH = EnvVar(
    "PYTHONPATH",
    "",
    str,
    "folders, separated by colons",
    "Where Python looks for packages. The embedded Triton Server's leaves it out; the engine model adds it again.",
)

TABLE: tuple[EnvVar[bool] | EnvVar[str], ...] = (
    ENGINE_LOG,
    ENGINE_CHECK_INVARIANTS,
    ENGINE_DUMP_STEPS,
    ENGINE_DRAIN_FILE,
    ENGINE_HEALTH_FILE,
    ENGINE_OPS,
    ENGINE_PLUGINS,
    INFLIGHT_CACHE,
    PYTHONPATH,
)
