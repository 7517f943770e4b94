"""Refuses what is declared for clients and not built yet: each feature once, by name, whoever asks for it.

The parsers of preprocessing, the engine and the BLS call it with the inputs of a request. What belongs to a feature
is data (``feature_table``); building a feature takes its rows, or its function here, away.
"""

import math
from collections.abc import Mapping

import numpy as np

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.feature_table import FEATURES, Feature
from backend_engine.triton_io.request_view import Array, OptionReader, Scalar
from backend_engine.triton_io.tensor_rows import BLS, ENGINE, PREPROCESSING

_WHOLE_REQUEST = "context_and_generation"
_BY_MODEL: dict[str, dict[str, Feature]] = {
    ENGINE: {row.name: feature for feature in FEATURES for row in feature.engine},
    PREPROCESSING: {row.name: feature for feature in FEATURES for row in feature.preprocessing},
    BLS: {row.name: feature for feature in FEATURES for row in (*feature.text, *feature.bls_only)},
}


def refuse_features(model: str, inputs: Mapping[str, Array], shown: Mapping[str, str] | None = None) -> None:
    """``InvalidRequestError`` when an input asks for a feature that is not built.

    ``inputs``: of one row on the engine, of the whole request elsewhere. ``shown``: what the client calls an input,
    where that differs.
    """
    features = _BY_MODEL[model]
    for name, values in inputs.items():
        feature = features.get(name)
        if feature is not None and _asks(feature, name, values):
            called = (shown or {}).get(name, name)
            raise InvalidRequestError(f"{called} asks for {feature.name}, not built yet: leave it out")


def _asks(feature: Feature, name: str, values: Array) -> bool:
    if values.size == 0:
        return False
    if name in ("decoder_input_ids", "decoder_input_lengths"):
        # Preprocessing of every generation sends one pad id, and its length, for models that have no decoder prompt.
        return values.size > 1 and name == "decoder_input_ids"
    if values.dtype == np.object_:
        return any(len(value) for value in values.reshape(-1))
    return feature.counts_zero or bool(np.any(values))


def refuse_beams(reader: OptionReader, max_beam_width: int) -> None:
    """Refuse beam widths over 1, and values of the beam fields that are none."""
    reader.boolean("early_stopping")
    for field in ("length_penalty", "beam_search_diversity_rate"):
        value = reader.real(field)
        if value is not None and not math.isfinite(value):
            raise InvalidRequestError(f"{reader.name(field)} {value} is not allowed; it must be a finite number")
    beam_width = reader.integer("beam_width")
    if beam_width is None or beam_width == 1:
        return
    name = reader.name("beam_width")
    if beam_width < 1:
        raise InvalidRequestError(f"{name} {beam_width} is out of range; it must be 1 or more")
    if beam_width > max_beam_width:
        raise InvalidRequestError(
            f"Requested beam width {beam_width} is larger than configured max beam width {max_beam_width}"
        )
    raise InvalidRequestError(f"{name} {beam_width} asks for beam search, not built yet: it must be 1")


def refuse_disaggregation(parameters: Mapping[str, Scalar]) -> None:
    """Refuse the request parameter ``request_type`` unless it asks for a whole request."""
    value = parameters.get("request_type", _WHOLE_REQUEST)
    if value != _WHOLE_REQUEST:
        raise InvalidRequestError(
            f"request_type {str(value)[:64]!r} asks for disaggregated serving, not built yet: it must be "
            f"{_WHOLE_REQUEST!r} or left out"
        )
