"""The words in which tensors are described: data types, ``TensorRow``, ``ModelTensors``, ``Option``. Data only."""

from typing import NamedTuple

PREPROCESSING = "preprocessing"
ENGINE = "tensorrt_llm"
POSTPROCESSING = "postprocessing"
BLS = "tensorrt_llm_bls"
ENSEMBLE = "ensemble"

BOOL, UINT8, INT32, INT64, UINT64 = "TYPE_BOOL", "TYPE_UINT8", "TYPE_INT32", "TYPE_INT64", "TYPE_UINT64"
FP16, FP32, STRING = "TYPE_FP16", "TYPE_FP32", "TYPE_STRING"
# Chosen when a template is filled.
LOGITS = "${logits_datatype}"
ENCODER_FEATURES = "${encoder_input_features_data_type}"


class TensorRow(NamedTuple):
    """One tensor of one model. ``dims`` leave the batch dimension out; ``reshape``: declared [1], seen as a scalar."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    doc: str
    optional: bool = False
    ragged: bool = False
    reshape: bool = False


class ModelTensors(NamedTuple):
    """Inputs and outputs of one model, in the order in which its config lists them."""

    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]


class Option(NamedTuple):
    """One scalar of a request.

    ``field`` is our name for it, ``token_name`` its input on the engine model and ``text_name`` on the BLS and the
    ensemble; ``None`` = not an input there. ``as_parameter``: may be sent as a request parameter too.
    """

    field: str
    token_name: str | None
    text_name: str | None
    dtype: str
    doc: str
    optional: bool = True
    as_parameter: bool = False


def shared(
    field: str, dtype: str, doc: str, *, name: str | None = None, as_parameter: bool = False, optional: bool = True
) -> Option:
    """An option that both kinds of model call ``name``, or else ``field``."""
    return Option(field, name or field, name or field, dtype, doc, optional, as_parameter)


def required(name: str, dtype: str, dims: tuple[int, ...], doc: str) -> TensorRow:
    """An input that must be sent, or an output."""
    return TensorRow(name, dtype, dims, doc)


def optional(name: str, dtype: str, dims: tuple[int, ...], doc: str) -> TensorRow:
    """An optional input."""
    return TensorRow(name, dtype, dims, doc, optional=True)


def ragged(name: str, dtype: str, dims: tuple[int, ...], doc: str) -> TensorRow:
    """An optional input whose rows Triton Server may batch although their sizes differ."""
    return TensorRow(name, dtype, dims, doc, optional=True, ragged=True)


def scalar_row(name: str, dtype: str, doc: str) -> TensorRow:
    """An optional input declared [1] that the model sees without that dimension."""
    return TensorRow(name, dtype, (1,), doc, optional=True, reshape=True)
