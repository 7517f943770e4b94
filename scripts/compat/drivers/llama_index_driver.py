"""Runs inside LlamaIndex's own environment: ``complete`` and ``stream_complete``; prints one JSON line.

Arguments: gRPC host:port, prompt, max_tokens. ``llama_index.py`` starts it and judges what came back.
"""

import json
import sys

from llama_index.llms.nvidia_triton import NvidiaTriton

url, prompt, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = NvidiaTriton(server_url=url, model="ensemble", tokens=max_tokens)
whole = llm.complete(prompt).text
deltas = [part.delta for part in llm.stream_complete(prompt)]
print(json.dumps({"whole": whole, "deltas": deltas}))
