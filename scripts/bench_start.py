#!/usr/bin/env python3
"""From a folder to the first token: of the engine in one process, imports apart, and of a server's second start.

    python scripts/bench_start.py                # engine, serve.sh, and llama.cpp's server if bench_peers.py made it
    python scripts/bench_start.py --no-servers

The engine starts from the model's folder and from an engine folder that is built first, in each precision; every start
is a process of its own, which has imported before the clock starts what a first one was seen to import. Servers start
by turns: from the command until they say that they are ready, and until the first token of an answer is there. The
system has all files in its cache. Prints tables of medians and, last, one JSON line.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_common as common
from peers.environments import python_of
from peers.model_files import model_for
from triton_process import free_ports

SCRIPTS = Path(__file__).resolve().parent
TARGET_S = 1.0
PRECISIONS = ("auto", "float16", "int16", "int8", "w8a8")
QUESTION = "What is the capital of France?"
SERVER_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder (default: the model that serve.sh takes)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--precisions", default=",".join(PRECISIONS), help="weight_only_precision of the engine folder's"
    )
    parser.add_argument("--no-servers", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--modules", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(start_engine(options.model, options.one, options.modules)))
        return
    model = options.model or common.default_model()
    found: dict[str, Any] = {"commit": common.commit(), "cores": common.usable_cores(), "rounds": options.rounds}
    found["engine"] = measure_engine(model, options.precisions.split(","), options.rounds)
    if not options.no_servers:
        found["servers"] = measure_servers(options.rounds)
    common.print_json(found)


# ---- the engine ----------------------------------------------------------------------------------------------------


def measure_engine(model: str, precisions: list[str], rounds: int) -> list[dict[str, Any]]:
    """Medians of each way to start, which take turns."""
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch:
        engine = str(Path(scratch) / "engine")
        common.progress("building an engine folder")
        build = [sys.executable, str(SCRIPTS / "build_engine.py"), "--model", model, "--output", engine]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ways = [("model folder", model, "auto"), *(("engine folder", engine, precision) for precision in precisions)]
        modules = Path(scratch) / "modules.json"
        modules.write_text(json.dumps(run_start(model, "auto", None)["modules"]))
        taken: dict[tuple[str, str, str], list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(rounds):
            common.progress(f"round {number + 1}")
            for way in ways:
                taken[way].append(run_start(way[1], way[2], str(modules)))
    rows = []
    for (kind, _, precision), runs in taken.items():
        times = {key: common.median([run[key] for run in runs]) for key in ("ready_s", "first_token_s")}
        is_met = times["first_token_s"] < TARGET_S if kind == "engine folder" else None
        rows.append({"from": kind, "precision": precision, **times, "target_s": TARGET_S, "met": is_met})
    met = {True: "yes", False: "no", None: ""}
    cells = [
        [r["from"], r["precision"], f"{r['ready_s']:.2f}", f"{r['first_token_s']:.2f}", met[r["met"]]] for r in rows
    ]
    common.print_table(["from", "precision", "ready s", "first token s", f"under {TARGET_S:.0f} s"], cells)
    return rows


def run_start(folder: str, precision: str, modules: str | None) -> dict[str, Any]:
    """``start_engine`` in a process of its own."""
    command = [sys.executable, __file__, "--one", precision, "--model", folder]
    command += ["--modules", modules] if modules else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the engine did not start: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def start_engine(folder: str, precision: str, modules: str | None) -> dict[str, Any]:
    """Seconds until the engine is ready and until its first token, in this process; and what had to be imported."""
    from backend_engine import LLM, SamplingParams

    for name in json.loads(Path(modules).read_text()) if modules else ():
        importlib.import_module(name)
    before, started = set(sys.modules), time.perf_counter()
    with LLM(folder, weight_only_precision=precision) as llm:
        ready_s = time.perf_counter() - started
        llm.generate(QUESTION, SamplingParams(max_tokens=1), use_tqdm=False)
        first_token_s = time.perf_counter() - started
        imported = [name for name in sys.modules if name not in before and is_importable(name)]
    return {"ready_s": ready_s, "first_token_s": first_token_s, "modules": imported}


def is_importable(name: str) -> bool:
    """Whether the module can be imported by its name in another process."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and spec.name == name and spec.origin is not None


# ---- servers -------------------------------------------------------------------------------------------------------


def measure_servers(rounds: int) -> list[dict[str, Any]]:
    """Medians of each server's start, but for its first."""
    starts: dict[str, Callable[[], tuple[float, float]]] = {"serve.sh": start_ours}
    if Path(python_of("llama-cpp")).exists():
        starts |= {f"llama.cpp {form}": lambda form=form: start_llama(form) for form in ("F16", "Q4_1")}
    else:
        common.progress(
            "no llama.cpp here: scripts/bench_peers.py --peers llama-cpp --workloads W1 --rounds 1 makes it"
        )
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for number in range(rounds + 1):
        for name, start in starts.items():
            times = start()
            common.progress(f"start {number + 1} of {name}: ready {times[0]:.2f} s, first token {times[1]:.2f} s")
            taken[name].append(times)
    rows = [
        {"server": name, "ready_s": common.median(ready), "first_token_s": common.median(first)}
        for name, times in taken.items()
        for ready, first in [tuple(map(list, zip(*times[1:], strict=True)))]
    ]
    cells = [[r["server"], f"{r['ready_s']:.2f}", f"{r['first_token_s']:.2f}"] for r in rows]
    common.print_table(["server", "ready s", "first token s"], cells)
    return rows


def start_ours() -> tuple[float, float]:
    """Seconds until ``serve.sh`` is ready, and until the first token through ``ensemble``."""
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = ["bash", str(SCRIPTS / "serve.sh"), "--no-demo", "--print-json", *ports]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            if not any(line.startswith('{"event": "ready"') for line in process.stdout):
                raise SystemExit("serve.sh ended before it was ready")
            ready_s = time.perf_counter() - started
            post(f"http://127.0.0.1:{http}/v2/models/ensemble/generate", {"text_input": QUESTION, "max_tokens": 1})
            return ready_s, time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


def start_llama(form: str) -> tuple[float, float]:
    """The same of llama.cpp's server."""
    python, (port,) = python_of("llama-cpp"), free_ports(1)
    find = "from peers.adapters.llama_server import find_server; print(find_server())"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    found = subprocess.run([python, "-c", find], env=environment, capture_output=True, text=True, check=True)
    command = [found.stdout.strip(), "-m", model_for("llama-cpp", form), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(common.usable_cores()), "--no-webui"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.perf_counter() - started > SERVER_TIMEOUT_S:
                    raise SystemExit("llama.cpp's server did not start")
                time.sleep(0.01)
            ready_s = time.perf_counter() - started
            post(f"http://127.0.0.1:{port}/completion", {"prompt": QUESTION, "n_predict": 1})
            return ready_s, time.perf_counter() - started
        finally:
            process.terminate()


def answers(url: str) -> bool:
    """Whether it answers with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def post(url: str, body: dict[str, Any]) -> None:
    """Send JSON and wait for the whole answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as response:
        response.read()


if __name__ == "__main__":
    main()
