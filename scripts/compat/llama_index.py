#!/usr/bin/env python3
"""LlamaIndex's NVIDIA Triton LLM against a running server: ``complete`` and ``stream_complete`` over gRPC."""

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

VERSION = "0.6.0"


def check(target: Target) -> list[Outcome]:
    """One outcome.

    The client stops one piece before the number of tokens it was told, whatever the server does. So it is told one
    more, and may then show that one too if two tokens came in one piece.
    """

    def run() -> str:
        env = client_env("llama-index", (f"llama-index-llms-nvidia-triton=={VERSION}",))
        longer = target.max_tokens + 1
        allowed = (reference_text(target), reference_text(target, max_tokens=longer))
        driver = [env.python, DRIVERS / "llama_index_driver.py", target.grpc, target.prompt, str(longer)]
        got = last_json(run_client([str(word) for word in driver]))
        deltas = [str(delta) for delta in list(got["deltas"])]  # type: ignore[call-overload]
        need(got["whole"] in allowed, f"complete gave {got['whole']!r}, the server {allowed[0]!r}")
        need("".join(deltas) in allowed, f"stream_complete gave {deltas!r}, the server {allowed[0]!r}")
        need(len(deltas) > 1, f"stream_complete gave one piece, {deltas!r}")
        return f"{len(deltas)} streamed pieces"

    return [guarded("llama-index-llms-nvidia-triton", VERSION, "`complete` and `stream_complete` to `ensemble`", run)]


if __name__ == "__main__":
    main_guard(check, __doc__)
