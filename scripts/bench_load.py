#!/usr/bin/env python3
"""Time and memory of loading a checkpoint, against plainly reading its bytes; imports apart.

    python scripts/bench_load.py CHECKPOINT [CHECKPOINT ...]

Every load runs in a process of its own. ``resident`` is what the loaded model takes more than the process did before,
``peak`` the most it took meanwhile; the system has the files in its cache. Prints a table and, last, one JSON
line.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_common as common

_MIB = 1 << 20
_CHUNK = 8 * _MIB


def files_of(checkpoint: Path) -> list[Path]:
    """The files that hold weights."""
    if checkpoint.is_file():
        return [checkpoint]
    endings = (".safetensors", ".bin", ".gguf", ".nemo", ".distcp", ".ckpt", ".pt")
    return sorted(path for path in checkpoint.rglob("*") if path.suffix in endings)


def read_s(files: list[Path]) -> float:
    """Seconds that reading all bytes takes."""
    started = time.perf_counter()
    buffer = bytearray(_CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def load_in_this_process(checkpoint: str) -> dict[str, Any]:
    """What loading costs; run in a fresh process."""
    from backend_engine.model_engine.model_loader import load_model
    from backend_engine.model_engine.weight_memory import weight_bytes

    before = common.resident_bytes()
    started = time.perf_counter()
    loaded = load_model(checkpoint, "float32", "cpu")
    load_s = time.perf_counter() - started
    kept = common.resident_bytes() - before
    return {
        "load_s": load_s,
        "weights_mib": weight_bytes(loaded.model) / _MIB,
        "resident_mib": kept / _MIB,
        "peak_mib": (common.peak_bytes() - before) / _MIB,
    }


def measure(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Medians of ``rounds`` loads, each beside a reading of the files."""
    files = files_of(checkpoint)
    read_s(files)  # into the cache of the operating system
    reads, loads = [], []
    for _ in range(rounds):
        reads.append(read_s(files))
        command = [sys.executable, __file__, "--one", str(checkpoint)]
        loads.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    row = {key: common.median([load[key] for load in loads]) for key in loads[0]}
    row |= {"checkpoint": checkpoint.name, "file_mib": sum(path.stat().st_size for path in files) / _MIB}
    row["read_s"] = common.median(reads)
    row["peak_over_resident"] = row["peak_mib"] / row["resident_mib"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--rounds", type=int, default=3, help="loads of each, of which the median is taken (3)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(load_in_this_process(arguments.one)))
        return
    if not arguments.checkpoints:
        parser.error("name at least one checkpoint")
    rows = []
    for checkpoint in arguments.checkpoints:
        common.progress(f"loading {checkpoint}, {arguments.rounds} times")
        rows.append(measure(checkpoint, arguments.rounds))
    header = ["checkpoint", "files MiB", "read s", "load s", "weights MiB", "resident MiB", "peak MiB", "peak/resident"]
    keys = ("file_mib", "read_s", "load_s", "weights_mib", "resident_mib", "peak_mib", "peak_over_resident")
    common.print_table(header, [[row["checkpoint"], *(f"{row[key]:.2f}" for key in keys)] for row in rows])
    common.print_json({"rows": rows})


if __name__ == "__main__":
    main()
