#!/usr/bin/env python3
"""Tokens per second through a real Triton server over gRPC streaming, against ``LLM`` in this process.

Starts the server, sends 16 mixed requests at once through each entry model, and runs the same prompts in this
process, turn by turn (A B C A B C), since machines drift. Prints a table and, last, one JSON line.
"""

import argparse
import queue
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import bench_common as common
import numpy as np
import tritonclient.grpc as grpcclient
from render_repository import render_repository
from triton_server import ServerOptions, TritonServer

NEVER_ENDS = 1_048_576
TARGET_RATIO = 0.92
ENTRY_MODELS = ("ensemble", "tensorrt_llm_bls")
SENTENCE = "the quick brown fox jumps over a lazy dog and then it runs through quiet green fields to find its way home"


@dataclass
class Timeline:
    """Arrival times of one stream's responses, seconds since the requests were sent."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0


def prompts(jobs: list[common.Job], salt: int) -> list[str]:
    """English-like text of about as many tokens as the jobs have (one common word is one token)."""
    rng = random.Random(salt)
    words = SENTENCE.split()
    return [" ".join(rng.choice(words) for _ in job.prompt_token_ids) for job in jobs]


def stream_all(url: str, model: str, texts: list[str], jobs: list[common.Job]) -> list[Timeline]:
    """Send all at once, each on its own stream, and wait for the last final response."""
    timelines = [Timeline() for _ in texts]
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    done = threading.Semaphore(0)
    clients = [grpcclient.InferenceServerClient(url) for _ in texts]
    started = time.perf_counter()

    def follow(index: int):
        def arrived(result, error):
            if error is not None:
                failures.put(str(error))
                done.release()
                return
            response = result.get_response()
            counts = result.as_numpy("num_output_tokens")
            if counts is not None:
                timelines[index].times.append(time.perf_counter() - started)
                timelines[index].num_tokens += int(counts.reshape(-1)[0])
            if response.parameters["triton_final_response"].bool_param:
                done.release()

        return arrived

    for index, client in enumerate(clients):
        client.start_stream(follow(index))
    started = time.perf_counter()
    for client, text, job in zip(clients, texts, jobs, strict=True):
        values = {
            "text_input": np.array([[text]], dtype=object), "max_tokens": np.array([[job.num_output_tokens]], np.int32),
            "stream": np.array([[True]]), "end_id": np.array([[NEVER_ENDS]], np.int32),
            "return_num_output_tokens": np.array([[True]]),
        }  # fmt: skip
        inputs = []
        for name, value in values.items():
            kind = {"O": "BYTES", "i": "INT32", "b": "BOOL"}[value.dtype.kind]
            inputs.append(grpcclient.InferInput(name, [1, 1], kind))
            inputs[-1].set_data_from_numpy(value)
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    for _ in texts:
        done.acquire()
    for client in clients:
        client.stop_stream()
        client.close()
    if not failures.empty():
        raise SystemExit(f"a request failed: {failures.get()}")
    return timelines


def run_in_process(llm, texts: list[str], jobs: list[common.Job]) -> None:
    """The same prompts through ``LLM``, text out."""
    from backend_engine import SamplingParams

    params = [SamplingParams(max_tokens=job.num_output_tokens, ignore_eos=True) for job in jobs]
    llm.generate(texts, params, use_tqdm=False)


def measure(server: TritonServer, llm, jobs: list[common.Job], repeats: int) -> tuple[dict, dict]:
    """Median tokens per second by name, and median first-token and inter-response milliseconds by entry model."""
    num_tokens = sum(job.num_output_tokens for job in jobs)
    speeds: dict[str, list[float]] = {name: [] for name in ("in process", *ENTRY_MODELS)}
    latencies: dict[str, list[tuple[float, float]]] = {name: [] for name in ENTRY_MODELS}
    for round_index in range(repeats + 1):
        for name in speeds:
            texts = prompts(jobs, salt=100 + round_index)
            if name == "in process":
                taken = common.timed(lambda t=texts: run_in_process(llm, t, jobs))
            else:
                start = time.perf_counter()
                timelines = stream_all(server.grpc_url, name, [f"{name} {text}" for text in texts], jobs)
                taken = time.perf_counter() - start
                assert sum(t.num_tokens for t in timelines) == num_tokens, [t.num_tokens for t in timelines]
                gaps = [b - a for t in timelines for a, b in zip(t.times, t.times[1:], strict=False)]
                first = common.median([t.times[0] for t in timelines])
                latencies[name].append((first * 1e3, common.median(gaps) * 1e3))
            common.progress(f"round {round_index}/{repeats} {name}: {num_tokens / taken:.1f} tokens/s")
            if round_index:
                speeds[name].append(num_tokens / taken)
    middle = {name: common.median(values) for name, values in speeds.items()}
    return middle, {name: tuple(map(common.median, zip(*pairs[1:], strict=True))) for name, pairs in latencies.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder (the default model if left out)")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--http-port", type=int, default=18000)
    parser.add_argument("--grpc-port", type=int, default=18001)
    parser.add_argument("--metrics-port", type=int, default=18002)
    args = parser.parse_args()
    model = Path(args.model or common.default_model())

    from backend_engine import LLM

    jobs = common.mixed_batch(30_000, args.streams)
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch:
        repository = Path(scratch) / "repository"
        settings = {"dtype": "float32", "max_batch_size": str(args.streams), "bls_max_concurrency": str(args.streams)}
        render_repository(repository, settings, model)
        options = ServerOptions(
            repository, args.http_port, args.grpc_port, args.metrics_port,
            run_dir=Path(scratch) / "run", log_path=Path(scratch) / "server.log",
        )  # fmt: skip
        common.progress("starting the server and the engine in this process")
        with TritonServer(options) as server, LLM(str(model), dtype="float32", max_batch_size=args.streams) as llm:
            speeds, latencies = measure(server, llm, jobs, args.repeats)
    base = speeds["in process"]
    rows = [["in process", f"{base:.1f}", "1.00", "", "", ""]]
    result: dict[str, object] = {"streams": args.streams, "in_process_tok_s": round(base, 2)}
    for name in ENTRY_MODELS:
        first, gap = latencies[name]
        ratio = speeds[name] / base
        verdict = "met" if ratio >= TARGET_RATIO else "missed"
        rows.append([name, f"{speeds[name]:.1f}", f"{ratio:.2f}", f"{first:.0f}", f"{gap:.0f}", verdict])
        result |= {f"{name}_tok_s": round(speeds[name], 2), f"{name}_ratio": round(ratio, 3)}
    result["target_ratio"] = TARGET_RATIO
    columns = ["through", "tokens/s", "ratio", "first token, ms", "between responses, ms", f"target {TARGET_RATIO}"]
    common.print_table(columns, rows)
    common.print_json(result)


if __name__ == "__main__":
    sys.exit(main())
