#!/usr/bin/env python3
"""NVIDIA's genai-perf against a running server: gRPC streaming to ``ensemble``, and its engine converter's requests.

``--service-kind triton --backend tensorrtllm`` of older releases is ``--endpoint-type kserve --backend tensorrtllm``
in 0.0.16. The engine converter (``--endpoint-type tensorrtllm_engine``) of 0.0.16 only knows a server inside
perf_analyzer's own process, so the pass-through arguments point it at this one; its report cannot read such a run, so
the check reads the export itself.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.client_check import CheckError, Outcome, Target, guarded, main_guard, need, run_client
from compat.client_env import client_env
from compat.perf_analyzer_env import find_perf_analyzer

VERSION = "0.0.16"
REQUESTS = 4
PROMPT_TOKENS = 20
REPORT_GAP = "'text_input'"  # the key that its report looks for in requests made of token ids


def check(target: Target) -> list[Outcome]:
    """Two outcomes; genai-perf only streams, so it needs a decoupled deployment."""
    text = "`--endpoint-type kserve --backend tensorrtllm --streaming` to `ensemble`"
    engine = "`--endpoint-type tensorrtllm_engine --streaming` to `tensorrt_llm` over gRPC"
    return [
        guarded("genai-perf", VERSION, text, lambda: _ensemble(target)),
        guarded("genai-perf", VERSION, engine, lambda: _engine(target)),
    ]


def _profile(target: Target, folder: Path, model: str, *own: str) -> None:
    """Run ``genai-perf profile`` with its files in ``folder``. Raises ``CheckError``."""
    perf_analyzer = find_perf_analyzer()
    env = client_env("genai-perf", (f"genai-perf=={VERSION}",))
    paths = os.pathsep.join((str(perf_analyzer.path.parent), str(env.folder / "bin"), os.environ.get("PATH", "")))
    arguments = [
        "profile", "-m", model, "--streaming", "-u", target.grpc, "--tokenizer", str(target.tokenizer),
        "--concurrency", "2", "--request-count", str(REQUESTS), "--num-prompts", str(REQUESTS),
        "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(target.max_tokens),
        "--output-tokens-mean-deterministic", "--artifact-dir", str(folder), *own,
    ]  # fmt: skip
    environment = {**os.environ, "PATH": paths, "HF_HUB_OFFLINE": "1"}
    run_client([env.folder / "bin" / "genai-perf", *arguments], environment, cwd=folder)


def _read(folder: Path, name: str) -> Any:
    found = sorted(folder.glob(f"*/{name}"))
    need(len(found) == 1, f"genai-perf left {len(found)} files {name}, expected 1")
    return json.loads(found[0].read_text())


def _ensemble(target: Target) -> str:
    with tempfile.TemporaryDirectory(prefix="inflight-genai-perf-") as scratch:
        folder = Path(scratch)
        _profile(target, folder, "ensemble", "--endpoint-type", "kserve", "--backend", "tensorrtllm")
        report = _read(folder, "*_genai_perf.json")
        need(report["request_count"]["avg"] == REQUESTS, f"its report counts {report['request_count']['avg']} requests")
        (experiment,) = _read(folder, "profile_export.json")["experiments"]
        for request in experiment["requests"]:
            pieces = [output["text_output"] for output in request["response_outputs"]]
            need(len(pieces) > 1, f"an answer came in {len(pieces)} piece")
        first, latency = report["time_to_first_token"]["avg"], report["request_latency"]["avg"]
        need(0 < first < latency, f"first token after {first} ms of {latency} ms")
        return f"{report['output_token_throughput']['avg']:.0f} tokens/s in its report"


def _engine(target: Target) -> str:
    with tempfile.TemporaryDirectory(prefix="inflight-genai-perf-") as scratch:
        folder = Path(scratch)
        reported = True
        try:
            _profile(
                target, folder, "tensorrt_llm", "--endpoint-type", "tensorrtllm_engine", "--",
                "--service-kind", "triton", "-i", "grpc",
            )  # fmt: skip
        except CheckError as error:
            if REPORT_GAP not in str(error):
                raise
            reported = False
        (experiment,) = _read(folder, "profile_export.json")["experiments"]
        requests = experiment["requests"]
        need(len(requests) == REQUESTS, f"{len(requests)} of {REQUESTS} requests were measured")
        for request in requests:
            need(len(request["request_inputs"]["input_ids"]) == PROMPT_TOKENS, "the requests are not made of token ids")
            count = sum(_num_ids(output["output_ids"]) for output in request["response_outputs"])
            need(count == target.max_tokens, f"an answer has {count} ids, asked for {target.max_tokens}")
        return "" if reported else "all requests answered; its own report reads in-process runs only"


def _num_ids(value: object) -> int:
    """Ids in one exported ``output_ids``: a list, one number, or an empty string."""
    return len(value) if isinstance(value, list) else int(value != "")


if __name__ == "__main__":
    main_guard(check, __doc__)
