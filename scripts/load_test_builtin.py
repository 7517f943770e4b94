"""A small closed-loop load generator over gRPC streaming: each of N clients sends its next request after an answer.

``load_test.py`` uses it where perf_analyzer cannot run; the records are the same. It needs only tritonclient.
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from load_test_perf_analyzer import LoadError
from load_test_records import RequestRecord
from load_test_workload import Value, Workload

TIMEOUT_S = 600.0
_KINDS = {str: ("BYTES", np.object_), bool: ("BOOL", np.bool_), int: ("INT32", np.int32)}


def tensors(request: Mapping[str, Sequence[Value]]) -> list[grpcclient.InferInput]:
    """Inputs of one request, each ``[1, n]``."""
    inputs = []
    for name, values in request.items():
        datatype, kind = _KINDS[type(values[0])]
        inputs.append(grpcclient.InferInput(name, [1, len(values)], datatype))
        inputs[-1].set_data_from_numpy(np.array([list(values)], dtype=kind))
    return inputs


class _Client:
    """One gRPC stream that has one request under way at a time."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._arrivals: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()
        self._client = grpcclient.InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._arrivals.put((time.perf_counter_ns(), result, error)))

    def send(self, inputs: list[grpcclient.InferInput]) -> RequestRecord:
        """Send one request and wait for its final response. Raises ``LoadError``."""
        start = time.perf_counter_ns()
        self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
        times: list[int] = []
        tokens: list[int] = []
        is_final = False
        while not is_final:
            try:
                at, result, error = self._arrivals.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise LoadError(f"no response within {TIMEOUT_S:.0f} s") from None
            if error is not None:
                raise LoadError(f"a request failed: {error}")
            response = result.get_response()
            is_final = response.parameters["triton_final_response"].bool_param
            if response.outputs or not is_final or not times:
                counts = result.as_numpy("num_output_tokens")
                times.append(at)
                tokens.append(0 if counts is None else int(counts.reshape(-1)[0]))
        return RequestRecord(start, tuple(times), tuple(tokens))

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


class _Tickets:
    """Hands out the requests of a run, one at a time, to whichever client asks."""

    def __init__(self, requests: Sequence[Mapping[str, Sequence[Value]]], count: int) -> None:
        self._requests: Iterator[Mapping[str, Sequence[Value]]] = itertools.islice(itertools.cycle(requests), count)
        self._lock = threading.Lock()

    def next(self) -> Mapping[str, Sequence[Value]] | None:
        """The next request, None when all are given out."""
        with self._lock:
            return next(self._requests, None)


def run_builtin(url: str, workload: Workload, concurrency: int, num_requests: int) -> list[RequestRecord]:
    """Measure ``num_requests`` requests with ``concurrency`` under way all the time. Raises ``LoadError``."""
    tickets = _Tickets(workload.requests(salt=concurrency), num_requests)
    records: list[RequestRecord] = []
    failures: list[LoadError] = []

    def serve(client: _Client) -> None:
        try:
            while not failures and (request := tickets.next()) is not None:
                records.append(client.send(tensors(request)))
        except LoadError as error:
            failures.append(error)

    clients = [_Client(url, workload.model) for _ in range(concurrency)]
    threads = [threading.Thread(target=serve, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    if failures:
        raise failures[0]
    return records
