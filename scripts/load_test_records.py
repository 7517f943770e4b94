"""What a load test measures: one record a request, and the figures of one concurrency made from them.

Both load generators of ``load_test.py`` produce these records, so their columns mean the same. It measures nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestRecord:
    """One request: when it was sent, when each response came (nanoseconds of one clock), tokens in each response."""

    start_ns: int
    response_ns: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.response_ns or len(self.response_ns) != len(self.tokens):
            raise ValueError(f"{len(self.response_ns)} response times for {len(self.tokens)} token counts")

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole answer."""
        return sum(self.tokens)

    @property
    def end_ns(self) -> int:
        """When the last response came."""
        return self.response_ns[-1]

    @property
    def latency_ms(self) -> float:
        """From sending to the last response."""
        return (self.end_ns - self.start_ns) / 1e6

    def token_times(self) -> list[tuple[int, int]]:
        """(time, tokens) of the responses that brought tokens."""
        return [(at, count) for at, count in zip(self.response_ns, self.tokens, strict=True) if count > 0]

    @property
    def first_token_ms(self) -> float | None:
        """From sending to the first response with a token; None when no token came."""
        times = self.token_times()
        return (times[0][0] - self.start_ns) / 1e6 if times else None

    @property
    def inter_token_ms(self) -> float | None:
        """Time after the first response, per token that came after it; None when all came at once."""
        times = self.token_times()
        later = sum(count for _, count in times[1:])
        return (times[-1][0] - times[0][0]) / 1e6 / later if later else None


@dataclass(frozen=True)
class LoadPoint:
    """Figures of one concurrency. Times are milliseconds; None where the answers do not come in pieces."""

    client: str
    model: str
    protocol: str
    streaming: bool
    concurrency: int
    requests: int
    first_token_p50: float | None
    first_token_p90: float | None
    inter_token_p50: float | None
    latency_p50: float
    latency_p90: float
    latency_p99: float
    tokens_per_s: float
    requests_per_s: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of a non-empty list."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarize(
    records: Sequence[RequestRecord], client: str, model: str, protocol: str, streaming: bool, concurrency: int
) -> LoadPoint:
    """Figures of one run. Rates are over the time from the first request sent to the last response. Needs a record."""
    if not records:
        raise ValueError(f"no request was measured at concurrency {concurrency}")
    seconds = (max(r.end_ns for r in records) - min(r.start_ns for r in records)) / 1e9
    firsts = [r.first_token_ms for r in records if r.first_token_ms is not None] if streaming else []
    gaps = [r.inter_token_ms for r in records if r.inter_token_ms is not None] if streaming else []
    latencies = [r.latency_ms for r in records]
    return LoadPoint(
        client=client, model=model, protocol=protocol, streaming=streaming, concurrency=concurrency,
        requests=len(records),
        first_token_p50=percentile(firsts, 50) if firsts else None,
        first_token_p90=percentile(firsts, 90) if firsts else None,
        inter_token_p50=percentile(gaps, 50) if gaps else None,
        latency_p50=percentile(latencies, 50), latency_p90=percentile(latencies, 90),
        latency_p99=percentile(latencies, 99),
        tokens_per_s=sum(r.num_tokens for r in records) / seconds, requests_per_s=len(records) / seconds,
    )  # fmt: skip
