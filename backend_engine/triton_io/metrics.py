"""The engine's Prometheus metrics, in Triton Server's own metrics page.

``EngineMetrics.refresh`` is called by the sender thread every ``stats_check_period_ms``. It does something only when
the statistics have changed or requests run, and then sets each sample that has changed, for setting one is a call into
Triton Server (25 to 60 us). What the samples are stands in ``metric_table.py``.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from backend_engine.executor.histogram import HistogramTotals
from backend_engine.executor.iteration_stats import EngineStats
from backend_engine.logger import get_logger
from backend_engine.triton_io import metric_table
from backend_engine.triton_io.metric_table import COUNTER, Family, HistogramFamily
from backend_engine.triton_io.stats_log import StatsLog

_log = get_logger(__name__)


class EngineMetrics:
    """The engine model's metric families and their samples, labelled ``model`` and ``version``.

    ``read_stats`` is ``LLM.stats``; ``ShutdownError`` of it is passed on.
    """

    def __init__(self, pb_utils: Any, model: str, version: str, read_stats: Callable[[], EngineStats]) -> None:
        self._pb_utils = pb_utils
        self._read_stats = read_stats
        self._last: EngineStats | None = None
        self._is_broken = False
        is_static = read_stats().is_static_batching
        page = _Page(pb_utils, {"model": model, "version": version})
        self._parts: list[_Part] = []
        for family in metric_table.families(is_static):
            self._parts += page.levels(family)
        for histogram in metric_table.HISTOGRAMS:
            bounds = histogram.read(read_stats()).bounds
            if histogram.is_native:
                self._parts.append(_NativeHistogram(histogram, page.native_histogram(histogram, bounds)))
            else:
                self._parts.append(_CountedHistogram(histogram, *page.counted_histogram(histogram, bounds)))
        self._page = page
        self._stats_log = StatsLog(pb_utils, metric_table.logged_families(is_static))

    def refresh(self) -> None:
        """Set what has changed and log it. When Triton Server refuses a sample, say so once and give up."""
        stats = self._read_stats()
        if self._is_broken or (stats == self._last and not stats.num_active):
            return
        try:
            for part in self._parts:
                part.update(stats)
            self._stats_log.write(stats)
            self._last = stats
        except self._pb_utils.TritonModelException as error:
            self._is_broken = True
            _log.error("the metrics cannot be updated and stay as they are: %s", error)


class _Part(Protocol):
    """Some samples of the page."""

    def update(self, stats: EngineStats) -> None: ...


class _Page:
    """Registers families with Triton Server, which drops a family that nobody holds."""

    def __init__(self, pb_utils: Any, labels: dict[str, str]) -> None:
        self._family_type = pb_utils.MetricFamily
        self._labels = labels
        self._held: list[Any] = []

    def levels(self, family: Family) -> "list[_Level]":
        """The samples of one family of gauges or counters."""
        kinds = self._family_type
        held = self._family(family.name, family.help, kinds.COUNTER if family.kind == COUNTER else kinds.GAUGE)
        return [
            _Level(
                held.Metric(labels=self._with_label(family.label, sample.category)), sample.read, family.kind == COUNTER
            )
            for sample in family.samples
        ]

    def native_histogram(self, family: HistogramFamily, bounds: tuple[float, ...]) -> Any:
        """A histogram of Triton Server's."""
        held = self._family(family.name, family.help, self._family_type.HISTOGRAM)
        labels = self._with_label(family.label, family.category)
        return held.Metric(labels=labels, buckets=[float(bound) for bound in bounds])

    def counted_histogram(self, family: HistogramFamily, bounds: tuple[float, ...]) -> tuple[list[Any], Any, Any]:
        """A histogram of counters: the buckets, the sum and the count."""
        kind = self._family_type.COUNTER
        buckets, total, count = (
            self._family(family.name + suffix, family.help, kind) for suffix in ("_bucket", "_sum", "_count")
        )
        edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        return (
            [buckets.Metric(labels=self._with_label("le", edge)) for edge in edges],
            total.Metric(labels=self._labels),
            count.Metric(labels=self._labels),
        )

    def _family(self, name: str, description: str, kind: Any) -> Any:
        family = self._family_type(name=name, description=description, kind=kind)
        self._held.append(family)
        return family

    def _with_label(self, label: str, category: str) -> dict[str, str]:
        return self._labels | {label: category} if label else self._labels


class _Level:
    """A gauge or a counter, and what it stands at."""

    def __init__(self, metric: Any, read: Callable[[EngineStats], float], is_counter: bool) -> None:
        self._metric = metric
        self._read = read
        self._is_counter = is_counter
        self._level: float = 0

    def update(self, stats: EngineStats) -> None:
        level = float(self._read(stats))
        if level == self._level or (self._is_counter and level < self._level):
            return
        if self._is_counter:
            self._metric.increment(level - self._level)
        else:
            self._metric.set(level)
        self._level = level


class _Growth(NamedTuple):
    """What has come to one bucket."""

    bucket: int
    num_new: int
    new_sum: float


def _growth(before: HistogramTotals | None, after: HistogramTotals) -> Iterator[_Growth]:
    for bucket, (count, total) in enumerate(zip(after.counts, after.sums, strict=True)):
        known, known_sum = (before.counts[bucket], before.sums[bucket]) if before is not None else (0, 0)
        if count > known:
            yield _Growth(bucket, count - known, total - known_sum)


class _NativeHistogram:
    """Tells Triton Server of new values in such a way that every bucket, the count and the sum are right.

    The values themselves are not kept: each bucket's new ones are replaced by as many with the same sum, which lie in
    the same bucket, as a mean of its values does.
    """

    def __init__(self, family: HistogramFamily, metric: Any) -> None:
        self._read = family.read
        self._metric = metric
        self._told: HistogramTotals | None = None

    def update(self, stats: EngineStats) -> None:
        totals = self._read(stats)
        for grown in _growth(self._told, totals):
            for number in _stand_ins(grown, totals.bounds):
                self._metric.observe(float(number))
        self._told = totals


def _stand_ins(grown: _Growth, bounds: tuple[float, ...]) -> Sequence[float]:
    """``grown.num_new`` values in its bucket that add up to its sum; whole numbers stay whole."""
    if isinstance(grown.new_sum, int):
        low, num_higher = divmod(grown.new_sum, grown.num_new)
        return [low] * (grown.num_new - num_higher) + [low + 1] * num_higher
    mean = grown.new_sum / grown.num_new
    if bisect_left(bounds, mean) != grown.bucket:  # rounding led over the edge
        mean = bounds[min(grown.bucket, len(bounds) - 1)]
    return [mean] * grown.num_new


class _CountedHistogram:
    """Counters with a histogram's names: cumulative buckets, sum and count; see ``HistogramFamily``."""

    def __init__(self, family: HistogramFamily, buckets: list[Any], total: Any, count: Any) -> None:
        self._read = family.read
        self._buckets = buckets
        self._sum = total
        self._count = count
        self._told: HistogramTotals | None = None

    def update(self, stats: EngineStats) -> None:
        totals = self._read(stats)
        counts = [0] * len(self._buckets)
        new_sum = 0.0
        for grown in _growth(self._told, totals):
            counts[grown.bucket] = grown.num_new
            new_sum += grown.new_sum
        self._told = totals
        if not any(counts):
            return
        # From the widest bucket down, so that a reader in between never sees a narrower one hold more.
        for bucket, count in reversed(list(zip(self._buckets, accumulate(counts), strict=True))):
            if count:
                bucket.increment(float(count))
        self._sum.increment(new_sum)
        self._count.increment(float(sum(counts)))
