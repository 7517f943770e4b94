#!/usr/bin/env python3
"""Does the server's memory stay flat? Sends thousands of requests of all kinds to a real server and looks at it.

Starts a server, warms it up, then sends whole answers, streams, bad requests and streams whose client leaves, and
prints how much memory server and model processes hold. Exits 1 when the total grew by more than ``--limit`` per cent.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import bench_common as common
from render_repository import parse_settings, render_repository
from triton_server import ServerOptions, TritonServer

MODELS = ("ensemble", "tensorrt_llm_bls")
SENTENCE = "the quick brown fox jumps over a lazy dog and runs through quiet green fields to find its way home"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """Memory after ``num_requests`` requests, megabytes, by process name and id."""

    num_requests: int
    megabytes: dict[str, float]

    @property
    def total(self) -> float:
        """Of all processes."""
        return sum(self.megabytes.values())


def memory(server: TritonServer, num_requests: int) -> Sample:
    """Proportional set size of the server and its model processes (shared pages count once)."""
    names = server.model_processes()
    found = {}
    for pid in server.processes():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        found[f"{names.get(pid, 'server')} {pid}"] = kilobytes / 1024
    return Sample(num_requests, found)


class Traffic:
    """Requests of all kinds, in a fixed random order. ``send`` may be called from several threads."""

    def __init__(self, address: str, max_tokens: int, seed: int = 0) -> None:
        self._address = address
        self._max_tokens = max_tokens
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._kinds = itertools.cycle(["whole"] * 8 + ["stream"] * 8 + ["bad"] * 2 + ["left"] * 2)

    def send(self) -> None:
        """One request. ``RuntimeError`` when a good one fails or a bad one does not."""
        with self._lock:
            kind, model = next(self._kinds), self._rng.choice(MODELS)
            prompt = " ".join(self._rng.choices(SENTENCE.split(), k=self._rng.randint(4, 40)))
        fields: dict[str, object] = {"text_input": prompt, "max_tokens": self._max_tokens, "deadline_ms": 20_000}
        if kind == "bad":
            fields["temperature"] = -1.0
        if kind in ("stream", "left"):
            fields["stream"] = True
        path = f"/v2/models/{model}/generate{'_stream' if 'stream' in fields else ''}"
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(fields))
            reply = connection.getresponse()
            body = reply.readline() if kind == "left" else reply.read()
        finally:
            connection.close()
        if (reply.status == 400) != (kind == "bad") or (kind != "bad" and b'"error"' in body):
            raise RuntimeError(f"{kind} request to {model}: status {reply.status}, {body[:200]!r}")


def soak(server: TritonServer, traffic: Traffic, counts: list[int], concurrency: int) -> Iterator[Sample]:
    """Send requests up to each of ``counts`` in turn and look at the memory then."""
    done = 0
    with ThreadPoolExecutor(concurrency) as pool:
        for count in counts:
            for future in [pool.submit(traffic.send) for _ in range(count - done)]:
                future.result()
            done = count
            yield memory(server, done)


def report(samples: list[Sample]) -> float:
    """Print the table, and return how much the total grew from the first sample to its largest, in per cent."""
    names = list(samples[0].megabytes)
    common.print_table(
        ["requests", "MB in all", *names],
        [[str(s.num_requests), f"{s.total:.1f}", *(f"{s.megabytes.get(n, 0.0):.1f}" for n in names)] for s in samples],
    )
    return 100 * (max(s.total for s in samples) / samples[0].total - 1)


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-dir", help="Hugging Face folder (default: the default model)")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--warm-up", type=int, default=500, help="requests before the first look")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--limit", type=float, default=2.0, help="per cent the memory may grow")
    parser.add_argument("--ports", type=int, nargs=3, default=(8000, 8001, 8002), metavar=("HTTP", "GRPC", "METRICS"))
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY:VALUE")
    arguments = parser.parse_args(argv)
    model_dir = Path(arguments.model_dir or common.default_model())
    step = arguments.requests // arguments.samples
    counts = [arguments.warm_up + step * index for index in range(arguments.samples + 1)]
    with tempfile.TemporaryDirectory(prefix="inflight-soak-") as scratch:
        repository = Path(scratch) / "repository"
        render_repository(repository, parse_settings(arguments.settings), model_dir)
        http_port, grpc_port, metrics_port = arguments.ports
        options = ServerOptions(
            repository, http_port, grpc_port, metrics_port, log_path=Path(scratch) / "log",
            environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )  # fmt: skip
        with TritonServer(options) as server:
            traffic = Traffic(f"127.0.0.1:{http_port}", arguments.max_tokens)
            samples = []
            for sample in soak(server, traffic, counts, arguments.concurrency):
                samples.append(sample)
                common.progress(f"{sample.num_requests} of {counts[-1]} requests: {sample.total:.1f} MB")
    growth = report(samples)
    common.print_json({"requests": arguments.requests, "growth_percent": round(growth, 2)})
    return 1 if growth > arguments.limit else 0


if __name__ == "__main__":
    sys.exit(main())
