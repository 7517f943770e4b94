"""What is declared and not built: each input of each feature is refused by name, unless it asks for nothing."""

from typing import Any

import numpy as np
import pytest

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io import tensor_table as table
from backend_engine.triton_io.feature_table import FEATURES, Feature
from backend_engine.triton_io.tensor_rows import TensorRow
from backend_engine.triton_io.unbuilt import refuse_disaggregation, refuse_features

KINDS: dict[str, Any] = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_STRING": np.object_,
}  # fmt: skip
ROWS = [
    (model, feature, row)
    for feature in FEATURES
    for model, rows in (
        (table.ENGINE, feature.engine),
        (table.PREPROCESSING, feature.preprocessing),
        (table.BLS, (*feature.text, *feature.bls_only)),
    )
    for row in rows
    if row.name != "decoder_input_lengths"
]


def tensor(row: TensorRow, value: Any) -> np.ndarray:
    shape = [1, *(2 if size < 0 else size for size in row.dims)]
    kind = KINDS.get(row.dtype, np.float32)
    if kind is np.object_:
        return np.full(shape, b"" if not value else b"x", dtype=object)
    return np.full(shape, value).astype(kind)


def named(rows: list[tuple[str, Feature, TensorRow]]) -> Any:
    return pytest.mark.parametrize(("model", "feature", "row"), rows, ids=[f"{m}-{r.name}" for m, _, r in rows])


@named(ROWS)
def test_using_a_feature_is_refused_by_its_name_and_the_inputs(model: str, feature: Feature, row: TensorRow) -> None:
    with pytest.raises(InvalidRequestError, match=f"{row.name} asks for {feature.name}, not built yet"):
        refuse_features(model, {row.name: tensor(row, 3)})
    with pytest.raises(InvalidRequestError, match="shown_name asks"):
        refuse_features(model, {row.name: tensor(row, 3)}, {row.name: "shown_name"})


@named(ROWS)
def test_an_empty_input_asks_for_nothing(model: str, feature: Feature, row: TensorRow) -> None:
    refuse_features(model, {row.name: tensor(row, 1).reshape(1, -1)[:, :0]})
    if feature.counts_zero:
        with pytest.raises(InvalidRequestError):
            refuse_features(model, {row.name: tensor(row, 0)})
    elif row.name != "decoder_input_ids":
        refuse_features(model, {row.name: tensor(row, 0)})


def test_the_pad_id_that_preprocessing_sends_for_a_decoder_is_no_decoder_prompt() -> None:
    ids = np.array([[2]], np.int32)
    refuse_features(table.ENGINE, {"decoder_input_ids": ids, "decoder_input_lengths": np.array([1], np.int32)})
    with pytest.raises(InvalidRequestError, match="encoder-decoder"):
        refuse_features(table.ENGINE, {"decoder_input_ids": np.array([[2, 5]], np.int32)})


def test_only_whole_requests_are_served() -> None:
    refuse_disaggregation({})
    refuse_disaggregation({"request_type": "context_and_generation"})
    for kind in ("context_only", "generation_only", "", 3):
        with pytest.raises(InvalidRequestError, match=r"request_type .* asks for disaggregated serving"):
            refuse_disaggregation({"request_type": kind})


def test_every_feature_input_is_declared() -> None:
    for model, _, row in ROWS:
        declared = next(found for found in table.MODELS[model].inputs if found.name == row.name)
        assert declared._replace(reshape=row.reshape) == row
    ensemble = {row.name for row in table.MODELS[table.ENSEMBLE].inputs}
    assert {row.name for feature in FEATURES for row in feature.text} <= ensemble
