"""The parent's side of the line protocol: one engine in a process group of its own, stopped between its turns.

An engine that is idle gets SIGSTOP, so that nothing that spins takes cores from the one whose turn it is.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUIT_S = 20.0


class PeerError(Exception):
    """A peer cannot be installed, loaded or run; the message is one line."""


class EngineProcess:
    """One child. ``ask`` wakes it, waits for one answer and stops it again; ``close`` ends its whole group."""

    def __init__(self, command: Sequence[str], log: Path, folder: Path | None = None) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0,
                start_new_session=True, cwd=folder,
            )  # fmt: skip

    def ask(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        """The answer to one message. ``PeerError`` when the child ends or does not answer in time."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(message) + "\n").encode())
        except BrokenPipeError:
            raise PeerError(f"the process ended: {self._reason()}") from None
        answer: dict[str, Any] = json.loads(self._line(timeout_s, message))
        self._signal(signal.SIGSTOP)
        return answer

    def _line(self, timeout_s: float, message: dict[str, Any]) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline, parts = self._process.stdout.fileno(), time.monotonic() + timeout_s, b""
        while not parts.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise PeerError(f"no answer to {message['op']!r} within {timeout_s:g} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise PeerError(f"the process ended: {self._reason()}")
            parts += part
        return parts

    def _reason(self) -> str:
        """The last line on standard error that says something."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "error"))]
        return (errors or lines or [f"nothing said, see {self._log}"])[-1][:300]

    def close(self) -> None:
        """Ask it to end; kill what has not after a while."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may have ended already
            self._process.stdin.write(b'{"op": "quit"}\n')
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group may be gone
            os.killpg(self._process.pid, number)
