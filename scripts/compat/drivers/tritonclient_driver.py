"""Runs inside tritonclient's own environment: every way the package has of calling a model; prints one JSON line.

Arguments: HTTP host:port, gRPC host:port, prompt, max_tokens, expected text, "decoupled" or "whole".
``tritonclient.py`` starts it. Each check is a function; the line holds the names that passed and the first failure.
"""

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import requests
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio

HTTP_URL, GRPC_URL, PROMPT, MAX_TOKENS, EXPECTED, MODE = sys.argv[1:]
MODEL = "ensemble"
LONG = 400  # tokens of a request that is cancelled
TIMEOUT_S = 120


def inputs(module: Any, max_tokens: int = int(MAX_TOKENS), stream: bool = False, endless: bool = False) -> list[Any]:
    """The request as inputs of either protocol's module."""
    values = [
        ("text_input", "BYTES", np.array([[PROMPT]], dtype=object)),
        ("max_tokens", "INT32", np.array([[max_tokens]], dtype=np.int32)),
        ("exclude_input_in_output", "BOOL", np.array([[True]])),
        ("stream", "BOOL", np.array([[stream]])),
    ]
    if endless:
        values.append(("end_id", "INT32", np.array([[1048576]], dtype=np.int32)))
    tensors = []
    for name, datatype, array in values:
        tensors.append(module.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def text_of(result: Any) -> str:
    """The answer's text; one string, or an empty text for a response without outputs."""
    array = result.as_numpy("text_output")
    return "" if array is None else str(b"".join(array.reshape(-1)).decode())


def expect(got: object, wanted: object = EXPECTED) -> None:
    assert got == wanted, f"got {got!r}, expected {wanted!r}"


def metadata_http() -> None:
    client = http.InferenceServerClient(HTTP_URL)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    metadata = client.get_model_metadata(MODEL)
    assert {"text_input", "max_tokens"} <= {each["name"] for each in metadata["inputs"]}, metadata
    assert client.get_model_config(MODEL)["name"] == MODEL
    assert client.get_inference_statistics(MODEL)["model_stats"][0]["name"] == MODEL
    assert client.get_server_metadata()["name"] == "triton"


def metadata_grpc() -> None:
    client = grpc.InferenceServerClient(GRPC_URL)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    metadata = client.get_model_metadata(MODEL, as_json=True)
    assert "text_output" in {each["name"] for each in metadata["outputs"]}, metadata
    config = client.get_model_config(MODEL)
    assert config.config.name == MODEL, config
    assert client.get_inference_statistics(MODEL).model_stats[0].name == MODEL


def generate_with_requests() -> None:
    body: Any = {"text_input": PROMPT, "max_tokens": int(MAX_TOKENS), "exclude_input_in_output": True}
    reply = requests.post(f"http://{HTTP_URL}/v2/models/{MODEL}/generate", json=body, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    expect(reply.json()["text_output"])


def generate_stream_with_requests() -> None:
    body: Any = {"text_input": PROMPT, "max_tokens": int(MAX_TOKENS), "stream": True}
    url = f"http://{HTTP_URL}/v2/models/{MODEL}/generate_stream"
    with requests.post(url, json=body, stream=True, timeout=TIMEOUT_S) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith(b"data:") for line in lines), lines
    expect("".join(json.loads(line[5:])["text_output"] for line in lines))


def infer_http() -> None:
    client = http.InferenceServerClient(HTTP_URL, network_timeout=TIMEOUT_S)
    expect(text_of(client.infer(MODEL, inputs(http))))


def async_infer_http() -> None:
    client = http.InferenceServerClient(HTTP_URL, concurrency=2, network_timeout=TIMEOUT_S)
    calls = [client.async_infer(MODEL, inputs(http)) for _ in range(2)]
    for call in calls:
        expect(text_of(call.get_result()))


def aio_infer_http() -> None:
    async def run() -> Any:
        async with http_aio.InferenceServerClient(HTTP_URL, conn_timeout=TIMEOUT_S) as client:
            return await client.infer(MODEL, inputs(http))

    expect(text_of(asyncio.run(run())))


def infer_grpc() -> None:
    client = grpc.InferenceServerClient(GRPC_URL)
    expect(text_of(client.infer(MODEL, inputs(grpc), client_timeout=TIMEOUT_S)))


def async_infer_grpc() -> None:
    client = grpc.InferenceServerClient(GRPC_URL)
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.async_infer(MODEL, inputs(grpc), lambda result, error: arrivals.put((result, error)))
    result, error = arrivals.get(timeout=TIMEOUT_S)
    assert error is None, error
    expect(text_of(result))


def aio_infer_grpc() -> None:
    async def run() -> Any:
        async with grpc_aio.InferenceServerClient(GRPC_URL) as client:
            return await client.infer(MODEL, inputs(grpc))

    expect(text_of(asyncio.run(run())))


def stream_infer_grpc() -> None:
    client = grpc.InferenceServerClient(GRPC_URL)
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrivals.put((result, error)))
    client.async_stream_infer(MODEL, inputs(grpc, stream=MODE == "decoupled"), enable_empty_final_response=True)
    text, pieces, is_final = "", 0, False
    while not is_final:
        result, error = arrivals.get(timeout=TIMEOUT_S)
        assert error is None, error
        text, pieces = text + text_of(result), pieces + 1
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    expect(text)
    assert MODE == "whole" or pieces > 1, pieces


def stream_cancel_grpc() -> None:
    client = grpc.InferenceServerClient(GRPC_URL)
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrivals.put((result, error)))
    client.async_stream_infer("tensorrt_llm_bls", inputs(grpc, LONG, stream=True, endless=True))
    assert arrivals.get(timeout=TIMEOUT_S)[1] is None
    client.stop_stream(cancel_requests=True)
    count = 1
    while True:
        _, error = arrivals.get(timeout=TIMEOUT_S)
        count += 1
        if error is not None:
            break
    assert "CANCELLED" in str(error), error
    assert count < LONG, count


def aio_stream_infer_grpc() -> None:
    async def requests_of() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": MODEL, "inputs": inputs(grpc, stream=True), "enable_empty_final_response": True}

    async def run() -> str:
        text = ""
        async with grpc_aio.InferenceServerClient(GRPC_URL) as client:
            async for result, error in client.stream_infer(requests_of()):
                assert error is None, error
                text += text_of(result)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        return text

    expect(asyncio.run(run()))


def aio_stream_cancel_grpc() -> None:
    async def requests_of() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "tensorrt_llm_bls", "inputs": inputs(grpc, LONG, stream=True, endless=True)}

    async def run() -> bool:
        async with grpc_aio.InferenceServerClient(GRPC_URL) as client:
            responses = client.stream_infer(requests_of())
            async for _, error in responses:
                assert error is None, error
                return bool(responses.cancel())
        return False

    assert asyncio.run(run())


def answers_after_cancel() -> None:
    """The server must not be worse off."""
    generate_with_requests()


COMMON: list[Callable[[], None]] = [metadata_http, metadata_grpc, generate_with_requests, stream_infer_grpc]
DECOUPLED: list[Callable[[], None]] = [
    generate_stream_with_requests, aio_stream_infer_grpc, stream_cancel_grpc, aio_stream_cancel_grpc,
    answers_after_cancel,
]  # fmt: skip
WHOLE: list[Callable[[], None]] = [
    infer_http,
    async_infer_http,
    aio_infer_http,
    infer_grpc,
    async_infer_grpc,
    aio_infer_grpc,
]

passed: list[str] = []
failure = ""
for check in COMMON + (DECOUPLED if MODE == "decoupled" else WHOLE):
    try:
        check()
    except Exception as error:
        failure = f"{check.__name__}: {type(error).__name__}: {error}"
        break
    passed.append(check.__name__)
print(json.dumps({"passed": passed, "failure": failure}))
