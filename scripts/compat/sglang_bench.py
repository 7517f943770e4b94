#!/usr/bin/env python3
"""The ``trt`` backend of SGLang's bench_serving against a running server: random prompts to ``ensemble``.

The script is one file of the sglang wheel (later wheels spread it over a package that needs all of sglang), taken
out and run as it is in an environment that holds what it imports.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.client_check import Outcome, Target, guarded, main_guard, need, run_client
from compat.client_env import client_env, compat_dir, wheel_member

VERSION = "0.5.2"
IMPORTS = ("aiohttp", "numpy", "requests", "tqdm", "transformers")
REQUESTS = 6


def check(target: Target) -> list[Outcome]:
    """One outcome; it streams, so it needs a decoupled deployment."""
    ran = f"`--backend trt --dataset-name random-ids`, {REQUESTS} prompts, to `ensemble/generate_stream`"
    return [guarded("SGLang bench_serving", VERSION, ran, lambda: _run(target))]


def _run(target: Target) -> str:
    script = compat_dir() / f"sglang-{VERSION}" / "bench_serving.py"
    wheel_member(f"sglang=={VERSION}", "sglang/bench_serving.py", script)
    env = client_env("sglang-bench", IMPORTS)
    with tempfile.TemporaryDirectory(prefix="inflight-sglang-") as scratch:
        result = Path(scratch) / "result.jsonl"
        # The length range of 1.0 makes every prompt and every answer as long as asked for.
        arguments = [
            "--backend", "trt", "--base-url", f"http://{target.http}", "--model", str(target.tokenizer),
            "--dataset-name", "random-ids", "--random-input-len", "16", "--random-range-ratio", "1.0",
            "--random-output-len", str(target.max_tokens), "--num-prompts", str(REQUESTS), "--max-concurrency", "2",
            "--disable-tqdm", "--output-file", str(result), "--output-details",
        ]  # fmt: skip
        run_client([env.python, script, *arguments], {**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=Path(scratch))
        measured = json.loads(result.read_text().splitlines()[-1])
    need(measured["completed"] == REQUESTS, f"{measured['completed']} of {REQUESTS} completed: {measured['errors']}")
    asked = REQUESTS * target.max_tokens
    need(measured["total_output_tokens"] == asked, f"it counts {measured['total_output_tokens']} tokens of {asked}")
    need(measured["mean_ttft_ms"] > 0, f"it measured {measured['mean_ttft_ms']} ms to the first token")
    need(any(measured["generated_texts"]), "no answer has any text")
    for gaps in measured["itls"]:
        need(len(gaps) > 0, "an answer came in one piece")
    return f"{measured['output_throughput']:.0f} tokens/s by its count"


if __name__ == "__main__":
    main_guard(check, __doc__)
