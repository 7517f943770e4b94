"""Workloads W1 to W4 as token ids: made the same in every engine's process, from a name and a salt.

The salt changes the first token of every prompt (of every shared beginning), so that no run finds blocks that an
earlier one left in a prefix cache. Standard library alone.
"""

import random
from dataclasses import dataclass, replace

from bench_common import Job, mixed_batch, single_stream

VOCAB_SIZE = 49_152
SHARED_PREFIX = 512
NUM_SHARING = 16
LONG_PROMPT = 2_048
LATE_AFTER = 16
STREAMS_IN_TURN = 5
WORKLOADS = {
    "W1": "one stream, 128 tokens in, 128 out; the middle of five, one after another",
    "W2": "16 requests at once, 32 to 512 tokens in (4,352 in all), 32 to 128 out (1,280 in all)",
    "W3": "16 requests that share a beginning of 512 tokens, 32 tokens of their own, 32 out: cold, then warm",
    "W4": "4 streams decoding when a prompt of 2,048 tokens arrives",
}


@dataclass(frozen=True)
class Phase:
    """Jobs sent at once. ``late``: one more, sent once each of the others has ``LATE_AFTER`` tokens."""

    name: str
    jobs: list[Job]
    late: Job | None = None

    @property
    def all_jobs(self) -> list[Job]:
        """Those sent at once, then the late one."""
        return [*self.jobs, *([self.late] if self.late else [])]


def phases(workload: str, salt: int) -> list[Phase]:
    """What one run of ``workload`` sends, phase after phase. ``KeyError`` names an unknown workload."""
    return {"W1": _one_stream, "W2": _mixed, "W3": _shared, "W4": _long_arrival}[workload](salt)


def salted(jobs: list[Job], salt: int) -> list[Job]:
    """The same jobs with another first token."""
    return [replace(job, prompt_token_ids=[100 + salt, *job.prompt_token_ids[1:]]) for job in jobs]


def _one_stream(salt: int) -> list[Phase]:
    """One first token is too short a time to be judged by."""
    jobs = single_stream(VOCAB_SIZE)
    return [Phase(f"run {i + 1}", salted(jobs, salt + 1_000 * i)) for i in range(STREAMS_IN_TURN)]


def _mixed(salt: int) -> list[Phase]:
    return [Phase("run", salted(mixed_batch(VOCAB_SIZE, 16), salt))]


def _shared(salt: int) -> list[Phase]:
    rng = random.Random(3)
    prefix = _ids(rng, SHARED_PREFIX)
    return [
        Phase(name, salted([Job([*prefix, *_ids(rng, 32)], 32) for _ in range(NUM_SHARING)], salt))
        for name in ("cold", "warm")
    ]


def _long_arrival(salt: int) -> list[Phase]:
    rng = random.Random(4)
    streams = [Job(_ids(rng, 64), 96) for _ in range(4)]
    return [Phase("run", salted(streams, salt), salted([Job(_ids(rng, LONG_PROMPT), 16)], salt)[0])]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, VOCAB_SIZE) for _ in range(count)]
