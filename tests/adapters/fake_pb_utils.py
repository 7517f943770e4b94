"""``triton_python_backend_utils`` for tests: small, real, and strict where Triton Server is.

Tensors keep arrays, senders keep a log, and what would corrupt a real server (a response after the final flag, a
question about cancellation after it) fails here. It answers nothing that it was not told.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
_DTYPES = {"bool", "uint8", "uint64", "int32", "int64", "float16", "float32", "object"}


class TritonModelException(Exception):
    """What a failing ``initialize`` raises."""


class TritonError:
    """An error with one of Triton Server's codes."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array. STRING tensors hold bytes."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        assert isinstance(values, np.ndarray) and values.dtype.name in _DTYPES, (name, values)
        if values.dtype == np.object_:
            assert all(isinstance(element, bytes) for element in values.reshape(-1)), (name, values)
        self._name = name
        self._values = values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class InferenceResponse:
    """Output tensors, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError:
        assert self._error is not None
        return self._error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def arrays(self) -> dict[str, np.ndarray]:
        """For assertions: the tensors by name."""
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


class ResponseSender:
    """Keeps what is sent in ``log`` as ``(response or None, flags)``. ``fail_next`` makes the next sends raise."""

    def __init__(self) -> None:
        self.log: list[tuple[InferenceResponse | None, int]] = []
        self.client_is_gone = False
        self.fail_next = 0
        self.num_polls = 0

    @property
    def is_final(self) -> bool:
        return any(flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL for _, flags in self.log)

    @property
    def responses(self) -> list[InferenceResponse]:
        return [response for response, _ in self.log if response is not None]

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.fail_next:
            self.fail_next -= 1
            raise TritonModelException("Unable to send response.")
        assert not self.is_final, "Unable to send response. Response sender has been closed."
        assert response is not None or flags, "nothing to send"
        self.log.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not self.is_final, "asked about a request that Triton Server has freed"
        self.num_polls += 1
        return self.client_is_gone


class InferenceRequest:
    """A request that arrived, or one that a BLS makes. ``ROUTES`` answers the latter."""

    def __init__(
        self,
        request_id: str = "",
        model_name: str = "",
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        parameters: dict[str, Any] | None = None,
        timeout: int = 0,
    ) -> None:
        self._request_id = request_id
        self._model_name = model_name
        self._inputs = list(inputs)
        self._outputs = list(requested_output_names)
        self._parameters = parameters or {}
        self._timeout = timeout
        self.sender = ResponseSender()

    def request_id(self) -> str:
        return self._request_id

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def timeout(self) -> int:
        return self._timeout

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def exec(self, decoupled: bool = False) -> Any:
        responses = ROUTES[self._model_name](self)
        if decoupled:
            return responses
        (response,) = responses
        return response


ROUTES: dict[str, Callable[[InferenceRequest], Iterator[InferenceResponse]]] = {}


class Metric:
    """One sample. A counter cannot be set, a histogram has buckets and is observed alone."""

    def __init__(self, family: "MetricFamily", labels: dict[str, str], buckets: list[float] | None) -> None:
        assert (buckets is not None) == (family.kind == MetricFamily.HISTOGRAM), (family.name, buckets)
        self.family = family
        self.labels = labels
        self.buckets = buckets
        self.observed: list[float] = []
        self.num = 0.0
        self.num_calls = 0

    def observe(self, number: float) -> None:
        assert self.family.kind == MetricFamily.HISTOGRAM and type(number) is float
        self.observed.append(number)
        self.num_calls += 1

    def set(self, number: float) -> None:
        assert self.family.kind == MetricFamily.GAUGE
        self.num = number
        self.num_calls += 1

    def increment(self, number: float) -> None:
        assert self.family.kind != MetricFamily.HISTOGRAM
        assert self.family.kind == MetricFamily.GAUGE or number >= 0
        self.num += number
        self.num_calls += 1


class MetricFamily:
    """A family and the samples it has made."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.metrics: list[Metric] = []

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        self.metrics.append(Metric(self, labels, buckets))
        return self.metrics[-1]


class Logger:
    """Keeps verbose lines in ``lines``, the last ones."""

    lines: ClassVar[deque[str]] = deque(maxlen=1000)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.lines.append(message)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
