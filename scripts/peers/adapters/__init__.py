"""One module an engine, each with ``create()``; imported in that engine's own environment alone."""

from typing import Protocol

from peers.timeline import Recorder, Timeline
from peers.workloads import Phase


class Engine(Protocol):
    """What ``child.py`` drives. Greedy always, end ids ignored, prompts as token ids."""

    def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
        """Load; answers the engine's version. ``max_num_tokens``: most tokens a step, ``None`` = its own choice."""

    def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
        """Send the phase's jobs and wait for all tokens; timelines in the order of ``phase.all_jobs``."""

    def close(self) -> None:
        """Let go of everything."""
