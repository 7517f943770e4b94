"""Test hooks of the engine: a delay per step, and a step that fails on purpose. ``NoFaults`` is the null twin.

Switched on by ``debug_step_delay_ms`` and ``debug_fail_on_tokens`` alone; meant for tests of what happens
around a slow or failing step, never for production.
"""

import time

from backend_engine.core.batch import SchedulerOutput
from backend_engine.errors import StepFailedError


class NoFaults:
    """Steps run as they are."""

    def before_forward(self, output: SchedulerOutput) -> None:
        """Do nothing."""


class InjectedFaults(NoFaults):
    """Sleeps ``delay_s`` before each forward, and fails a step in which a request's tokens equal one of ``fail_on``."""

    def __init__(self, delay_s: float, fail_on: tuple[tuple[int, ...], ...]) -> None:
        self._delay_s = delay_s
        self._fail_on = frozenset(fail_on)

    def before_forward(self, output: SchedulerOutput) -> None:
        """Sleep, then raise ``StepFailedError`` if a row matches."""
        if self._delay_s:
            time.sleep(self._delay_s)
        if not self._fail_on:
            return
        for row in output.rows:
            tokens = tuple(row.request.token_ids(0, row.request.num_tokens))
            if tokens in self._fail_on:
                raise StepFailedError(f"injected fault at token {len(tokens)} of request {row.request.request_id}")


def create_faults(delay_ms: float, fail_on: tuple[tuple[int, ...], ...]) -> NoFaults:
    """The hooks that the configuration asks for."""
    return InjectedFaults(delay_ms / 1000, fail_on) if delay_ms or fail_on else NoFaults()
