"""Clients for the tests against a real server: HTTP ``generate`` / ``generate_stream`` and gRPC streaming.

Every JSON body is read strictly: legal UTF-8, and no NaN or Infinity.
"""

import http.client
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

TIMEOUT_S = 60.0
DTYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", object), "stop_words": ("BYTES", object), "bad_words": ("BYTES", object),
    "cache_salt": ("BYTES", object), "logits_processors": ("BYTES", object), "messages": ("BYTES", object),
    "guided_decoding_guide_type": ("BYTES", object), "embedding_bias_words": ("BYTES", object),
    "temperature": ("FP32", np.float32), "top_p": ("FP32", np.float32), "runtime_top_p": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32), "presence_penalty": ("FP32", np.float32),
    "frequency_penalty": ("FP32", np.float32), "embedding_bias_weights": ("FP32", np.float32),
    "length_penalty": ("FP32", np.float32), "len_penalty": ("FP32", np.float32), "embedding_bias": ("FP32", np.float32),
    "random_seed": ("UINT64", np.uint64), "seed": ("UINT64", np.uint64), "lora_task_id": ("UINT64", np.uint64),
}  # fmt: skip
BOOLS = ("stream", "streaming", "stop", "exclude_input_in_output", "include_stop_words_in_output")


def strict_json(body: bytes) -> Any:
    """Parse as the strictest clients do."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not legal JSON: {body!r}")

    return json.loads(body.decode("utf-8", "strict"), parse_constant=refuse)


@dataclass
class Server:
    """Where a server listens (``host:port`` each)."""

    http: str
    grpc: str

    def post(self, path: str, payload: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """POST JSON, return status and strictly parsed body."""
        connection = http.client.HTTPConnection(self.http, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(payload), headers or {})
            response = connection.getresponse()
            body = response.read()
            return response.status, strict_json(body) if body else None
        finally:
            connection.close()

    def generate(self, model: str, **fields: Any) -> tuple[int, Any]:
        """``/generate``; the prompt is not echoed unless asked for."""
        return self.post(f"/v2/models/{model}/generate", {"exclude_input_in_output": True, **fields})

    def text(self, model: str, **fields: Any) -> str:
        """The text of a ``/generate`` that must succeed."""
        status, body = self.generate(model, **fields)
        assert status == 200 and "error" not in body, (status, body)
        return str(body["text_output"])

    def events(self, model: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of ``/generate_stream`` as they come; closing the iterator drops the connection."""
        connection = http.client.HTTPConnection(self.http, timeout=TIMEOUT_S)
        payload = {"exclude_input_in_output": True, "stream": True, **fields}
        try:
            connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(payload))
            response = connection.getresponse()
            if response.status != 200:
                yield {"status": response.status, **strict_json(response.read().removeprefix(b"data:"))}
                return
            for line in response:
                if line.startswith(b"data:"):
                    yield strict_json(line[5:])
        finally:
            connection.close()

    def chunks(self, model: str, **fields: Any) -> list[str]:
        """The pieces of text of a stream that must succeed, the empty ones left out."""
        pieces = []
        for event in self.events(model, **fields):
            assert "error" not in event, event
            pieces.append(event["text_output"])
        return [piece for piece in pieces if piece]

    def joined(self, model: str, **fields: Any) -> str:
        """The joined text of a stream."""
        return "".join(self.chunks(model, **fields))


@dataclass
class Response:
    """One response of a gRPC stream."""

    outputs: dict[str, np.ndarray]
    final: bool
    request_id: str
    error: str | None = None

    @property
    def text(self) -> str:
        return (
            b"".join(self.outputs["text_output"].reshape(-1).tolist()).decode() if "text_output" in self.outputs else ""
        )


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """A client's input ``[1, n]`` for a field, typed by the contract."""
    dtype, kind = (
        ("BOOL", bool) if name in BOOLS or name.startswith("return_") else DTYPES.get(name, ("INT32", np.int32))
    )
    array = value if isinstance(value, np.ndarray) else np.atleast_2d(np.array(value, dtype=kind))
    if isinstance(value, np.ndarray):
        dtype = np_to_triton_dtype(array.dtype)
    result = grpcclient.InferInput(name, list(array.shape), dtype)
    result.set_data_from_numpy(array)
    return result


@dataclass
class GrpcStream:
    """A gRPC stream of one client. ``responses`` fills as they come; ``close(cancel=True)`` leaves at once."""

    url: str
    responses: "queue.SimpleQueue[Response]" = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._client = grpcclient.InferenceServerClient(self.url)
        self._client.start_stream(self._arrived)

    def _arrived(self, result: Any, error: Any) -> None:
        if error is not None:
            self.responses.put(Response({}, True, "", str(error)))
            return
        raw = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in raw.outputs}
        self.responses.put(Response(outputs, raw.parameters["triton_final_response"].bool_param, raw.id))

    def send(self, model: str, request_id: str = "", parameters: dict[str, Any] | None = None, **fields: Any) -> None:
        self._client.async_stream_infer(
            model, [tensor(name, value) for name, value in fields.items()], request_id=request_id,
            parameters=parameters, enable_empty_final_response=True,
        )  # fmt: skip

    def next(self, timeout: float = TIMEOUT_S) -> Response:
        return self.responses.get(timeout=timeout)

    def all(self) -> list[Response]:
        """Responses up to the final one (or an error)."""
        responses = [self.next()]
        while not responses[-1].final:
            responses.append(self.next())
        return responses

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def grpc_all(url: str, model: str, request_id: str = "", parameters: Any = None, **fields: Any) -> list[Response]:
    """One request on a stream of its own, all its responses."""
    stream = GrpcStream(url)
    try:
        stream.send(model, request_id, parameters, **fields)
        return stream.all()
    finally:
        stream.close()


def grpc_text(url: str, model: str, **fields: Any) -> str:
    """Joined text of one request over gRPC that must succeed."""
    responses = grpc_all(url, model, **{"exclude_input_in_output": True, **fields})
    assert not [r.error for r in responses if r.error], responses
    return "".join(r.text for r in responses)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run the calls in threads of their own, all together; results in order, the first failure raised."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
