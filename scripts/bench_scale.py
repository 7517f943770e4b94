#!/usr/bin/env python3
"""Host time of a step, everything but the model: how it grows with the requests that run, and with those that wait.

    python scripts/bench_scale.py

A model engine that answers at once stands for the model; admit, schedule, prepare, block tables, apply, settle and emit
are the engine's own, in plain Python. For each number of running requests there are two executors, one with nobody
waiting and one with 10,000 requests in its queue. All step in turns, so that all meet the same spells of the machine.
Milliseconds are medians, by the wall clock and of the processor time that a step took. The two are the same on a
machine that does nothing else, and the target is judged by the second. Writes scale.json and scale.png to ``--output``,
prints the table and, last, one JSON line.
"""

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import bench_common as common
import numpy as np

SIZES = (1, 16, 32, 64, 128, 192, 256, 384, 512)
TOKENS_PER_BLOCK = 32
QUEUED_PROMPT = 100
WARM_UP_STEPS = 8
TURN = 10
TARGET_MS = 3.0

Row = dict[str, Any]


class ConstantModel:
    """Answers every row with token 7 at no cost."""

    def forward(self, output: Any, block_tables: np.ndarray) -> list[int]:
        return [7] * len(output.logits_rows)


class PassThrough:
    """A decoder that takes the tokens as they come."""

    def decode_async(self, logits: list[int], output: Any) -> "PassThrough":
        from backend_engine.core.outputs import DecoderOutput

        self._decoded = DecoderOutput(logits)
        return self

    def wait(self) -> Any:
        return self._decoded

    def remove(self, request_id: int) -> None:
        pass


class Fit(NamedTuple):
    """``ms = base_ms + us_a_request / 1000 * running``, and how far the points are from it.

    ``r2``: share of their variance that the line explains. ``exponent``: of the power of ``running`` that the time,
    less that of the smallest size, grows with from half of the largest size to all of it: 1 = linear, 2 = quadratic;
    ``None`` = it does not grow.
    """

    base_ms: float
    us_a_request: float
    r2: float
    exponent: float | None


def executor_at_work(num_running: int, num_queued: int, num_steps: int) -> Any:
    """An executor whose ``num_running`` requests generate and will for ``num_steps`` more, with others waiting."""
    from backend_engine.config.engine_config import SchedulerConfig
    from backend_engine.config.sampling_params import SamplingParams
    from backend_engine.core.request import LlmRequest, StopConditions
    from backend_engine.executor.py_executor import PyExecutor
    from backend_engine.executor.rooms import Rooms
    from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
    from backend_engine.scheduler.request_scheduler import RequestScheduler

    max_tokens = num_steps + 100
    longest = QUEUED_PROMPT + max_tokens
    num_blocks = -(-longest // TOKENS_PER_BLOCK)
    config = SchedulerConfig(max_batch_size=num_running, max_num_tokens=max(num_running * 64, 512))
    kv_cache = KVCacheManager(num_running * num_blocks, TOKENS_PER_BLOCK, num_blocks, num_running, True)
    rooms = Rooms(RequestScheduler(config), kv_cache, ConstantModel(), PassThrough())
    executor = PyExecutor(rooms, max_batch_size=num_running)
    params = SamplingParams(max_tokens=max_tokens)
    for request_id in range(num_running + num_queued):
        # Of different lengths, so that not all fill their blocks in the same step.
        length = 16 + request_id % TOKENS_PER_BLOCK if request_id < num_running else QUEUED_PROMPT
        prompt = [request_id, *range(1, length)]
        executor.enqueue([LlmRequest(request_id, prompt, params, StopConditions(max_tokens), lambda output: None)])
    for _ in range(WARM_UP_STEPS):
        executor.step()
    stats = executor.stats()
    assert (stats.num_generation, stats.num_context, stats.num_waiting) == (num_running, 0, num_queued), stats
    return executor


def measure_in_turns(executors: Sequence[Any], num_steps: int) -> list[np.ndarray]:
    """Wall clock and processor milliseconds ``[num_steps, 2]`` of the steps of each, a turn after another."""
    taken: list[list[tuple[float, float]]] = [[] for _ in executors]
    for turn in range(num_steps // TURN):
        for executor, own in zip(executors, taken, strict=True):
            for _ in range(TURN):
                wall, cpu = time.perf_counter(), time.thread_time()
                executor.step()
                own.append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))
        common.progress(f"{(turn + 1) * TURN} of {num_steps} steps each")
    return [np.array(own) for own in taken]


def measure(sizes: Sequence[int], num_queued: int, num_steps: int) -> tuple[list[Row], int]:
    """A row for each size, without and with a queue, and how often the collector ran meanwhile."""
    from backend_engine.executor.collector import spare_the_steps

    spare_the_steps(max(sizes))  # as an engine does at its start
    cases = [(size, queued) for size in sizes for queued in (0, num_queued)]
    executors = [executor_at_work(size, queued, num_steps) for size, queued in cases]
    gc.collect()
    before = _num_collections()
    taken = measure_in_turns(executors, num_steps)
    num_collections = _num_collections() - before
    rows = []
    for index, (size, queued) in enumerate(cases):
        wall, cpu = taken[index].T
        # Turn by turn, beside the executor of the same size without a queue, which has its turn just before.
        over_alone = _means_of_turns(cpu) / _means_of_turns(taken[index - 1 if queued else index][:, 1])
        rows.append({
            "running": size, "queued": queued, "steps": len(wall),
            "wall_ms": round(float(np.median(wall)), 4), "wall_p99_ms": round(float(np.quantile(wall, 0.99)), 4),
            "cpu_ms": round(float(np.median(cpu)), 4), "cpu_p10_ms": round(float(np.quantile(cpu, 0.1)), 4),
            "cpu_mean_ms": round(float(cpu.mean()), 4), "over_alone": round(float(np.median(over_alone)), 3),
        })  # fmt: skip
    return rows, num_collections


def _means_of_turns(ms: np.ndarray) -> np.ndarray:
    return ms.reshape(-1, TURN).mean(axis=1)


def _num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def fit_line(running: Sequence[int], ms: Sequence[float]) -> Fit:
    """Least squares over at least three sizes."""
    x, y = np.array(running, np.float64), np.array(ms, np.float64)
    slope, base = np.polyfit(x, y, 1)
    left = y - (base + slope * x)
    r2 = 1 - float((left**2).sum() / ((y - y.mean()) ** 2).sum())
    half = int(np.abs(x - x.max() / 2).argmin())
    over = y - y[x.argmin()]
    exponent = None
    if min(over[half], over[x.argmax()]) > 0:
        exponent = round(float(np.log(over[x.argmax()] / over[half]) / np.log(x.max() / x[half])), 3)
    return Fit(round(float(base), 4), round(float(slope) * 1e3, 3), round(r2, 4), exponent)


def plot(rows: Sequence[Row], fit: Fit, path: Path) -> None:
    """Milliseconds over running requests: both series, the line and the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for queued, mark, color in ((0, "o", "#76b900"), (max(row["queued"] for row in rows), "x", "#333333")):
        own = [row for row in rows if row["queued"] == queued]
        label = f"{queued:,} queued"
        panel.plot([row["running"] for row in own], [row["cpu_ms"] for row in own], mark, color=color, label=label)
    ends = np.array([0, max(row["running"] for row in rows)])
    line = f"{fit.base_ms:.2f} ms + {fit.us_a_request:.1f} us a request"
    panel.plot(ends, fit.base_ms + fit.us_a_request / 1e3 * ends, color="#76b900", linewidth=1, label=line)
    panel.axhline(TARGET_MS, color="#999999", linestyle="--", linewidth=1, label=f"aim: {TARGET_MS:g} ms at 512")
    panel.set_xlabel("running requests")
    panel.set_ylabel("host ms a step (processor time, median)")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each number of running requests: alone, queued, and what the queue adds."""
    lines = []
    for alone, queued in zip(rows[::2], rows[1::2], strict=True):
        cells = [row[key] for row in (alone, queued) for key in ("wall_ms", "cpu_ms", "cpu_p10_ms")]
        lines.append([str(alone["running"]), *(f"{ms:.3f}" for ms in cells), f"{queued['over_alone']:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of running requests")
    parser.add_argument("--queued", type=int, default=10_000, help="requests in the long queue (10000)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each executor, rounded up to tens (300)")
    parser.add_argument("--output", type=Path, default=common.ROOT / "docs" / "performance")
    options = parser.parse_args()
    if len(set(options.sizes)) < 3 or min(options.sizes) < 1:
        parser.error(f"--sizes: {options.sizes} were given, at least three different ones from 1 on are needed")
    if min(options.queued, options.steps) < 1:
        parser.error(f"--queued {options.queued} --steps {options.steps}: at least 1 each")
    num_steps = -(-options.steps // TURN) * TURN
    rows, num_collections = measure(sorted(set(options.sizes)), options.queued, num_steps)
    alone = rows[::2]
    fit = fit_line([row["running"] for row in alone], [row["cpu_ms"] for row in alone])
    largest, queued = rows[-2:]
    result: Row = {
        "metric": "host_ms_a_step", "running": largest["running"], "wall_ms": largest["wall_ms"],
        "cpu_ms": largest["cpu_ms"], "target_ms": TARGET_MS, "met": largest["cpu_ms"] < TARGET_MS,
        "queued": options.queued, "queued_over_alone": queued["over_alone"], "collections": num_collections,
        "fit": fit._asdict(), "date": datetime.now(UTC).date().isoformat(), "commit": common.commit(),
        "python": platform.python_version(), "cores": common.usable_cores(),
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    plot(rows, fit, options.output / "scale.png")
    header = ["running", "ms", "cpu ms", "cpu p10", "queued: ms", "cpu ms", "cpu p10", "over alone"]
    common.print_table(header, table(rows))
    print(
        f"cpu ms = {fit.base_ms:.3f} + {fit.us_a_request / 1e3:.5f} * running, R2 {fit.r2:.4f}, exponent {fit.exponent}"
    )
    common.print_json(result)


if __name__ == "__main__":
    main()
