"""The tables, peers.json and peers.png of a benchmark run."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bench_common as common

from peers.rounds import Outcome
from peers.targets import OURS, Row, median, values
from peers.timeline import METRICS
from peers.workloads import WORKLOADS

OURS_COLOR, PEER_COLOR = "#76b900", "#999999"


def as_json(
    outcome: Outcome, rows: Sequence[Row], unavailable: dict[str, str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, for peers.json."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "commit": common.commit(), "machine": machine(),
        "settings": settings, "workloads": WORKLOADS, "rows": list(rows), "unavailable": unavailable,
        "engines": outcome.engines, "rounds": outcome.figures, "bandwidth_gb_s": outcome.bandwidths,
        "unsteady": {name: reasons for name, reasons in outcome.unsteady.items() if reasons},
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor, cores, memory, Python."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(), "cores": common.usable_cores(),
        "memory_gib": round(memory / 2**30, 1), "python": platform.python_version(),
    }  # fmt: skip


def write(folder: Path, found: dict[str, Any]) -> None:
    """peers.json and peers.png in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found, folder / "peers.png")


def print_tables(found: dict[str, Any]) -> None:
    """Engines and their medians, the targets, and what could not be judged."""
    header, lines = medians(found)
    common.print_table(header, lines)
    print()
    common.print_table(
        ["workload", "metric", "ours", "peer", "ours", "peer", "ratio", "rounds", "target", "met"],
        [target_cells(row) for row in found["rows"]],
    )
    for name, reason in found["unavailable"].items():
        print(f"{name}: not available: {reason}")
    for name, engine in found["engines"].items():
        if "failed" in engine:
            print(f"{name}: failed: {engine['failed']}")
    for name, reasons in found["unsteady"].items():
        print(f"{name}: too unsteady to judge: {'; '.join(reasons)}")


def medians(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of medians."""
    columns = [(workload, metric) for workload in found["settings"]["workloads"] for metric in METRICS[workload]]
    header = ["engine", "version", "greedy as the reference", *(f"{w} {m}" for w, m in columns)]
    lines = []
    for name, engine in found["engines"].items():
        share = engine.get("greedy_equal")
        cells = [_number(median(values(found["rounds"], name, w, m))) for w, m in columns]
        lines.append([name, engine.get("version", "-"), "-" if share is None else f"{share:.1%}", *cells])
    return header, lines


def target_cells(row: Row) -> list[str]:
    """A row of the table of targets."""
    met = {True: "yes", False: "no", None: "-"}[row["met"]] + ("" if row["steady"] else " (unsteady)")
    spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}" if row["ratios"] else "-"
    return [
        row["workload"], row["metric"], row["ours_engine"], row["peer_engine"], _number(row["ours"]),
        _number(row["peer"]), "-" if row["ratio"] is None else f"{row['ratio']:.2f}", spread,
        f"{row['bound']} {row['target']:g}", met,
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def plot(found: dict[str, Any], path: Path) -> None:
    """One panel for each figure, one bar for each engine: the median, with the lowest and highest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(workload, metric) for workload in found["settings"]["workloads"] for metric in METRICS[workload]]
    wide = min(3, len(columns))
    deep = -(-len(columns) // wide)
    figure, panels = pyplot.subplots(deep, wide, figsize=(5.4 * wide, 2.9 * deep), squeeze=False)
    for panel in panels.flat[len(columns) :]:
        panel.set_visible(False)
    for panel, (workload, metric) in zip(panels.flat, columns, strict=False):
        measured = {name: values(found["rounds"], name, workload, metric) for name in found["engines"]}
        bars = {name: numbers for name, numbers in reversed(measured.items()) if numbers}
        middle = [common.median(numbers) for numbers in bars.values()]
        low = [m - min(numbers) for m, numbers in zip(middle, bars.values(), strict=True)]
        high = [max(numbers) - m for m, numbers in zip(middle, bars.values(), strict=True)]
        colors = [OURS_COLOR if name.startswith(OURS) else PEER_COLOR for name in bars]
        panel.barh(list(bars), middle, xerr=[low, high], color=colors, ecolor="#444444", capsize=2)
        panel.set_title(f"{workload}: {metric}" + ("" if metric.endswith("/s") else " (less is better)"), fontsize=10)
        panel.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
