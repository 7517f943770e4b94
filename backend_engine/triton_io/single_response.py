"""One request, one response: how preprocessing and postprocessing answer.

Called by their adapters' ``execute``. An error answers its own request only, with a message of one line.
"""

from collections.abc import Callable, Mapping
from typing import Any

from backend_engine.errors import EngineError
from backend_engine.logger import get_logger
from backend_engine.triton_io.error_codes import INTERNAL, INTERNAL_ERROR_TEXT, code_of, one_line, triton_error
from backend_engine.triton_io.request_view import Array, RequestView
from backend_engine.triton_io.response_builder import string_array

_log = get_logger(__name__)

IN_BAND = "RETURN_ERRORS_IN_BAND"


def respond(pb_utils: Any, request: Any, compute: Callable[[RequestView], Mapping[str, Array]]) -> Any:
    """An ``InferenceResponse`` with what ``compute`` returns, or with its error.

    The error goes into the tensors ERROR and ERROR_CODE when the request asks so, for a BLS call would lose its class.
    """
    in_band = False
    try:
        view = RequestView.of(request)
        in_band = IN_BAND in view.inputs and bool(view.inputs[IN_BAND].any())
        tensors = compute(view)
    except EngineError as error:
        return _failure(pb_utils, code_of(error), str(error), in_band)
    except Exception:  # border: one request; log once, answer, go on
        _log.exception("a request failed")
        return _failure(pb_utils, INTERNAL, INTERNAL_ERROR_TEXT, in_band)
    wanted = view.requested_outputs
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor(name, values) for name, values in tensors.items() if not wanted or name in wanted
        ]
    )


def _failure(pb_utils: Any, code: str, message: str, in_band: bool) -> Any:
    if not in_band:
        return pb_utils.InferenceResponse(output_tensors=[], error=triton_error(pb_utils, code, message))
    tensors = {"ERROR": string_array(one_line(message)), "ERROR_CODE": string_array(code)}
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, values) for name, values in tensors.items()]
    )
