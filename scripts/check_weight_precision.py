#!/usr/bin/env python3
"""What shorter forms of plain weights (weight_only_precision) cost: perplexity, and greedy answers against float32.

    python scripts/check_weight_precision.py
    python scripts/check_weight_precision.py --model FOLDER --precisions int8 --prompts 10
    python scripts/check_weight_precision.py --precisions int8 --kv-cache-dtype int8

Perplexity of Python's own manual (the texts of scripts/quantize.py). ``alone``: share of the first tokens of answers
that are equal where each goes on with its own, so that an answer counts as different from its first other token on.
Prints a table and, last, one JSON line.
"""

import argparse
from typing import Any

import bench_common as common
from check_kv_agreement import Tokens, equal_until_other
from check_parity import prompts

MOST_PERCENT = {"float16": 0.1, "bfloat16": 1.0, "int16": 0.1, "int8": 1.0, "w8a8": 1.0}
"""How many percent a perplexity may rise."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of Hugging Face's format (default: the model that serve.sh takes)")
    parser.add_argument("--precisions", nargs="+", default=list(MOST_PERCENT), choices=tuple(MOST_PERCENT))
    parser.add_argument("--kv-cache-dtype", default="auto", help="beside all precisions but float32 (auto: float32)")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens, for the perplexity (16)")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    options = parser.parse_args()
    model = options.model or common.default_model()
    before, expected = measured(model, "auto", "auto", options)
    rows: list[dict[str, Any]] = []
    for precision in options.precisions:
        after, found = measured(model, precision, options.kv_cache_dtype, options)
        equal = sum(equal_until_other(a, b) for a, b in zip(expected, found, strict=True))
        rows.append(
            {
                "precision": precision,
                "kv_cache_dtype": options.kv_cache_dtype,
                "perplexity": after,
                "rise_percent": 100 * (after / before - 1),
                "allowed_percent": MOST_PERCENT[precision],
                "alone": equal / sum(map(len, expected)),
                "equal_answers": sum(a == b for a, b in zip(expected, found, strict=True)),
            }
        )
    common.print_table(
        ["weights", "perplexity", "rise", "allowed", "equal tokens", "equal answers"],
        [
            ["float32", f"{before:.4f}", "", "", "", ""],
            *(
                [r["precision"], f"{r['perplexity']:.4f}", f"{r['rise_percent']:+.3f} %", f"{r['allowed_percent']} %",
                 f"{r['alone']:.1%}", f"{r['equal_answers']} of {len(expected)}"]
                for r in rows
            ),
        ],
    )  # fmt: skip
    common.print_json({"float32": before, "rows": rows})


def measured(model: str, precision: str, kv_dtype: str, options: argparse.Namespace) -> tuple[float, Tokens]:
    """The perplexity, and the answers' tokens."""
    from backend_engine import LLM, KvCacheConfig, SamplingParams
    from backend_engine.model_engine.model_backend import Implementations
    from backend_engine.model_engine.model_loader import load_model
    from backend_engine.post_training.calibration_data import WindowLimits, evaluation_windows
    from backend_engine.post_training.perplexity import perplexity

    common.progress(f"weights of {precision}, KV cache of {kv_dtype}")
    cache = KvCacheConfig(max_tokens=8192, dtype=kv_dtype)
    with LLM(model, max_seq_len=256, kv_cache_config=cache, weight_only_precision=precision) as llm:
        ids = [llm.tokenizer.encode(text) for text in prompts(options.prompts)]
        results = llm.generate(ids, SamplingParams(max_tokens=options.tokens, ignore_eos=True))
        answers = [list(result.outputs[0].token_ids) for result in results]
        windows = evaluation_windows(llm.tokenizer, None, options.windows, 512, WindowLimits(None, None))
    loaded = load_model(model, "float32", "cpu", Implementations("auto", "native", precision))
    return perplexity(loaded, windows, "float32" if kv_dtype == "auto" else kv_dtype), answers


if __name__ == "__main__":
    main()
