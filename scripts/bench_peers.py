#!/usr/bin/env python3
"""Our engine against its peers on this machine: tokens a second and latencies of workloads W1 to W4, in turn.

    .venv/bin/python scripts/bench_peers.py
    .venv/bin/python scripts/bench_peers.py --peers openvino-genai,llama-cpp --workloads W1 --rounds 1

Each peer gets an environment of its own under $INFLIGHT_CACHE (~/.cache/inflight) in peers/, kept between runs; the
first run takes half an hour of downloads and building more. The default model is converted for each. Every engine is a
process of its own, stopped while another has its turn; greedy tokens are held against transformers' before the clock
runs. Medians over the rounds, the first left out. Writes peers.json and peers.png to ``--output``, prints tables and,
last, one JSON line: the rows of the targets.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_common as common
from peers import report, targets
from peers.environments import RECIPES, prepare
from peers.model_files import model_for
from peers.processes import PeerError
from peers.rounds import OUR_WORKLOADS, PEERS, Outcome, Rounds, our_specs
from peers.workloads import WORKLOADS

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small fox who",
    "def fibonacci(n):\n    ",
    "The three states of matter are",
    "Water boils at a temperature of",
    "In the year 1969, the first human",
)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the engines end with us
    unavailable = install(options.peers, options.fresh)
    specs = our_specs(options.precisions)
    specs += [spec for spec in PEERS if spec.name in options.peers and spec.name not in unavailable]
    rounds = Rounds(
        specs, options.rounds, options.threads,
        lambda spec: model_for(spec.name, spec.precision),
        lambda: common.memory_bandwidth_gb_s(options.threads),
    )  # fmt: skip
    outcome = rounds.run(options.workloads, prompt_ids())
    rows = targets.rows(outcome.figures, options.workloads, options.peers, outcome.unsteady)
    if options.server:
        rows += targets.server_rows(serving(options.rounds))
    finish(options, outcome, rows, unavailable)


def parse() -> argparse.Namespace:
    """The command line; an unknown name is an error that lists the known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=names("peer", RECIPES), default=list(RECIPES))
    parser.add_argument("--workloads", type=names("workload", WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--precisions", type=names("precision", OUR_WORKLOADS), default=["float", "int16", "int8", "w8a8"]
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, besides the first (3)")
    parser.add_argument("--threads", type=int, default=common.usable_cores(), help="of every engine (all cores)")
    parser.add_argument("--output", type=Path, default=common.ROOT / "docs" / "performance")
    parser.add_argument("--server", action="store_true", help="also the rows through the server (bench_serving.py)")
    parser.add_argument("--fresh", action="store_true", help="make the peers' environments anew")
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"--rounds {options.rounds}, --threads {options.threads}: both must be at least 1")
    return options


def names(what: str, known: Any) -> Any:
    """A type for argparse: names between commas, all of them known."""

    def parse_names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        return found

    return parse_names


def install(peers: list[str], fresh: bool) -> dict[str, str]:
    """Make every peer's environment; answers the reason of each that cannot be made."""
    unavailable = {}
    for name in peers:
        try:
            prepare(name, fresh)
        except PeerError as error:
            common.progress(f"{name}: {error}")
            unavailable[name] = str(error)
    return unavailable


def prompt_ids() -> list[list[int]]:
    """The texts of the greedy check as token ids."""
    from backend_engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(common.default_model(), trust_remote_code=False)
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in PROMPTS]


def serving(rounds: int) -> dict[str, Any]:
    """What ``bench_serving.py`` prints last."""
    common.progress("through the server")
    command = [sys.executable, str(Path(__file__).with_name("bench_serving.py")), "--repeats", str(rounds)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def finish(options: argparse.Namespace, outcome: Outcome, rows: list[targets.Row], unavailable: dict[str, str]) -> None:
    """Write, print, and the rows as the last line."""
    lists = {"peers": options.peers, "workloads": options.workloads, "precisions": options.precisions}
    numbers = {"rounds": options.rounds, "threads": options.threads}
    given = [f"--{name} {','.join(values)}" for name, values in lists.items()]
    given += [f"--{name} {number}" for name, number in numbers.items()]
    settings = {**lists, **numbers, "command": " ".join(["scripts/bench_peers.py", *given])}
    found = report.as_json(outcome, rows, unavailable, settings)
    report.write(options.output, found)
    report.print_tables(found)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
