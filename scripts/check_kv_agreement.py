#!/usr/bin/env python3
"""Greedy answers with a KV cache of few bits against those with a float32 cache, token by token.

    python scripts/check_kv_agreement.py
    python scripts/check_kv_agreement.py --model FOLDER --kv-cache-dtype fp8

``alone``: share of the first tokens of all answers that are equal where each cache goes on with its own tokens, so that
an answer counts as different from its first other token on. ``in step``: share of tokens that are equal where both are
given the float32 answer so far (``--in-step``, which takes longer). Prints a table and, last, one JSON line.
"""

import argparse
from typing import Any

import bench_common as common
from check_parity import prompts

Tokens = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint or an engine folder (default: the model that serve.sh takes)")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["int8", "fp8"], metavar="DTYPE")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (32)")
    parser.add_argument("--in-step", action="store_true")
    options = parser.parse_args()
    model = options.model or common.default_model()
    expected, texts = answers(model, "float32", options.prompts, options.tokens)
    rows: list[dict[str, Any]] = []
    for dtype in options.kv_cache_dtype:
        found, _ = answers(model, dtype, options.prompts, options.tokens)
        alone = sum(equal_until_other(a, b) for a, b in zip(expected, found, strict=True))
        total = sum(map(len, expected))
        whole = sum(a == b for a, b in zip(expected, found, strict=True))
        row = {"kv_cache_dtype": dtype, "answers": len(expected), "equal_answers": whole, "alone": alone / total}
        if options.in_step:
            row["in_step"] = in_step(model, dtype, texts, expected)
        rows.append(row)
    shares = ["alone", *(["in_step"] if options.in_step else [])]
    common.print_table(
        ["cache", "answers", "equal answers", *shares],
        [
            [row["kv_cache_dtype"], str(row["answers"]), str(row["equal_answers"]), *(f"{row[s]:.1%}" for s in shares)]
            for row in rows
        ],
    )
    common.print_json({"rows": rows})


def engine(model: str, dtype: str) -> Any:
    """An engine with such a cache."""
    from backend_engine import LLM, KvCacheConfig

    common.progress(f"a cache of {dtype}")
    return LLM(model, max_seq_len=256, kv_cache_config=KvCacheConfig(dtype=dtype, max_tokens=8192))


def answers(model: str, dtype: str, count: int, num_tokens: int) -> tuple[Tokens, Tokens]:
    """The tokens of all answers, and those of the prompts."""
    from backend_engine import SamplingParams

    with engine(model, dtype) as llm:
        ids = [llm.tokenizer.encode(text) for text in prompts(count)]
        results = llm.generate(ids, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return [list(result.outputs[0].token_ids) for result in results], ids


def in_step(model: str, dtype: str, texts: Tokens, expected: Tokens) -> float:
    """Share of ``expected`` that a cache of ``dtype`` would have chosen too, each given the ones before it."""
    from backend_engine import SamplingParams

    asked, wanted = [], []
    for text, answer in zip(texts, expected, strict=True):
        for place, token in enumerate(answer):
            asked.append([*text, *answer[:place]])
            wanted.append(token)
    with engine(model, dtype) as llm:
        results = llm.generate(asked, SamplingParams(max_tokens=1, ignore_eos=True))
    return sum(r.outputs[0].token_ids[0] == token for r, token in zip(results, wanted, strict=True)) / len(wanted)


def equal_until_other(a: list[int], b: list[int]) -> int:
    """Tokens at the beginning that are equal."""
    places = (i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return next(places, len(a))


if __name__ == "__main__":
    main()
