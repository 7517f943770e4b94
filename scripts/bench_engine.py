#!/usr/bin/env python3
"""Time and memory of loading a model from its folder, from an engine folder, and of quantizing it first; imports apart.

    python scripts/bench_engine.py
    python scripts/bench_engine.py --model FOLDER --qformat int8_wo

Builds what it loads into a temporary folder. Every load runs in a process of its own, and the ways take turns. ``peak``
is the most that the process took more than before; the system has the files in its cache. Prints a table and, last, one
JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_common as common
from bench_load import load_in_this_process

_MIB = 1 << 20
SCRIPTS = Path(__file__).resolve().parent
AT_LOAD = "model folder, quantized at load"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder (default: the model that serve.sh takes)")
    parser.add_argument("--qformat", default="int8_wo", help="a format without calibration (int8_wo)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.model, options.qformat)))
        return
    model = options.model or common.default_model()
    with tempfile.TemporaryDirectory() as scratch:
        paths = prepare(model, options.qformat, Path(scratch))
        taken: dict[str, list[dict[str, Any]]] = {way: [] for way in paths}
        for number in range(options.rounds):
            for way, path in paths.items():
                common.progress(f"round {number + 1}: {way}")
                command = [sys.executable, __file__, "--one", way, "--model", path, "--qformat", options.qformat]
                taken[way].append(
                    json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                )
    rows = [
        {
            "way": way,
            **{key: common.median([run[key] for run in runs]) for key in ("load_s", "peak_mib", "weights_mib")},
        }
        for way, runs in taken.items()
    ]
    reference = rows[0]["load_s"]
    header = ["from", "load s", "to the first", "peak MiB", "weights MiB"]
    common.print_table(
        header,
        [
            [
                r["way"],
                f"{r['load_s']:.2f}",
                f"{r['load_s'] / reference:.2f}",
                f"{r['peak_mib']:.0f}",
                f"{r['weights_mib']:.0f}",
            ]
            for r in rows
        ],
    )
    common.print_json({"qformat": options.qformat, "rows": rows})


def prepare(model: str, qformat: str, scratch: Path) -> dict[str, str]:
    """Build what is loaded. Returns where each way begins."""
    quantized, plain_engine, quantized_engine = (str(scratch / name) for name in ("quantized", "plain", "engine"))
    quantize = ["quantize.py", "--model", model, "--qformat", qformat, "--output", quantized, "--no-perplexity"]
    for command in (
        quantize,
        ["build_engine.py", "--model", model, "--output", plain_engine],
        ["build_engine.py", "--model", quantized, "--output", quantized_engine],
    ):
        common.progress(" ".join(command[:1]))
        subprocess.run([sys.executable, str(SCRIPTS / command[0]), *command[1:]], check=True, stdout=subprocess.DEVNULL)
    return {
        "model folder": model,
        "engine folder": plain_engine,
        f"{qformat} folder": quantized,
        f"{qformat} engine folder": quantized_engine,
        AT_LOAD: model,
    }


def run_one(way: str, model: str, qformat: str) -> dict[str, Any]:
    """Load in this process; for the last way, quantize before."""
    if way != AT_LOAD:
        return load_in_this_process(model)
    from backend_engine.checkpoint.open_checkpoint import open_checkpoint
    from backend_engine.model_engine import model_loader  # noqa: F401 (imported before the clock starts)
    from backend_engine.post_training.quantize_model import quantize_checkpoint
    from backend_engine.post_training.recipes import recipe_of

    before = common.resident_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        output = Path(scratch) / "quantized"
        quantize_checkpoint(open_checkpoint(model), output, recipe_of(qformat), [])
        found = load_in_this_process(str(output))
        load_s = time.perf_counter() - started
    return {**found, "load_s": load_s, "peak_mib": (common.peak_bytes() - before) / _MIB}


if __name__ == "__main__":
    main()
