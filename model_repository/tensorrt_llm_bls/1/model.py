"""The BLS model: text in, text out, by calls of preprocessing and of the engine. A thin adapter over ``BlsService``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from backend_engine.errors import EngineError
from backend_engine.triton_io import parameters
from backend_engine.triton_io.bls_flow import BlsFlow, ModelResponse
from backend_engine.triton_io.bls_service import BlsService
from backend_engine.triton_io.request_view import Array


def call_model(
    model: str, inputs: Mapping[str, Array], outputs: Sequence[str], request_id: str
) -> Iterator[ModelResponse]:
    """Call a model of this server; blocks the thread until each next response is there. Never raises."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[pb_utils.Tensor(name, values) for name, values in inputs.items()],
        requested_output_names=list(outputs),
    )
    try:
        for response in request.exec(decoupled=True):
            if response.has_error():
                yield ModelResponse({}, response.error().message())
            else:
                yield ModelResponse({tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()})
    except pb_utils.TritonModelException as error:
        yield ModelResponse({}, str(error))


class TritonPythonModel:
    """One process, which works on many requests at once."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Start the threads; a bad setting fails the load with one line."""
        config = json.loads(args["model_config"])
        try:
            settings = parameters.read_bls(config)
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._service = BlsService(BlsFlow(call_model, settings), pb_utils, settings, decoupled=decoupled)

    def execute(self, requests: list[Any]) -> None:
        """Take the requests; they are answered from other threads."""
        for request in requests:
            self._service.submit(request)

    def finalize(self) -> None:
        """End what is running."""
        self._service.close()
