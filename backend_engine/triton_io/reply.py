"""``Reply``: a response sender that ends exactly once, whatever happens.

The engine's streams and the BLS answer through it. It alone calls Triton Server's sender. Asking whether the client
is gone is safe at any time: never after the end, which would touch memory that the server has freed. What fails
inside Triton Server arrives as its ``TritonModelException``.
"""

import threading
from collections.abc import Mapping
from typing import Any

from backend_engine.logger import get_logger
from backend_engine.triton_io.error_codes import triton_error
from backend_engine.triton_io.request_view import Array

_log = get_logger(__name__)


class Reply:
    """Answers one request. ``requested_outputs``: names to send, empty = all. Safe for calls from several threads."""

    def __init__(self, pb_utils: Any, sender: Any, requested_outputs: frozenset[str] = frozenset()) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._wanted = requested_outputs
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def wanted(self) -> frozenset[str]:
        """Names of the outputs to send; empty = all."""
        return self._wanted

    @property
    def is_closed(self) -> bool:
        """True once the final flag is out."""
        return self._is_closed

    def send(self, tensors: Mapping[str, Array], *, final: bool) -> None:
        """Send one response, the last one when ``final``."""
        wanted = self._wanted
        response = self._pb_utils.InferenceResponse(
            output_tensors=[
                self._pb_utils.Tensor(name, values) for name, values in tensors.items() if not wanted or name in wanted
            ]
        )
        self._send(response, final)

    def fail(self, code: str, message: str, *, final: bool = True) -> None:
        """Answer with an error, as the final response unless other rows of the request go on."""
        error = triton_error(self._pb_utils, code, message)
        self._send(self._pb_utils.InferenceResponse(output_tensors=[], error=error), final)

    def end(self) -> None:
        """End without a further response."""
        self._send(None, True)

    def close(self, code: str, message: str) -> None:
        """End with an error unless it has ended; never raises."""
        if self._is_closed:
            return
        try:
            self.fail(code, message)
        except self._pb_utils.TritonModelException as error:
            _log.error("an error response could not be sent: %s", error)
            self._try_to_end()

    def _try_to_end(self) -> None:
        """All that is left to tell this client is that it is over."""
        try:
            self.end()
        except self._pb_utils.TritonModelException as error:
            _log.error("the final flag could not be sent: %s", error)
            self._is_closed = True
            self._sender = None

    def is_cancelled(self) -> bool:
        """True when the client is gone; a call into Triton Server. A call that fails counts as gone."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                return bool(self._sender.is_cancelled())
            except self._pb_utils.TritonModelException as error:
                _log.error("a client could not be asked whether it is there; its request ends: %s", error)
                return True

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            assert not self._is_closed, "a response after the final one"
            flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)
            self._is_closed = final
            if final:
                self._sender = None  # Triton Server's object must not outlive the model
