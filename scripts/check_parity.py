#!/usr/bin/env python3
"""Compare a model folder's greedy tokens in our engine with those of transformers, in float32 on the CPU.

The requests run together in our engine, chunked and sharing its cache; transformers reads each text, prompt and
answer, in one pass without a cache and says what it would have chosen at every place. A place where its two best tokens
are closer than rounding counts as a tie and is told apart. Prints a table and, last, one JSON line; exit code 1 when an
answer differs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import bench_common as common

# In float32 the logits of the two differ by about this much; two tokens this close are equally good.
TIE = 1e-3
SUBJECTS = ["the sea", "a lost key", "prime numbers", "the moon landing", "bread", "a slow computer", "winter",
            "honest work", "tax law", "an old map"]  # fmt: skip
FORMS = ["Write one sentence about {}.", "Explain {} to a child.", "A short poem about {}:\n", "Q: What is {}?\nA:",
         "Here is a list of facts about {}:\n1."]  # fmt: skip


class Verdict(NamedTuple):
    """One prompt: tokens that are equal, ties among them, and the first place that differs (``None`` = none)."""

    num_tokens: int
    num_ties: int
    differs_at: int | None


def prompts(count: int) -> list[str]:
    """The first ``count`` of all subjects in all forms."""
    texts = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    if count > len(texts):
        raise SystemExit(f"error: --prompts {count} is too many; there are {len(texts)}")
    return texts[:count]


def answers(folder: Path, texts: list[str], num_tokens: int, backend: str) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and answer ids of each text from our engine, all requests at once."""
    from backend_engine import LLM, SamplingParams

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    with LLM(str(folder), dtype="float32", device="cpu", max_seq_len=1024, model_backend=backend) as llm:
        results = llm.generate(texts, params)
    return [(list(result.prompt_token_ids), list(result.outputs[0].token_ids)) for result in results]


def judge(model: Any, prompt: list[int], answer: list[int]) -> Verdict:
    """What transformers says of an answer."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    behind = logits.amax(1) - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    wrong = (behind > TIE).nonzero().flatten().tolist()
    return Verdict(len(answer), int(((behind > 0) & (behind <= TIE)).sum()), wrong[0] if wrong else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens for each prompt")
    parser.add_argument("--model-backend", default="auto", choices=["auto", "native", "transformers"])
    args = parser.parse_args()
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    pairs = answers(args.model, prompts(args.prompts), args.tokens, args.model_backend)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).eval()
    verdicts = [judge(model, *pair) for pair in tqdm(pairs, desc="transformers", unit="prompt")]
    rows = [
        [str(i), str(len(prompt)), str(verdict.num_tokens), str(verdict.num_ties),
         "-" if verdict.differs_at is None else str(verdict.differs_at)]
        for i, ((prompt, _), verdict) in enumerate(zip(pairs, verdicts, strict=True))
    ]  # fmt: skip
    common.print_table(["prompt", "tokens in", "tokens out", "ties", "differs at"], rows)
    equal = sum(verdict.differs_at is None for verdict in verdicts)
    num_tokens, num_ties = (sum(column) for column in list(zip(*verdicts, strict=True))[:2])
    common.print_json({
        "model": args.model.name, "prompts": len(verdicts), "equal": equal, "tokens": num_tokens, "ties": num_ties,
    })  # fmt: skip
    return 0 if equal == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
