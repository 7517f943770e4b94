"""The templates are what the tensor table says, and the ensemble wires every tensor to its place."""

import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from backend_engine.triton_io import tensor_table as table

ROOT = Path(__file__).parents[2]
FILLED = {
    "max_batch_size": "8", "triton_max_batch_size": "8", "decoupled_mode": "true", "triton_backend": "python",
    "logits_datatype": "TYPE_FP32", "encoder_input_features_data_type": "TYPE_FP16",
}  # fmt: skip
INTERNAL = {"OUT_END_ID": "_PREPROCESSOR_END_ID", "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID"}


def read(model: str) -> model_config_pb2.ModelConfig:
    text = (ROOT / "templates" / model / "config.pbtxt").read_text()
    filled = re.sub(r"\$\{(\w+)\}", lambda match: FILLED.get(match.group(1), "1"), text)
    return text_format.Parse(filled, model_config_pb2.ModelConfig())


def rows(tensors: object) -> list[table.TensorRow]:
    kinds = model_config_pb2.DataType
    return [
        table.TensorRow(
            t.name,
            kinds.Name(t.data_type),
            tuple(t.dims),
            "",
            getattr(t, "optional", False),
            getattr(t, "allow_ragged_batch", False),
            t.HasField("reshape"),
        )
        for t in tensors
    ]


def plain(row: table.TensorRow) -> table.TensorRow:
    """The row as it stands in a filled template."""
    return row._replace(doc="", dtype=re.sub(r"\$\{(\w+)\}", lambda match: FILLED[match.group(1)], row.dtype))


@pytest.mark.parametrize("model", list(table.MODELS))
def test_a_template_declares_the_tensors_of_the_table(model: str) -> None:
    config, expected = read(model), table.MODELS[model]
    assert config.name == model
    assert rows(config.input) == [plain(row) for row in expected.inputs]
    assert rows(config.output) == [plain(row) for row in expected.outputs]


@pytest.mark.parametrize("model", list(table.MODELS))
def test_templates_keep_the_spellings_that_tools_look_for(model: str) -> None:
    lines = (ROOT / "templates" / model / "config.pbtxt").read_text().splitlines()
    assert f'name: "{model}"' in lines
    assert "max_batch_size: ${triton_max_batch_size}" in lines
    decoupled = [line for line in lines if line.strip() == "decoupled: ${decoupled_mode}"]
    assert len(decoupled) == (1 if model in (table.ENGINE, table.BLS) else 0)
    versions = [line for line in lines if line.strip() == "model_version: -1"]
    assert len(versions) == (3 if model == table.ENSEMBLE else 0)


def test_the_engine_answers_in_the_order_that_clients_read_by() -> None:
    names = [row.name for row in table.MODELS[table.ENGINE].outputs]
    assert names[:2] == ["output_ids", "sequence_length"]


def test_the_text_models_take_and_give_the_same() -> None:
    bls, ensemble = table.MODELS[table.BLS], table.MODELS[table.ENSEMBLE]
    assert bls.outputs == ensemble.outputs
    shared = [row._replace(reshape=False) for row in bls.inputs[: len(ensemble.inputs)]]
    assert shared == list(ensemble.inputs)
    assert {row.name for row in bls.inputs[len(ensemble.inputs) :]} == {
        "num_draft_tokens",
        "use_draft_logits",
        "image_input",
    }


@pytest.mark.parametrize("model", [table.ENGINE, table.BLS, table.ENSEMBLE])
def test_both_spellings_of_renamed_fields_are_declared(model: str) -> None:
    names = table.input_names(model)
    assert {"min_length", "min_tokens", "random_seed", "seed"} <= set(names)
    assert {"return_perf_metrics", "return_kv_cache_reuse_stats"} <= set(names)
    assert {"return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output"} <= set(names)
    assert len(names) == len(set(names))


def test_the_ensemble_wires_every_input_and_output() -> None:
    config = read(table.ENSEMBLE)
    pre, engine, post = config.ensemble_scheduling.step
    assert [s.model_name for s in (pre, engine, post)] == [table.PREPROCESSING, table.ENGINE, table.POSTPROCESSING]
    assert dict(pre.input_map) == {name: text for text, name in table.PREPROCESSING_FROM_TEXT.items()}
    between = {name: INTERNAL.get(name, f"_{name}") for name in table.ENGINE_FROM_PREPROCESSING}
    assert dict(pre.output_map) == between
    expected = {engine_name: between[name] for name, engine_name in table.ENGINE_FROM_PREPROCESSING.items()}
    assert dict(engine.input_map) == expected | {name: text for text, name in table.engine_from_text().items()}
    answers = {name: f"_{post_name}" for name, post_name in table.POSTPROCESSING_FROM_ENGINE.items()}
    assert dict(post.input_map) == {name: f"_{name}" for name in table.POSTPROCESSING_FROM_ENGINE.values()}
    results = {row.name: row.name for row in table.MODELS[table.ENSEMBLE].outputs if row.name != "text_output"}
    assert dict(engine.output_map) == results | answers
    assert dict(post.output_map) == {"OUTPUT": "text_output"}
    used = {value for step in (pre, engine, post) for value in step.input_map.values()}
    assert {row.name for row in table.MODELS[table.ENSEMBLE].inputs} <= used


def test_each_wired_pair_has_one_type() -> None:
    engine = {row.name: row.dtype for row in table.MODELS[table.ENGINE].inputs}
    pre_out = {row.name: row.dtype for row in table.MODELS[table.PREPROCESSING].outputs}
    pre_in = {row.name: row.dtype for row in table.MODELS[table.PREPROCESSING].inputs}
    text = {row.name: row.dtype for row in table.MODELS[table.ENSEMBLE].inputs}
    assert all(pre_out[a] == engine[b] for a, b in table.ENGINE_FROM_PREPROCESSING.items())
    assert all(text[a] == pre_in[b] for a, b in table.PREPROCESSING_FROM_TEXT.items())
    engine_out = {row.name: row.dtype for row in table.MODELS[table.ENGINE].outputs}
    post_in = {row.name: row.dtype for row in table.MODELS[table.POSTPROCESSING].inputs}
    assert all(engine_out[a] == post_in[b] for a, b in table.POSTPROCESSING_FROM_ENGINE.items())
    assert all(text[a] == engine[b] for a, b in table.engine_from_text().items())
