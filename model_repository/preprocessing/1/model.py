"""The preprocessing model: prompts, chats and words as text -> token ids. A thin adapter over ``PromptBuilder``."""

import json
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from backend_engine.admission import check_vocabulary
from backend_engine.checkpoint.generation_config import generation_defaults
from backend_engine.checkpoint.open_checkpoint import is_checkpoint, open_checkpoint
from backend_engine.errors import EngineError
from backend_engine.hub import local_path
from backend_engine.logger import get_logger
from backend_engine.text.chat_template import ChatTemplate
from backend_engine.text.tokenizer import check_same_tokenizer, load_tokenizer
from backend_engine.triton_io import parameters, tensor_table
from backend_engine.triton_io.config_completion import complete
from backend_engine.triton_io.parameter_guard import ParameterGuard
from backend_engine.triton_io.prompt_builder import ModelFacts, PromptBuilder
from backend_engine.triton_io.request_view import Array, RequestView
from backend_engine.triton_io.single_response import respond


class TritonPythonModel:
    """One process of the model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what a config of an earlier generation lacks."""
        return complete(tensor_table.PREPROCESSING, auto_complete_model_config)

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the tokenizer; a bad setting or file fails the load with one line."""
        try:
            settings = parameters.read_preprocessing(json.loads(args["model_config"]))
            tokenizer_dir = local_path(settings.tokenizer_dir)
            tokenizer = load_tokenizer(tokenizer_dir, settings.trust_remote_code)
            facts = ModelFacts.of(tokenizer, {}, ())
            model_dir = local_path(settings.model_dir) if settings.model_dir else tokenizer_dir
            check_same_tokenizer(tokenizer, tokenizer_dir, model_dir, settings.trust_remote_code)
            if settings.model_dir or is_checkpoint(model_dir):
                checkpoint = open_checkpoint(model_dir)
                facts = ModelFacts.of(tokenizer, checkpoint.config, generation_defaults(checkpoint).end_ids)
            check_vocabulary(tokenizer, tokenizer_dir, facts.vocab_size)
            self._builder = PromptBuilder(tokenizer, ChatTemplate(tokenizer), facts, settings)
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        names = tensor_table.input_names(tensor_table.ENSEMBLE)
        self._guard = ParameterGuard(names, settings.reject_unknown_parameters, get_logger("preprocessing"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request by itself."""
        return [respond(pb_utils, request, self._compute) for request in requests]

    def _compute(self, view: RequestView) -> Mapping[str, Array]:
        self._guard.check(view)
        return self._builder.build(view.inputs)
