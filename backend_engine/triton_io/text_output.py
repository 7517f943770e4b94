"""What postprocessing does: token ids -> text, or the text that the engine has already made, handed through.

Used by the postprocessing adapter. It sees one response at a time and keeps nothing, which is why the engine makes
the text where it can. Knows nothing of Triton Server.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.error_codes import ModelCallError
from backend_engine.triton_io.request_view import Array, first_text


class TextDecoder(Protocol):
    """What is needed of ``backend_engine.text.tokenizer.Tokenizer``."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


def texts(inputs: Mapping[str, Array], tokenizer: TextDecoder, skip_special_tokens: bool) -> Array:
    """The texts of one response, flat ``[batch * beams]``.

    ``TOKENS_BATCH`` ``[B, beams, n]``; each beam is cut to its ``SEQUENCE_LENGTH`` ``[B, beams]``. ``TEXT``, when
    present, is taken as it is, and ``ERROR`` is raised as ``ModelCallError``: Triton Server loses pieces that are still
    here, and leaks the request, when an engine inside an ensemble sends an error after them. ``InvalidRequestError``
    names the tensor whose shape does not fit.
    """
    if "ERROR" in inputs:
        raise ModelCallError(first_text(inputs, "ERROR_CODE"), first_text(inputs, "ERROR"))
    ready = inputs.get("TEXT")
    if ready is not None:
        return ready.reshape(-1).astype(np.object_)
    tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
    if tokens.ndim < 2:
        raise InvalidRequestError(f"TOKENS_BATCH must be [batch, beams, n], got shape {list(tokens.shape)}")
    beams = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])  # -1 cannot stand beside 0 ids
    if lengths.size != len(beams):
        raise InvalidRequestError(f"SEQUENCE_LENGTH has {lengths.size} values; TOKENS_BATCH has {len(beams)} beams")
    decoded = [
        tokenizer.decode([int(i) for i in ids[: max(0, int(length))] if i >= 0], skip_special_tokens)
        for ids, length in zip(beams, lengths.reshape(-1), strict=True)
    ]
    return np.array([text.encode("utf-8", "replace") for text in decoded], dtype=np.object_)
