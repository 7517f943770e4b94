"""The engine model: token ids in, token ids and text out. A thin adapter over ``LLM``.

``execute`` hands requests over and returns; the sender thread answers them. Works decoupled and not.
"""

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from backend_engine import envs
from backend_engine.errors import EngineError
from backend_engine.logger import get_logger
from backend_engine.triton_io import parameters
from backend_engine.triton_io.config_completion import complete
from backend_engine.triton_io.engine_request import EngineRequest, NextPieceRequest, StopRequest
from backend_engine.triton_io.error_codes import INTERNAL, INTERNAL_ERROR_TEXT, code_of
from backend_engine.triton_io.health import EngineHealth
from backend_engine.triton_io.metrics import EngineMetrics
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.request_parser import RequestParser
from backend_engine.triton_io.request_view import RequestView
from backend_engine.triton_io.response_sender import ResponseSenderThread, SenderSettings
from backend_engine.triton_io.response_stream import refuse
from backend_engine.triton_io.server_process import allows_unloading, honour_python_path
from backend_engine.triton_io.tensor_rows import ENGINE

_log = get_logger("tensorrt_llm")


class TritonPythonModel:
    """One engine in one process."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what a config of an earlier generation lacks."""
        return complete(ENGINE, auto_complete_model_config)

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the model and start the engine; a bad setting or file fails the load with one line."""
        config = json.loads(args["model_config"])
        try:
            settings = parameters.read_engine(config)
            honour_python_path()
            from backend_engine.llm import LLM  # torch is loaded here, once the settings are known to be good

            llm = LLM(settings.model_dir, settings.tokenizer_dir, **settings.llm_arguments)
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._llm = llm
        self._parser = RequestParser(
            settings.defaults,
            llm.limits.vocab_size,
            llm.limits.max_seq_len,
            decoupled=pb_utils.using_decoupled_model_transaction_policy(config),
            reject_unknown=settings.reject_unknown_parameters,
        )
        metrics = EngineMetrics(pb_utils, args["model_name"], args["model_version"], llm.stats)
        self._sender = ResponseSenderThread(
            llm,
            SenderSettings(
                settings.cancellation_check_period_ms, settings.stats_check_period_ms, envs.ENGINE_DRAIN_FILE.get()
            ),
            metrics.refresh,
        )
        self._sender.start()
        self._health = EngineHealth(
            pb_utils, args["model_name"], llm.stats, envs.ENGINE_HEALTH_FILE.get(), may_unload=allows_unloading()
        )
        self._health.start()

    def execute(self, requests: list[Any]) -> None:
        """Take the requests; what cannot be parsed is answered at once, by itself."""
        for request in requests:
            self._take(request)

    def finalize(self) -> None:
        """End every request with a final response, then stop the threads."""
        self._health.close()
        self._llm.shutdown()
        self._sender.close()

    def _take(self, request: Any) -> None:
        view = RequestView.of(request)
        reply = Reply(pb_utils, request.get_response_sender(), view.requested_outputs)
        try:
            self._hand_over(self._parser.parse(view), reply)
        except EngineError as error:
            refuse(reply, view, code_of(error), str(error))
        except Exception:  # border: one request; log once, answer, go on
            _log.exception("a request could not be taken")
            refuse(reply, view, INTERNAL, INTERNAL_ERROR_TEXT)

    def _hand_over(self, parsed: EngineRequest | StopRequest | NextPieceRequest, reply: Reply) -> None:
        if isinstance(parsed, StopRequest):
            self._sender.stop(parsed)
            reply.send({}, final=True)
        elif isinstance(parsed, NextPieceRequest):
            self._sender.next_piece(parsed, reply)
        else:
            self._sender.submit(parsed, reply)
