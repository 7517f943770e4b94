"""Logging for the whole package: one ``get_logger``, one format, on standard error.

Standard error is what Triton Server shows of a Python model. Nothing else in the package prints.
"""

import logging
import sys

from backend_engine import envs

_ROOT = "backend_engine"


def get_logger(name: str) -> logging.Logger:
    """Return the logger for module ``name``; the first call installs the handler."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(envs.ENGINE_LOG.get().upper())
        root.propagate = False
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
