"""What the server process that runs this model says: its command line, and where its packages are.

Used by ``EngineHealth`` and the engine model. The Python backend tells a model nothing of the server's settings; this
reads ``/proc`` and the environment only.
"""

import os
import sys
from pathlib import Path

from backend_engine import envs

_MODE_FLAG = "--model-control-mode"


def allows_unloading(command_line: Path | None = None) -> bool:
    """Whether the server lets models be unloaded, which is only in model control mode ``explicit``.

    command_line: file with the server's arguments, each ended by a zero byte; ``None`` = those of the parent process.
    False when it cannot be told: a server that refuses to unload is worse than one that is not asked.
    """
    path = Path("/proc", str(os.getppid()), "cmdline") if command_line is None else command_line
    try:
        arguments = path.read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return False
    mode = "none"
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == _MODE_FLAG:
            mode = following
        elif argument.startswith(f"{_MODE_FLAG}="):
            mode = argument.removeprefix(f"{_MODE_FLAG}=")
    return mode == "explicit"


def honour_python_path() -> None:
    """Add the folders of PYTHONPATH that are not on ``sys.path``, behind all others.

    Triton Server's Python backend of some releases (24.10) starts its interpreter isolated, so that plugins that an
    operator puts on PYTHONPATH would not be found.
    """
    for folder in filter(None, envs.PYTHONPATH.get().split(os.pathsep)):
        if folder not in sys.path:
            sys.path.append(folder)
