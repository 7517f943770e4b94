"""What every hostile checkpoint must come to: one printable line that names its folder or file, in bounded memory."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_engine.errors import ModelLoadError
from backend_engine.model_engine.model_loader import describe_model, load_model

ROOM = 2 << 30
"""Address space beyond what the process has: far below what any of the files claims to be."""
MAX_LINE = 2000


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Nothing may take more than ``ROOM``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(run: Callable[[], Any]) -> str:
    """The line that ``run`` is refused with."""
    with bounded_memory(), pytest.raises(ModelLoadError) as caught:
        run()
    line = str(caught.value)
    assert line.isprintable() and len(line) <= MAX_LINE, line[:MAX_LINE]
    return line


def load(path: Path) -> None:
    """Everything that is done with a checkpoint before the first request."""
    describe_model(path)
    load_model(path, "float32", "cpu")


def load_or_refuse(path: Path) -> str | None:
    """The line that loading ends in; ``None`` where it works."""
    with bounded_memory():
        try:
            load(path)
        except ModelLoadError as error:
            line = str(error)
            assert line.isprintable() and len(line) <= MAX_LINE, line[:MAX_LINE]
            return line
    return None
