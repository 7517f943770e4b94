"""The postprocessing model: token ids -> text, or the engine's text handed through. A thin adapter over ``texts``."""

import json
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from backend_engine.errors import EngineError
from backend_engine.hub import local_path
from backend_engine.text.tokenizer import load_tokenizer
from backend_engine.triton_io import parameters
from backend_engine.triton_io.config_completion import complete
from backend_engine.triton_io.request_view import Array, RequestView
from backend_engine.triton_io.single_response import respond
from backend_engine.triton_io.tensor_rows import POSTPROCESSING
from backend_engine.triton_io.text_output import texts


class TritonPythonModel:
    """The one process of the model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what a config of an earlier generation lacks."""
        return complete(POSTPROCESSING, auto_complete_model_config)

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the tokenizer; a bad setting or file fails the load with one line."""
        try:
            settings = parameters.read_postprocessing(json.loads(args["model_config"]))
            self._tokenizer = load_tokenizer(local_path(settings.tokenizer_dir), settings.trust_remote_code)
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._skip_special_tokens = settings.skip_special_tokens

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request by itself, in order."""
        return [respond(pb_utils, request, self._compute) for request in requests]

    def _compute(self, view: RequestView) -> Mapping[str, Array]:
        return {"OUTPUT": texts(view.inputs, self._tokenizer, self._skip_special_tokens)}
