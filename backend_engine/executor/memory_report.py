"""``report_memory``: the one line at start that sets the memory that was planned beside what was taken.

Called by the composition root. Knows numbers alone; measures nothing.
"""

from typing import NamedTuple

from backend_engine.logger import get_logger

_logger = get_logger(__name__)

TOLERANCE = 0.03
"""Share of the planned bytes by which those taken may differ without a warning."""


class MemoryUse(NamedTuple):
    """Bytes of weights and of the KV cache; ``None``: not known before the model is loaded."""

    weights: int | None = None
    kv_cache: int | None = None


def report_memory(planned: MemoryUse, taken: MemoryUse) -> None:
    """Log both; warn of what differs from its plan by more than ``TOLERANCE``."""
    _logger.info(
        "memory: weights %s taken, %s; KV cache %s taken, %s",
        _megabytes(taken.weights), _told(planned.weights), _megabytes(taken.kv_cache), _told(planned.kv_cache),
    )  # fmt: skip
    for what, plan, actual in (
        ("weights", planned.weights, taken.weights),
        ("KV cache", planned.kv_cache, taken.kv_cache),
    ):
        if plan is not None and actual is not None and abs(actual - plan) > TOLERANCE * plan:
            _logger.warning(
                "memory: the %s took %d bytes, %d were planned: %+.1f %%, more than %d %% apart",
                what, actual, plan, 100 * (actual - plan) / plan if plan else 100.0, round(100 * TOLERANCE),
            )  # fmt: skip


def _told(planned: int | None) -> str:
    return "no plan before it is loaded" if planned is None else f"{_megabytes(planned)} planned"


def _megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:.1f} MB"
