#!/usr/bin/env python3
"""NVIDIA's perf_analyzer against a running server: a concurrency sweep.

Over gRPC streaming through ``ensemble`` and ``tensorrt_llm_bls`` of a decoupled deployment, or over HTTP through
``ensemble`` and ``tensorrt_llm_bls`` of one that is not.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.client_check import CheckError, Outcome, Target, guarded, main_guard, need
from compat.perf_analyzer_env import VERSION, find_perf_analyzer
from load_test_perf_analyzer import LoadError, run_perf_analyzer
from load_test_workload import Workload

CONCURRENCIES = (1, 2, 4)
REQUESTS = 8


def check(target: Target) -> list[Outcome]:
    """One outcome for each entry model."""
    protocol = "grpc" if target.decoupled else "http"
    how = "gRPC streaming" if target.decoupled else "HTTP, not decoupled"
    sweep = ", ".join(map(str, CONCURRENCIES))
    return [
        guarded(
            "perf_analyzer", VERSION, f"concurrency {sweep} over {how} to `{model}`",
            lambda model=model: _sweep(target, model, protocol),  # type: ignore[misc]
        )
        for model in ("ensemble", "tensorrt_llm_bls")
    ]  # fmt: skip


def _sweep(target: Target, model: str, protocol: str) -> str:
    program = find_perf_analyzer().path
    workload = Workload(model, input_len=16, output_len=target.max_tokens, streaming=target.decoupled)
    url = target.grpc if protocol == "grpc" else target.http
    for concurrency in CONCURRENCIES:
        try:
            records = run_perf_analyzer(program, url, protocol, workload, concurrency, REQUESTS)
        except LoadError as error:
            raise CheckError(str(error)) from None
        need(len(records) >= REQUESTS, f"{len(records)} requests were measured at concurrency {concurrency}")
        short = [record.num_tokens for record in records if record.num_tokens != target.max_tokens]
        need(not short, f"answers of {short} tokens at concurrency {concurrency}, asked for {target.max_tokens}")
        pieces = [len(record.response_ns) for record in records]
        need(not target.decoupled or max(pieces) > 1, f"no answer came in pieces at concurrency {concurrency}")
    return f"every answer has its {target.max_tokens} tokens"


if __name__ == "__main__":
    main_guard(check, __doc__)
