"""What the benchmarks share: workloads, medians, tables, and the machine's memory bandwidth."""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Job:
    """One request of a workload: token ids in, number of tokens out (end ids ignored)."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def single_stream(vocab_size: int, num_prompt: int = 128, num_output: int = 128) -> list[Job]:
    """One request."""
    return [Job(_random_ids(random.Random(1), num_prompt, vocab_size), num_output)]


def mixed_batch(vocab_size: int, num_requests: int = 16) -> list[Job]:
    """Requests of 32 to 512 tokens in and 32 to 128 out, evenly spread; 4,352 in and 1,280 out for 16."""
    rng = random.Random(2)
    spread = [i / max(num_requests - 1, 1) for i in range(num_requests)]
    outputs = spread[:]
    rng.shuffle(outputs)
    return [
        Job(_random_ids(rng, round(32 + 480 * a), vocab_size), round(32 + 96 * b))
        for a, b in zip(spread, outputs, strict=True)
    ]


def _random_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(100, vocab_size) for _ in range(count)]


def timed(run: Callable[[], object]) -> float:
    """Seconds that ``run`` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    return statistics.median(values)


def memory_bandwidth_gb_s(num_threads: int) -> float:
    """Best of a few reads of a large array, GB/s; the roofline of single-stream decoding."""
    import torch

    torch.set_num_threads(num_threads)
    data = torch.ones(256 * 2**20 // 4)
    return max(data.numel() * 4 / timed(data.sum) / 1e9 for _ in range(8))


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A plain text table on standard output."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_bars(path: Path, title: str, bars: list[tuple[str, float]], unit: str) -> None:
    """A bar chart as SVG: one bar a row, longest first in the order given."""
    row, left, width = 28, 230, 420
    longest = max(value for _, value in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 110}" height="{row * len(bars) + 44}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="8" y="20" font-weight="bold">{title}</text>',
    ]
    for index, (name, value) in enumerate(bars):
        y, length = 34 + index * row, width * value / longest
        color = "#76b900" if name.startswith("inflight") else "#999999"
        parts.append(f'<text x="8" y="{y + 15}">{name}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.0f}" height="{row - 8}" fill="{color}"/>')
        parts.append(f'<text x="{left + length + 6:.0f}" y="{y + 15}">{value:.1f} {unit}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def print_json(result: dict[str, object]) -> None:
    """The result as the last line, for programs."""
    print(json.dumps(result))


def progress(text: str) -> None:
    """One line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def default_model() -> str:
    """Folder of the default model, fetched if it is not here yet."""
    command = [sys.executable, str(ROOT / "scripts" / "fetch_model.py")]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def resident_bytes() -> int:
    """What this process takes now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that this process took so far."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def commit() -> str:
    """The commit that is checked out, short; empty outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
