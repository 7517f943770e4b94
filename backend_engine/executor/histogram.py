"""``Histogram``: how often values fell between fixed bounds, and their sums; what the latency metrics are made of.

Owned by ``StatsRecorder``, written by the executor thread. Keeps no single value, so a snapshot has a fixed size
and nothing is lost between two of them. Knows no metric names.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HistogramTotals:
    """Totals since start, one entry a bucket; the last bucket has no upper bound.

    ``counts[i]`` values were at most ``bounds[i]`` and over the bound before it, and add up to ``sums[i]``.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sums: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def sum(self) -> float:
        """Sum of the values."""
        return sum(self.sums)


class Histogram:
    """Counts values. ``bounds`` are the buckets' upper bounds, inclusive, increasing."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = tuple(bounds)
        self._edges = np.array(bounds, np.float64)
        self._counts = [0] * (len(bounds) + 1)
        self._sums: list[float] = [0] * (len(bounds) + 1)

    def add(self, number: float) -> None:
        """Count one value."""
        bucket = bisect_left(self._bounds, number)
        self._counts[bucket] += 1
        self._sums[bucket] += number

    def add_all(self, numbers: Sequence[float]) -> None:
        """Count many values at the cost of a few numpy calls."""
        array = np.array(numbers, np.float64)
        buckets = np.searchsorted(self._edges, array, side="left")
        counts = np.bincount(buckets, minlength=len(self._counts))
        sums = np.bincount(buckets, weights=array, minlength=len(self._counts))
        for bucket in np.flatnonzero(counts).tolist():
            self._counts[bucket] += int(counts[bucket])
            self._sums[bucket] += float(sums[bucket])

    def totals(self) -> HistogramTotals:
        """A copy of the totals."""
        return HistogramTotals(self._bounds, tuple(self._counts), tuple(self._sums))
