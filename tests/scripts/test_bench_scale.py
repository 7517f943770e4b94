"""``scripts/bench_scale.py``: the fit tells linear from quadratic, and a small run writes all that the docs show."""

import json
import subprocess
import sys
from pathlib import Path

import bench_scale
import pytest

SIZES = [1, 16, 64, 128, 256, 512]


def test_a_line_is_found_again() -> None:
    fit = bench_scale.fit_line(SIZES, [0.1 + 0.004 * n for n in SIZES])
    assert (fit.base_ms, fit.us_a_request, fit.r2) == (0.1, 4.0, 1.0)
    assert fit.exponent == pytest.approx(1.0, abs=0.02)


def test_what_is_not_a_line_is_told_by_its_exponent() -> None:
    fit = bench_scale.fit_line(SIZES, [0.1 + 0.00001 * n * n for n in SIZES])
    assert fit.exponent is not None and fit.exponent > 1.8 and fit.r2 < 0.96
    slow = bench_scale.fit_line(SIZES, [0.1 + 0.01 * n**0.5 for n in SIZES])
    assert slow.exponent is not None and slow.exponent < 0.6
    assert bench_scale.fit_line(SIZES, [0.2, 0.1, 0.1, 0.1, 0.1, 0.1]).exponent is None


def test_an_executor_at_work_generates_for_all_and_its_queue_waits() -> None:
    executor = bench_scale.executor_at_work(4, 30, 10)
    alone, queued = bench_scale.measure_in_turns([executor, bench_scale.executor_at_work(4, 0, 10)], 10)
    assert len(alone) == len(queued) == 10
    stats = executor.stats()
    assert (stats.num_generation, stats.num_waiting) == (4, 30)
    assert stats.num_generated_tokens_total == 4 * (bench_scale.WARM_UP_STEPS + 10)


def test_a_small_run(tmp_path: Path) -> None:
    command = [sys.executable, bench_scale.__file__, "--sizes", "1", "3", "6", "--queued", "20", "--steps", "10"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["metric"], last["running"], last["queued"], last["target_ms"]) == ("host_ms_a_step", 6, 20, 3.0)
    assert last["met"] == (last["cpu_ms"] < 3.0) and set(last["fit"]) == set(bench_scale.Fit._fields)
    written = json.loads((tmp_path / "scale.json").read_text())
    assert [(row["running"], row["queued"]) for row in written["rows"]] == [(n, q) for n in (1, 3, 6) for q in (0, 20)]
    assert {key: written[key] for key in last} == last
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_sizes_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, bench_scale.__file__, "--sizes", "4", "8", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--sizes: [4, 8] were given, at least three different ones" in done.stderr
