"""``ModelCaller``: calls other models of this server from many threads of a BLS process at once.

Made by the BLS adapter with Triton Server's module, and handed to ``BlsFlow``. It knows what the Python backend
needs to survive many concurrent calls; it knows nothing of requests and texts.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backend_engine.triton_io.bls_flow import ModelResponse
from backend_engine.triton_io.request_view import Array


class ModelCaller:
    """A ``CallModel``. A finished call's response iterator is kept for ``KEEP_S`` seconds.

    The Python backend's own thread forgets an iterator a moment after its last response, without the interpreter's
    lock. If that were its last owner it would free numpy arrays beside running Python code and corrupt the heap
    (seen on Triton Server 2.51 with 16 streams). So Python has to let go last.
    """

    KEEP_S = 2.0

    def __init__(self, pb_utils: Any) -> None:
        self._pb_utils = pb_utils
        self._lock = threading.Lock()
        self._finished: deque[tuple[float, Any]] = deque()

    def __call__(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        request_id: str,
        *,
        decoupled: bool = True,
    ) -> Iterator[ModelResponse]:
        """Yield the responses as they come; blocks the thread until each next one is there. Never raises.

        ``decoupled`` must be True for a model that may answer several times. The caller has to take all responses.
        """
        request = self._pb_utils.InferenceRequest(
            model_name=model,
            request_id=request_id,
            inputs=[self._pb_utils.Tensor(name, values) for name, values in inputs.items()],
            requested_output_names=list(outputs),
        )
        try:
            if decoupled:
                responses = request.exec(decoupled=True)
                yield from map(_read, responses)
                self._keep(responses)
            else:
                yield _read(request.exec())
        except self._pb_utils.TritonModelException as error:
            yield ModelResponse({}, str(error))

    def close(self) -> None:
        """Let go of everything: the Python backend's objects must not outlive the model."""
        self._finished.clear()

    def _keep(self, responses: Any) -> None:
        now = time.monotonic()
        with self._lock:
            self._finished.append((now, responses))
            old = []
            while self._finished[0][0] < now - self.KEEP_S:
                old.append(self._finished.popleft())
        old.clear()  # outside the lock: freeing them takes a while


def _read(response: Any) -> ModelResponse:
    if response.has_error():
        return ModelResponse({}, response.error().message())
    return ModelResponse({tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()})
