"""When a request's tokens arrived, and the figures that follow from it. Used by the adapters and by the rounds."""

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

METRICS = {
    "W1": ("tokens/s", "first token ms"),
    "W2": ("tokens/s",),
    "W3": ("cold tokens/s", "warm tokens/s"),
    "W4": ("longest gap ms", "long prompt's first token ms"),
}


@dataclass
class Timeline:
    """One request: when it was sent and when each of its tokens came, in seconds since its phase began."""

    submitted: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, token_ids: list[int], at: float) -> None:
        """Tokens that arrived together."""
        self.token_ids.extend(token_ids)
        self.times.extend([at] * len(token_ids))


@dataclass
class Recorder:
    """The timelines of a phase; its clock starts when it is made."""

    start: float = field(default_factory=time.perf_counter)
    timelines: list[Timeline] = field(default_factory=list)

    def now(self) -> float:
        """Seconds since the phase began."""
        return time.perf_counter() - self.start

    def sent(self) -> Timeline:
        """A request is sent now."""
        self.timelines.append(Timeline(self.now()))
        return self.timelines[-1]

    def have(self, num_tokens: int) -> bool:
        """Whether every request so far has this many tokens."""
        return all(len(timeline.times) >= num_tokens for timeline in self.timelines)


def to_json(timelines: list[Timeline]) -> list[dict[str, Any]]:
    """For the line protocol."""
    return [asdict(timeline) for timeline in timelines]


def from_json(timelines: list[dict[str, Any]]) -> list[Timeline]:
    """What ``to_json`` wrote."""
    return [Timeline(**timeline) for timeline in timelines]


def metrics(workload: str, phases: dict[str, list[Timeline]]) -> dict[str, float]:
    """The figures of ``METRICS`` for one run: tokens a second, or milliseconds."""
    if workload == "W3":
        return {f"{name} tokens/s": tokens_per_s(phases[name]) for name in ("cold", "warm")}
    if workload == "W1":
        first = [t.times[0] - t.submitted for run in phases.values() for t in run]
        return {
            "tokens/s": statistics.median(tokens_per_s(run) for run in phases.values()),
            "first token ms": 1e3 * statistics.median(first),
        }
    run = phases["run"]
    if workload == "W4":
        *streams, late = run
        return {
            "longest gap ms": 1e3 * longest_gap(streams, late.submitted),
            "long prompt's first token ms": 1e3 * (late.times[0] - late.submitted),
        }
    return {"tokens/s": tokens_per_s(run)}


def tokens_per_s(timelines: list[Timeline]) -> float:
    """Output tokens over the time from the first request sent to the last token."""
    first = min(timeline.submitted for timeline in timelines)
    return sum(len(t.times) for t in timelines) / (max(t.times[-1] for t in timelines) - first)


def longest_gap(timelines: list[Timeline], since: float) -> float:
    """The longest time between two tokens of one stream, of the gaps that end after ``since``, seconds."""
    pairs = [pair for t in timelines for pair in zip(t.times, t.times[1:], strict=False)]
    return max(after - before for before, after in pairs if after > since)
