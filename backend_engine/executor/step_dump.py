"""Redacted record of each step as JSON lines (``ENGINE_DUMP_STEPS=path``): shapes, never token ids or text.

``NoDump`` is the null twin. A record can be read back and replayed into the scheduler's tests.
"""

import json
from typing import Any, TextIO

from backend_engine.core.batch import SchedulerOutput


class NoDump:
    """Records nothing."""

    def write(self, output: SchedulerOutput) -> None:
        """Do nothing."""


class StepDump(NoDump):
    """Appends one line a step to ``path``."""

    def __init__(self, path: str) -> None:
        self._file: TextIO = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as we do

    def write(self, output: SchedulerOutput) -> None:
        """Append ``output``."""
        self._file.write(json.dumps(redacted(output)) + "\n")


def redacted(output: SchedulerOutput) -> dict[str, Any]:
    """The plan of a step without anything a user wrote: ids of requests, positions and counts."""

    def row(scheduled: Any) -> dict[str, Any]:
        return {
            "request_id": scheduled.request.request_id,
            "start": scheduled.start,
            "num_tokens": scheduled.num_tokens,
            "needs_logits": scheduled.needs_logits,
            "num_reused_tokens": scheduled.num_reused_tokens,
        }

    return {
        "step": output.step,
        "context": [row(r) for r in output.context],
        "generation": [row(r) for r in output.generation],
        "paused": [request.request_id for request in output.paused],
    }
