#!/usr/bin/env python3
"""Generates without Triton: a batch, then one answer as it grows. Usage: generate.py MODEL_FOLDER"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backend_engine import LLM, SamplingParams

with LLM(sys.argv[1]) as llm:
    for result in llm.generate(["The capital of France is", "1, 2, 3,"], SamplingParams(max_tokens=16)):
        print(f"{result.prompt!r} -> {result.outputs[0].text!r}")
    for step in llm.generate_async("Once upon a time", SamplingParams(max_tokens=32, temperature=0.8, seed=1)):
        print(step.outputs[0].text_diff, end="", flush=True)
    print()
