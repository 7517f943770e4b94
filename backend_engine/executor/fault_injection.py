"""Test hooks of the engine: a delay per step, and steps that fail or hang on purpose. ``NoFaults`` is the null twin.

Switched on by ``debug_step_delay_ms``, ``debug_fail_on_tokens`` and ``debug_hang_on_tokens`` alone; meant for tests of
what happens around a slow, failing or stuck step, never for production.
"""

import time

from backend_engine.core.batch import SchedulerOutput
from backend_engine.errors import StepFailedError

HANG_S = 24 * 3600.0
_HANG_POLL_S = 0.1

TokenSequences = tuple[tuple[int, ...], ...]


class NoFaults:
    """Steps run as they are."""

    def before_forward(self, output: SchedulerOutput) -> None:
        """Do nothing."""


class InjectedFaults(NoFaults):
    """Sleeps ``delay_s`` before each forward; fails or hangs a step in which a request's tokens equal one of the lists.

    A step of ``hang_on`` sleeps for ``hang_s`` seconds in small waits, a day unless a test says otherwise.
    """

    def __init__(
        self, delay_s: float, fail_on: TokenSequences, hang_on: TokenSequences = (), hang_s: float = HANG_S
    ) -> None:
        self._delay_s = delay_s
        self._fail_on = frozenset(fail_on)
        self._hang_on = frozenset(hang_on)
        self._hang_s = hang_s

    def before_forward(self, output: SchedulerOutput) -> None:
        """Sleep, then raise ``StepFailedError`` or hang if a row matches."""
        if self._delay_s:
            time.sleep(self._delay_s)
        if not self._fail_on and not self._hang_on:
            return
        for row in output.rows:
            tokens = tuple(row.request.token_ids(0, row.request.num_tokens))
            if tokens in self._fail_on:
                raise StepFailedError(f"injected fault at token {len(tokens)} of request {row.request.request_id}")
            if tokens in self._hang_on:
                self._hang()

    def _hang(self) -> None:
        end = time.monotonic() + self._hang_s
        while time.monotonic() < end:
            time.sleep(_HANG_POLL_S)


def create_faults(delay_ms: float, fail_on: TokenSequences, hang_on: TokenSequences = ()) -> NoFaults:
    """The hooks that the configuration asks for."""
    return InjectedFaults(delay_ms / 1000, fail_on, hang_on) if delay_ms or fail_on or hang_on else NoFaults()
