"""The statistics log line: the ``nv_trt_llm`` samples of one refresh as a JSON object, in the server's log.

``EngineMetrics`` calls it with what it has put on the metrics page, so that the two agree. Written at verbose level,
which ``POST /v2/logging {"log_verbose_level": 1}`` switches on; Triton Server then escapes the quotes.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from backend_engine.executor.iteration_stats import EngineStats
from backend_engine.triton_io.metric_table import TIMESTAMP, Family

TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S.%f"


def stats_line(stats: EngineStats, families: Sequence[Family]) -> str:
    """One JSON object with a key for each sample; whole numbers have no decimal point, the time is UTC text."""
    values: dict[str, float | str] = {}
    for family in families:
        for sample in family.samples:
            number = sample.read(stats)
            values[sample.log_key] = _time_text(int(number)) if sample.category == TIMESTAMP else _shortest(number)
    return json.dumps(values)


class StatsLog:
    """Writes ``stats_line`` through Triton Server's logger."""

    def __init__(self, pb_utils: Any, families: Sequence[Family]) -> None:
        self._logger = pb_utils.Logger
        self._families = families

    def write(self, stats: EngineStats) -> None:
        """Log one refresh; nothing happens below verbose level 1."""
        self._logger.log_verbose(stats_line(stats, self._families))


def _shortest(number: float) -> float:
    return int(number) if number == int(number) else number


def _time_text(microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest).strftime(TIMESTAMP_FORMAT)
