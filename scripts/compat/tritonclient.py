#!/usr/bin/env python3
"""NVIDIA's tritonclient against a running server: HTTP and gRPC, sync, async and asyncio, streams and cancelling.

A decoupled deployment is asked with streams, one that is not with ``infer`` and ``async_infer``; both with the
metadata, configuration and statistics calls, and with plain ``requests`` to ``/generate``.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.client_check import (
    DRIVERS,
    Outcome,
    Target,
    guarded,
    last_json,
    main_guard,
    need,
    reference_text,
    run_client,
)
from compat.client_env import client_env

VERSION = "2.73.0"


def check(target: Target) -> list[Outcome]:
    """One outcome."""
    how = (
        "streams, cancelled streams, asyncio streams" if target.decoupled else "`infer`, `async_infer`, asyncio `infer`"
    )
    ran = f"{how}, metadata, configuration, statistics, `/generate` with requests"

    def run() -> str:
        env = client_env("tritonclient", (f"tritonclient[grpc,http]=={VERSION}", "requests"))
        expected = reference_text(target)
        mode = "decoupled" if target.decoupled else "whole"
        driver = DRIVERS / "tritonclient_driver.py"
        arguments = [target.http, target.grpc, target.prompt, str(target.max_tokens), expected, mode]
        got = last_json(run_client([env.python, driver, *arguments]))
        need(got["failure"] == "", str(got["failure"]))
        return f"{len(list(got['passed']))} kinds of call"  # type: ignore[call-overload]

    return [guarded("tritonclient", VERSION, ran, run)]


if __name__ == "__main__":
    main_guard(check, __doc__)
