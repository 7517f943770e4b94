"""The process of one engine: reads one JSON object a line on standard input, answers each with one line.

``python -m peers.child ADAPTER`` in scripts/, with the Python of the engine's own environment. ``load`` (model,
precision, threads, max_num_tokens) answers what was loaded; ``run`` (workload, salt) answers the timelines of each
phase; ``greedy`` (prompts, num_tokens) answers token ids; ``quit`` ends. Whatever the engine prints goes to standard
error, and an engine that fails ends the process: the parent reads the reason there.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO, Any

from bench_common import Job

from peers.adapters import Engine
from peers.timeline import Recorder, to_json
from peers.workloads import Phase, phases


def serve(engine: Engine, requests: Iterable[str], replies: IO[str]) -> None:
    """Answer until ``quit`` or the end of the requests."""
    for line in requests:
        message = json.loads(line)
        operation = message.pop("op")
        if operation == "quit":
            break
        answer = OPERATIONS[operation](engine, **message)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
    engine.close()


def load(engine: Engine, **settings: Any) -> dict[str, Any]:
    """Seconds that it took, and what the engine says of itself."""
    start = time.perf_counter()
    version = engine.load(**settings)
    return {"ready": True, "version": version, "load_s": round(time.perf_counter() - start, 3)}


def run(engine: Engine, workload: str, salt: int) -> dict[str, Any]:
    """The timelines by phase. A request that did not give all its tokens is an ``AssertionError``."""
    found = {}
    for phase in phases(workload, salt):
        timelines = engine.run(phase, Recorder())
        wanted = [job.num_output_tokens for job in phase.all_jobs]
        assert [len(t.token_ids) for t in timelines] == wanted, ([len(t.token_ids) for t in timelines], wanted)
        found[phase.name] = to_json(timelines)
    return {"phases": found}


def greedy(engine: Engine, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """The tokens that follow each prompt, asked one after another."""
    return {
        "token_ids": [
            engine.run(Phase("greedy", [Job(prompt, num_tokens)]), Recorder())[0].token_ids for prompt in prompts
        ]
    }


PR_SET_PDEATHSIG = 1
OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {"load": load, "run": run, "greedy": greedy}


def end_with_parent() -> None:
    """Have this process killed when its parent ends, also while it is stopped (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engine prints is no answer
    engine = importlib.import_module(f"peers.adapters.{sys.argv[1]}").create()
    serve(engine, sys.stdin, replies)


if __name__ == "__main__":
    main()
