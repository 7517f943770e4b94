#!/usr/bin/env python3
"""Tokens per second of a model run by transformers' modules over our cache, against the same model run natively.

Both engines live in this process and are measured turn by turn (A B A B), since machines drift: one stream, and 8
mixed requests at once. Prints a table and, last, one JSON line.
"""

import argparse
from typing import Any

import bench_common as common
from bench_offline import fresh, measure

BACKENDS = ("native", "transformers")


class Engine:
    """An ``LLM`` with one of the model backends."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from backend_engine import LLM, SamplingParams

        self.name = name
        self._sampling_params = SamplingParams
        self._llm = LLM(
            args.model,
            dtype=args.dtype,
            num_threads=args.threads,
            skip_tokenizer_init=True,
            max_batch_size=args.streams,
            model_backend=name,
        )

    def run(self, jobs: list[common.Job]) -> list[list[int]]:
        """The tokens of each job."""
        params = [
            self._sampling_params(max_tokens=job.num_output_tokens, ignore_eos=True, detokenize=False) for job in jobs
        ]
        results = self._llm.generate([job.prompt_token_ids for job in jobs], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def close(self) -> None:
        self._llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder (the default model if left out)")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.model = args.model or common.default_model()

    from backend_engine.checkpoint.open_checkpoint import open_checkpoint

    vocab_size = int(open_checkpoint(args.model).config["vocab_size"])
    workloads = {
        "one stream": common.single_stream(vocab_size),
        f"{args.streams} streams": common.mixed_batch(vocab_size, args.streams),
    }
    engines: list[Any] = [Engine(name, args) for name in BACKENDS]
    texts = [engine.run(fresh(workloads["one stream"], 0)) for engine in engines]
    speeds = {label: measure(engines, jobs, args.repeats, label) for label, jobs in workloads.items()}
    for engine in engines:
        engine.close()

    ratios = {label: speed["transformers"] / speed["native"] for label, speed in speeds.items()}
    rows = [[name, *(f"{speed[name]:.1f}" for speed in speeds.values())] for name in BACKENDS]
    rows.append(["ratio", *(f"{ratio:.2f}" for ratio in ratios.values())])
    common.print_table(["model backend", *(f"{label}, tokens/s" for label in workloads)], rows)
    one, many = workloads
    common.print_json(
        {
            "native_single_stream_tok_s": round(speeds[one]["native"], 2),
            "native_batch_tok_s": round(speeds[many]["native"], 2),
            "single_stream_ratio": round(ratios[one], 3),
            "batch_ratio": round(ratios[many], 3),
            "same_tokens": texts[0] == texts[1],
            "streams": args.streams,
            "threads": args.threads,
            "dtype": args.dtype,
        }
    )


if __name__ == "__main__":
    main()
