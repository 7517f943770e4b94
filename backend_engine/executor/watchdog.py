"""``Watchdog``: notices that the executor thread is stuck in a step, or gone, and has the engine declared dead.

Started and stopped by ``PyExecutor``; a thread of its own that only reads the heartbeat. It never touches a request,
and it cannot end the step that hangs: what it does is stop everybody from waiting for it.
"""

import sys
import threading
import time
import traceback
from typing import Protocol

from backend_engine.logger import get_logger

_logger = get_logger(__name__)

MAX_PERIOD_S = 0.2
STACK_DEPTH = 12

# How long a step may take by the size of the model, when nobody says: far more than any step that is well.
_BASE_S = 10.0
_CPU_FLOPS, _GPU_FLOPS = 20e9, 2e12


def automatic_step_timeout_s(flop_per_token: float, max_num_tokens: int, device: str) -> float:
    """Seconds after which a step of ``max_num_tokens`` tokens counts as stuck."""
    flop_per_second = _CPU_FLOPS if device == "cpu" else _GPU_FLOPS
    return _BASE_S + flop_per_token * max_num_tokens / flop_per_second


class Watched(Protocol):
    """What the watchdog sees of ``PyExecutor``."""

    @property
    def step_began(self) -> float | None:
        """When the running step began (monotonic seconds); ``None`` between steps."""
        ...

    @property
    def thread(self) -> threading.Thread:
        """The executor thread."""
        ...

    @property
    def is_stopping(self) -> bool:
        """True once the thread is meant to end."""
        ...

    def declare_dead(self, reason: str) -> None:
        """End all requests with an error and refuse new ones."""
        ...


class Watchdog:
    """Looks at the heartbeat every ``period_s`` and declares a step dead that has run for ``step_timeout_s``.

    Time is counted in looks: when the whole process was stopped and goes on, the gap between two looks counts as two
    periods at most, and a healthy step is not blamed for it.
    """

    def __init__(self, watched: Watched, step_timeout_s: float) -> None:
        assert step_timeout_s > 0, step_timeout_s
        self._watched = watched
        self._step_timeout_s = step_timeout_s
        self._period_s = min(MAX_PERIOD_S, step_timeout_s / 4)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; does not wait."""
        self._stopping.set()

    def _run(self) -> None:
        began: float | None = None
        ran_for = 0.0
        looked = time.monotonic()
        while not self._stopping.wait(self._period_s):
            now = time.monotonic()
            if not self._watched.thread.is_alive():
                if not self._watched.is_stopping:
                    self._watched.declare_dead("the engine has stopped: its thread has ended; see the log")
                return
            last, began = began, self._watched.step_began
            is_same = began is not None and began == last
            ran_for = ran_for + min(now - looked, 2 * self._period_s) if is_same else 0.0
            looked = now
            if ran_for >= self._step_timeout_s:
                self._bark()
                return

    def _bark(self) -> None:
        frame = sys._current_frames().get(self._watched.thread.ident or 0)
        stack = "".join(traceback.format_stack(frame, STACK_DEPTH)) if frame is not None else "unknown\n"
        _logger.error("a step has run for more than %g s; it hangs here:\n%s", self._step_timeout_s, stack.rstrip())
        self._watched.declare_dead(f"the engine is stuck: a step has run for more than {self._step_timeout_s:g} s")
