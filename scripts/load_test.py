#!/usr/bin/env python3
"""Load test of a running server over a range of concurrencies: a table, a CSV and a latency-throughput plot.

Drives NVIDIA's perf_analyzer (fetched into the cache with progress, run through a newer loader where the C library is
old), or with ``--client builtin`` a small generator of its own that measures the same columns.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from compat.client_env import ClientUnavailableError
from compat.perf_analyzer_env import find_perf_analyzer
from load_test_builtin import run_builtin
from load_test_perf_analyzer import LoadError, run_perf_analyzer
from load_test_records import LoadPoint, RequestRecord, summarize
from load_test_report import ReportError, describe, read_csv, table, write_csv, write_plot
from load_test_workload import MODELS, Workload

REQUESTS_PER_CLIENT = 4
MIN_REQUESTS = 8
Runner = Callable[[int, int], list[RequestRecord]]


def concurrencies(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4`` for argparse."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use numbers above 0 such as 1,2,4,8,16")
    return tuple(int(word) for word in words)


def positive(text: str) -> int:
    """Parse a number above 0 for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a number above 0")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--url", help="host:port (default localhost:8001 for grpc, localhost:8000 for http)")
    parser.add_argument("--model", choices=MODELS, default="ensemble", help="which model is asked (%(default)s)")
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc", help="(default %(default)s)")
    parser.add_argument("--concurrency", type=concurrencies, default=(1, 2, 4, 8, 16), help="default 1,2,4,8,16")
    parser.add_argument("--input-len", type=positive, default=64, help="tokens in, for text about (%(default)s)")
    parser.add_argument("--output-len", type=positive, default=32, help="tokens out, exact (%(default)s)")
    parser.add_argument("--no-streaming", action="store_true", help="ask for whole answers")
    parser.add_argument(
        "--requests", type=positive, help="requests a concurrency (default: 4 for each client, at least 8)"
    )
    parser.add_argument("--client", choices=("perf_analyzer", "builtin"), default="perf_analyzer")
    parser.add_argument("--baseline-csv", type=Path, help="CSV of an earlier run to compare with")
    parser.add_argument("--output", type=Path, default=Path("load_test"), help="files OUTPUT.md, .csv and .png")
    parser.add_argument("--no-plot", action="store_true", help="write no plot (needs no matplotlib)")
    return parser


def find_runner(arguments: argparse.Namespace, workload: Workload) -> Runner:
    """Return what measures (concurrency, number of requests). Raises ``ClientUnavailableError``, ``LoadError``."""
    url = arguments.url or ("localhost:8001" if arguments.protocol == "grpc" else "localhost:8000")
    if arguments.client == "builtin":
        if arguments.protocol == "http":
            raise LoadError("--client builtin speaks grpc only; use --protocol grpc or --client perf_analyzer")
        return lambda concurrency, count: run_builtin(url, workload, concurrency, count)
    if arguments.protocol == "http" and workload.streaming:
        raise LoadError("perf_analyzer streams over grpc only; add --no-streaming (and deploy decoupled_mode:false)")
    program = find_perf_analyzer().path
    return lambda concurrency, count: run_perf_analyzer(program, url, arguments.protocol, workload, concurrency, count)


def measure(arguments: argparse.Namespace, workload: Workload, run: Runner) -> list[LoadPoint]:
    """Measure each concurrency once, after one small round that is thrown away; tells its progress."""
    run(1, 2)
    points = []
    for number, concurrency in enumerate(arguments.concurrency, 1):
        # perf_analyzer ends with a request that is a multiple of the concurrency, so ask for one.
        count = arguments.requests or max(MIN_REQUESTS, REQUESTS_PER_CLIENT * concurrency)
        count = math.ceil(count / concurrency) * concurrency
        records = run(concurrency, count)
        point = summarize(
            records, arguments.client, workload.model, arguments.protocol, workload.streaming, concurrency
        )
        points.append(point)
        print(
            f"[{number}/{len(arguments.concurrency)}] concurrency {concurrency}: {point.tokens_per_s:.1f} tokens/s, "
            f"request p50 {point.latency_p50:,.0f} ms",
            file=sys.stderr,
            flush=True,
        )
    return points


def write_reports(arguments: argparse.Namespace, points: list[LoadPoint], baseline: list[LoadPoint]) -> None:
    """Write and print the table, write the CSV and the plot. Raises ``ReportError``, ``OSError``."""
    heading = describe(points[0])
    text = table(points, baseline)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{arguments.output}.md").write_text(f"{heading}\n\n{text}", encoding="utf-8")
    write_csv(Path(f"{arguments.output}.csv"), points)
    print(f"{heading}\n\n{text}", end="", flush=True)
    if not arguments.no_plot:
        write_plot(Path(f"{arguments.output}.png"), points, heading, baseline)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 0, 1 after a failure, 2 when perf_analyzer cannot run here."""
    arguments = build_parser().parse_args(argv)
    workload = Workload(arguments.model, arguments.input_len, arguments.output_len, not arguments.no_streaming)
    try:
        baseline = read_csv(arguments.baseline_csv) if arguments.baseline_csv else []
        points = measure(arguments, workload, find_runner(arguments, workload))
        write_reports(arguments, points, baseline)
    except ClientUnavailableError as error:
        print(f"error: {error}; --client builtin measures the same without it", file=sys.stderr)
        return 2
    except (LoadError, ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
