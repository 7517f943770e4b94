"""A small streaming client for the text models: one prompt in, text deltas out, over gRPC.

``serve.py`` asks its sample question with it, ``chat.py`` talks with it. It knows tensor names, not chat templates,
and prints nothing.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

_NUMPY_TYPES = {
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}
_POLL_S = 0.1


class ChatError(Exception):
    """The server refused the request or cannot be reached; the message is one line."""


@dataclass
class Answer:
    """What came back: the text, how many tokens, and when. Times are seconds since the request was sent."""

    text: str = ""
    num_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    is_complete: bool = False
    deltas: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first; None when there are too few to tell."""
        if self.first_token_s is None or self.num_tokens < 2 or self.total_s <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.total_s - self.first_token_s)

    def summary(self) -> str:
        """Return one line such as ``12 tokens, first after 0.25 s, then 40.1 tokens/s``."""
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"then {self.tokens_per_second:.1f} tokens/s")
        return ", ".join(parts)


class ChatClient:
    """Streams answers of one text model (``tensorrt_llm_bls`` or ``ensemble``) of the server at ``url``.

    Raises ``ChatError`` when the server cannot be reached or has no such model.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        with InferenceServerClient(url) as client:
            try:
                metadata = client.get_model_metadata(model)
                self.config = client.get_model_config(model).config
            except InferenceServerException as error:
                raise ChatError(f"model {model!r} at {url}: {_reason(error)}") from None
        # An ensemble's configuration does not say that it streams; it does when its engine does.
        self._is_streaming = self.config.model_transaction_policy.decoupled or self.config.platform == "ensemble"
        self._inputs = {tensor.name: tensor.datatype for tensor in metadata.inputs}

    def stream(
        self,
        prompt: str,
        max_tokens: int,
        sampling: Mapping[str, float | int | list[str]],
        on_delta: Callable[[str], None],
        cancel: threading.Event,
    ) -> Answer:
        """Send ``prompt`` and hand each piece of text to ``on_delta`` as it arrives; return the whole answer.

        ``sampling`` maps input names (``temperature``, ``top_k``, ``stop_words``, ...) to values. Setting ``cancel``
        ends the request early, the answer is then not complete. Raises ``ChatError`` when the server reports one.
        """
        values: dict[str, object] = {"text_input": [prompt], "max_tokens": [max_tokens], "stream": [self._is_streaming]}
        values |= {"exclude_input_in_output": [True], **sampling}
        if "return_num_output_tokens" in self._inputs:
            values["return_num_output_tokens"] = [True]
        inputs = [self._input(name, value) for name, value in values.items()]
        replies: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = queue.Queue()
        answer = Answer()
        started = time.monotonic()
        with InferenceServerClient(self._url) as client:
            client.start_stream(lambda result, error: replies.put((result, error)))
            client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
            while not (answer.is_complete or cancel.is_set()):
                try:
                    result, error = replies.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                if error is not None:
                    raise ChatError(_reason(error))
                assert result is not None, "a reply without error has a result"
                _add(answer, result, started, on_delta)
            client.stop_stream(cancel_requests=not answer.is_complete)
        answer.total_s = time.monotonic() - started
        return answer

    def _input(self, name: str, value: object) -> InferInput:
        datatype = self._inputs.get(name)
        if datatype is None:
            raise ChatError(f"model {self._model!r} has no input {name!r}; it has {', '.join(sorted(self._inputs))}")
        items = value if isinstance(value, list) else [value]
        if datatype == "BYTES":
            items = [str(item).encode() for item in items]
        tensor = InferInput(name, [1, len(items)], datatype)
        tensor.set_data_from_numpy(np.array([items], dtype=_NUMPY_TYPES[datatype]))
        return tensor


def _add(answer: Answer, result: InferResult, started: float, on_delta: Callable[[str], None]) -> None:
    response = result.get_response()
    final = response.parameters.get("triton_final_response")
    answer.is_complete = bool(final and final.bool_param)
    texts = result.as_numpy("text_output")
    if texts is None or texts.size == 0:
        return
    delta = texts.reshape(-1)[0].decode(errors="replace")
    counts = result.as_numpy("num_output_tokens")
    answer.num_tokens += int(counts.reshape(-1)[0]) if counts is not None and counts.size else 1
    if answer.first_token_s is None:
        answer.first_token_s = time.monotonic() - started
    if delta:
        answer.text += delta
        answer.deltas.append(delta)
        on_delta(delta)


def _reason(error: InferenceServerException) -> str:
    return (error.message() or "no reason given").splitlines()[0]
