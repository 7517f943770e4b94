"""Writes what a load test measured: a table (Markdown and CSV), a comparison with an earlier run, and a plot.

``load_test.py`` calls it. The CSV is what ``--baseline-csv`` reads back.
"""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from load_test_records import LoadPoint

_FIELDS = [field.name for field in dataclasses.fields(LoadPoint)]
_HEADERS = (
    "concurrency", "requests", "first token p50, ms", "first token p90, ms", "between tokens p50, ms",
    "request p50, ms", "request p90, ms", "request p99, ms", "tokens/s", "requests/s",
)  # fmt: skip
_BASELINE_HEADERS = ("tokens/s vs. baseline", "request p50 vs. baseline")


class ReportError(Exception):
    """A file cannot be read or a plot not drawn; the message is one line."""


def describe(point: LoadPoint) -> str:
    """What the points of a table have in common."""
    how = "streamed" if point.streaming else "whole answers"
    return f"{point.model} over {point.protocol}, {how}, measured by {point.client}"


def table(points: Sequence[LoadPoint], baseline: Sequence[LoadPoint] = ()) -> str:
    """A Markdown table, one row a concurrency; with a ``baseline`` also the ratio of each to the same setting there."""
    headers = _HEADERS + (_BASELINE_HEADERS if baseline else ())
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    for point in points:
        cells = [
            str(point.concurrency), str(point.requests), _ms(point.first_token_p50), _ms(point.first_token_p90),
            _ms(point.inter_token_p50), _ms(point.latency_p50), _ms(point.latency_p90), _ms(point.latency_p99),
            f"{point.tokens_per_s:.1f}", f"{point.requests_per_s:.2f}",
        ]  # fmt: skip
        if baseline:
            cells += _ratios(point, baseline)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _ratios(point: LoadPoint, baseline: Sequence[LoadPoint]) -> list[str]:
    same = [before for before in baseline if _setting(before) == _setting(point)]
    if not same:
        return ["-", "-"]
    before = same[-1]
    return [f"{point.tokens_per_s / before.tokens_per_s:.2f}x", f"{point.latency_p50 / before.latency_p50:.2f}x"]


def _setting(point: LoadPoint) -> tuple[str, str, bool, int]:
    return (point.model, point.protocol, point.streaming, point.concurrency)


def write_csv(path: Path, points: Sequence[LoadPoint]) -> None:
    """Write one line a point, with every field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_FIELDS)
        for point in points:
            writer.writerow(["" if value is None else value for value in dataclasses.astuple(point)])


def read_csv(path: Path) -> list[LoadPoint]:
    """Read what ``write_csv`` wrote. Raises ``ReportError`` naming the file and what is wrong with it."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: {error}") from None
    missing = [name for name in _FIELDS if not rows or name not in rows[0]]
    if missing:
        raise ReportError(f"{path} is no table of a load test: it has no {', '.join(missing)}")
    try:
        return [_point(row) for row in rows]
    except ValueError as error:
        raise ReportError(f"{path}: {error}") from None


def _point(row: dict[str, str]) -> LoadPoint:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return LoadPoint(
        client=row["client"], model=row["model"], protocol=row["protocol"], streaming=row["streaming"] == "True",
        concurrency=int(row["concurrency"]), requests=int(row["requests"]),
        first_token_p50=number("first_token_p50"), first_token_p90=number("first_token_p90"),
        inter_token_p50=number("inter_token_p50"), latency_p50=float(row["latency_p50"]),
        latency_p90=float(row["latency_p90"]), latency_p99=float(row["latency_p99"]),
        tokens_per_s=float(row["tokens_per_s"]), requests_per_s=float(row["requests_per_s"]),
    )  # fmt: skip


def write_plot(path: Path, points: Sequence[LoadPoint], title: str, baseline: Sequence[LoadPoint] = ()) -> None:
    """Draw latency over throughput as a PNG, one mark a concurrency. Raises ``ReportError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError("plots need matplotlib: pip install matplotlib, or pass --no-plot") from None
    figure = Figure(figsize=(6.4, 4.0), dpi=90, layout="constrained")
    axes = figure.subplots()
    for series, color, name in ((points, "#1f6fb4", ""), (baseline, "#999999", ", baseline")):
        if not series:
            continue
        rates = [point.tokens_per_s for point in series]
        axes.plot(rates, [p.latency_p50 for p in series], "o-", color=color, label=f"request latency p50{name}")
        axes.plot(rates, [p.latency_p90 for p in series], "o:", color=color, label=f"request latency p90{name}")
        if all(p.first_token_p50 is not None for p in series):
            firsts = [p.first_token_p50 for p in series if p.first_token_p50 is not None]
            axes.plot(rates, firsts, "s--", color=color, alpha=0.55, label=f"time to first token p50{name}")
    for point in points:
        place = (point.tokens_per_s, point.latency_p50)
        axes.annotate(str(point.concurrency), place, textcoords="offset points", xytext=(4, -11), fontsize=8)
    axes.set(xlabel="output tokens/s, all requests together", ylabel="ms", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="numbers: concurrency", title_fontsize=8)
    figure.savefig(path)
