#!/usr/bin/env python3
"""Tokens per second of ``LLM`` in this process: one stream, and 16 mixed requests at once.

``--baseline transformers`` measures ``transformers`` ``generate`` in the same run, turn by turn (A B A B), since
machines drift; ``--packed`` another checkpoint of the same model in our engine. Prints a table and, last, one JSON
line.
"""

import argparse
import gc
from typing import Any

import bench_common as common


class Ours:
    """The engine, with one checkpoint."""

    def __init__(self, args: argparse.Namespace, model: str, name: str = "inflight") -> None:
        from backend_engine import LLM, SamplingParams

        self.name = name
        self._sampling_params = SamplingParams
        self._llm = LLM(model, dtype=args.dtype, num_threads=args.threads, skip_tokenizer_init=True, max_batch_size=16)

    def run(self, jobs: list[common.Job]) -> None:
        params = [
            self._sampling_params(max_tokens=job.num_output_tokens, ignore_eos=True, detokenize=False) for job in jobs
        ]
        results = self._llm.generate([job.prompt_token_ids for job in jobs], params, use_tqdm=False)
        for job, result in zip(jobs, results, strict=True):
            assert len(result.outputs[0].token_ids) == job.num_output_tokens

    def close(self) -> None:
        self._llm.shutdown()


class Transformers:
    """``transformers`` ``generate``: one padded batch, eager, greedy."""

    name = "transformers"

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()

    def run(self, jobs: list[common.Job]) -> None:
        torch = self._torch
        longest = max(len(job.prompt_token_ids) for job in jobs)
        num_new = max(job.num_output_tokens for job in jobs)
        ids = torch.zeros(len(jobs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt_token_ids) :] = torch.tensor(job.prompt_token_ids)
            mask[row, longest - len(job.prompt_token_ids) :] = 1
        self._model.generate(
            ids, attention_mask=mask, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0
        )

    def close(self) -> None:
        del self._model
        gc.collect()


def fresh(jobs: list[common.Job], salt: int) -> list[common.Job]:
    """The same workload with other first tokens, so that no run profits from another's cached blocks."""
    return [common.Job([100 + salt, *job.prompt_token_ids[1:]], job.num_output_tokens) for job in jobs]


def measure(engines: list[Any], jobs: list[common.Job], repeats: int, label: str) -> dict[str, float]:
    """Median output tokens per second of each engine, measured in turn; the first round warms up."""
    num_tokens = sum(job.num_output_tokens for job in jobs)
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for round_index in range(repeats + 1):
        for engine in engines:
            taken = common.timed(lambda e=engine, r=round_index: e.run(fresh(jobs, r)))
            common.progress(f"{label} round {round_index}/{repeats} {engine.name}: {num_tokens / taken:.1f} tokens/s")
            if round_index:
                seconds[engine.name].append(taken)
    return {name: num_tokens / common.median(taken) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder (the default model if left out)")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    parser.add_argument("--baseline", choices=["none", "transformers"], default="none")
    parser.add_argument("--packed", metavar="MODEL", help="also another checkpoint of the model, such as a packed one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=common.Path, help="also write a bar chart (SVG) to this file")
    args = parser.parse_args()
    args.model = args.model or common.default_model()

    import torch

    bandwidth = common.memory_bandwidth_gb_s(args.threads)
    torch.set_num_threads(args.threads)
    engines: list[Any] = [Ours(args, args.model)]
    if args.packed:
        engines.insert(0, Ours(args, args.packed, f"inflight, {common.Path(args.packed).name}"))
    if args.baseline == "transformers":
        engines.append(Transformers(args))
    from backend_engine.checkpoint.open_checkpoint import open_checkpoint

    vocab_size = int(open_checkpoint(args.model).config["vocab_size"])
    single = measure(engines, common.single_stream(vocab_size), args.repeats, "one stream")
    batch = measure(engines, common.mixed_batch(vocab_size), args.repeats, "16 mixed")
    for engine in engines:
        engine.close()

    ours, theirs = ("inflight", "transformers") if args.baseline != "none" else (engines[0].name, "inflight")
    weights_gb = weight_bytes(args.model) / 1e9
    result: dict[str, object] = {
        "single_stream_tok_s": round(single[ours], 2),
        "batch_tok_s": round(batch[ours], 2),
        "memory_bandwidth_gb_s": round(bandwidth, 1),
        "roofline_share": round(single[ours] * weights_gb / bandwidth, 3),
        "threads": args.threads,
        "dtype": args.dtype,
    }
    rows = [[e.name, f"{single[e.name]:.1f}", f"{batch[e.name]:.1f}"] for e in engines]
    if len(engines) > 1:
        result[f"single_stream_ratio_to_{theirs}"] = round(single[ours] / single[theirs], 2)
        result[f"batch_ratio_to_{theirs}"] = round(batch[ours] / batch[theirs], 2)
        ratios = [single[ours] / single[theirs], batch[ours] / batch[theirs]]
        rows.append(["ratio", *(f"{ratio:.2f}" for ratio in ratios)])
    if args.plot:
        bars = [
            (f"{e.name}, {name}", speeds[e.name])
            for name, speeds in (("one stream", single), ("16 mixed", batch))
            for e in engines
        ]
        common.write_bars(
            args.plot, f"Output tokens per second, {args.dtype}, {args.threads} threads", bars, "tokens/s"
        )
    common.print_table(["engine", "one stream, tokens/s", "16 mixed, tokens/s"], rows)
    common.print_json(result)


def weight_bytes(model: str) -> int:
    """Bytes of the checkpoint's tensors: what one decoding step reads (in the checkpoint's dtype)."""
    return sum(path.stat().st_size for path in common.Path(model).glob("*.safetensors"))


if __name__ == "__main__":
    main()
