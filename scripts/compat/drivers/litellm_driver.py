"""Runs inside LiteLLM's own environment: one completion and one streamed completion; prints one JSON line.

Arguments: api_base, prompt, max_tokens. ``litellm.py`` starts it and judges what came back.
"""

import json
import sys

import litellm

api_base, prompt, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
arguments = {
    "model": "triton/ensemble",
    "api_base": api_base,
    "messages": [{"role": "user", "content": prompt}],
    "max_tokens": max_tokens,
}
whole = litellm.completion(**arguments).choices[0].message.content
pieces = [chunk.choices[0].delta.content for chunk in litellm.completion(**arguments, stream=True)]
print(json.dumps({"whole": whole, "pieces": [piece for piece in pieces if piece]}))
