"""The BLS model: text in, text out, by calls of preprocessing and of the engine. A thin adapter over ``BlsService``."""

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from backend_engine.errors import EngineError
from backend_engine.triton_io import parameters
from backend_engine.triton_io.bls_flow import BlsFlow
from backend_engine.triton_io.bls_service import BlsService
from backend_engine.triton_io.config_completion import complete
from backend_engine.triton_io.model_caller import ModelCaller
from backend_engine.triton_io.tensor_rows import BLS


class TritonPythonModel:
    """One process, which works on many requests at once."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what a config of an earlier generation lacks."""
        return complete(BLS, auto_complete_model_config)

    def initialize(self, args: dict[str, Any]) -> None:
        """Start the threads; a bad setting fails the load with one line."""
        config = json.loads(args["model_config"])
        try:
            settings = parameters.read_bls(config)
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._caller = ModelCaller(pb_utils)
        self._service = BlsService(BlsFlow(self._caller, settings), pb_utils, settings, decoupled=decoupled)

    def execute(self, requests: list[Any]) -> None:
        """Take the requests; they are answered from other threads."""
        for request in requests:
            self._service.submit(request)

    def finalize(self) -> None:
        """End what is running."""
        self._service.close()
        self._caller.close()
