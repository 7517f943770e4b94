"""Where the scripts find things: the clone, and the cache directory for models, logs and run directories."""

import os
import tempfile
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = REPOSITORY_ROOT / "templates"
ADAPTERS = REPOSITORY_ROOT / "model_repository"


def cache_dir() -> Path:
    """Return ``$INFLIGHT_CACHE``, or ``~/.cache/inflight`` when it is unset or empty."""
    return Path(os.environ.get("INFLIGHT_CACHE") or "~/.cache/inflight").expanduser().absolute()


def default_log_path(http_port: int) -> Path:
    """Return the log file of the server on ``http_port``; a later start on that port overwrites it."""
    return cache_dir() / "log" / f"triton-{http_port}.log"


def make_run_dir(parent: Path | None = None) -> Path:
    """Make a fresh directory for one run, under ``parent`` or the cache, and return it."""
    parent = parent or cache_dir() / "run"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="run-", dir=parent))
