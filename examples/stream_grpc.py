#!/usr/bin/env python3
"""Streams an answer of a running server over gRPC. Usage: stream_grpc.py [URL] [MODEL] [PROMPT]"""

import queue
import sys

import numpy as np
import tritonclient.grpc as grpc

url, model, prompt = [*sys.argv[1:], *("localhost:8001", "ensemble", "The capital of France is")[len(sys.argv) - 1 :]]
answers: queue.SimpleQueue = queue.SimpleQueue()
client = grpc.InferenceServerClient(url)


def tensor(name: str, kind: str, value: object) -> grpc.InferInput:
    """A ``[1, 1]`` input."""
    dtypes = {"BYTES": object, "INT32": np.int32, "BOOL": bool}
    result = grpc.InferInput(name, [1, 1], kind)
    result.set_data_from_numpy(np.array([[value]], dtype=dtypes[kind]))
    return result


client.start_stream(lambda result, error: answers.put((result, error)))
inputs = [tensor("text_input", "BYTES", prompt), tensor("max_tokens", "INT32", 64), tensor("stream", "BOOL", True)]
client.async_stream_infer(model, inputs, enable_empty_final_response=True)
while True:
    result, error = answers.get()
    if error:
        sys.exit(f"error: {error}")
    for piece in result.as_numpy("text_output") if result.get_response().outputs else ():
        print(piece.decode(), end="", flush=True)
    if result.get_response().parameters["triton_final_response"].bool_param:
        break
print()
client.stop_stream()
