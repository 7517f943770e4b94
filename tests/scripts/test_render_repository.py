"""Whole-repository rendering: every value reads back as it was given, and nothing unknown or unfilled gets through."""

from pathlib import Path

import pytest
from fill_template import command_line
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ADAPTERS, TEMPLATES
from render_repository import RenderError, parse_settings, placeholders, render_repository, render_template
from tritonclient.grpc.model_config_pb2 import ModelConfig

ENGINE = """# the engine: $comment ${in_a_comment}
name: "tensorrt_llm"
backend: "${triton_backend}"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
output [{ name: "logits" data_type: ${logits_datatype} dims: [-1] }]
parameters: { key: "gpt_model_path" value: { string_value: "${engine_dir}" } }
parameters: { key: "single" value: { string_value: '${single_quoted}' } }
parameters: { key: "mixed" value: { string_value: "a ${mixed} z" } }
parameters: { key: "price" value: { string_value: "$$5" } }
"""
POSTPROCESSING = """name: "postprocessing"
backend: "python"
instance_group [{ count: ${postprocessing_instance_count} kind: KIND_CPU }]
parameters: { key: "tokenizer_dir" value: { string_value: "${tokenizer_dir}" } }
parameters: { key: "skip_special_tokens" value: { string_value: "${skip_special_tokens}" } }
"""
AWKWARD = [
    "/a b:c,d=1",
    "$5",
    "",
    "${not_a_placeholder}",
    "$$",
    'it\'s "quoted"',
    "back\\slash\\",
    "two\nlines\r\n\ttab",
    "\x01\x7f\x1b",
    "# no comment",
    "🦙 café ▁",
    "{key: 1}",
    "\\n",
]


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Templates of two models, and adapters of which only the engine has one."""
    templates, adapters = tmp_path / "templates", tmp_path / "adapters"
    for name, text in (("tensorrt_llm", ENGINE), ("postprocessing", POSTPROCESSING)):
        (templates / name).mkdir(parents=True)
        (templates / name / "config.pbtxt").write_text(text)
    (adapters / "tensorrt_llm" / "1" / "__pycache__").mkdir(parents=True)
    (adapters / "tensorrt_llm" / "1" / "model.py").write_text("# adapter\n")
    (adapters / "tensorrt_llm" / "1" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"")
    return templates, adapters


def read(path: Path) -> ModelConfig:
    return text_format.Parse(path.read_text(), ModelConfig())


def parameter(config: ModelConfig, key: str) -> str:
    return str(config.parameters[key].string_value)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_defaults_model_folder_and_adapters(sources: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert render_repository(out, {}, Path("/models/my model"), *sources) == ["postprocessing", "tensorrt_llm"]
    engine, post = read(out / "tensorrt_llm/config.pbtxt"), read(out / "postprocessing/config.pbtxt")
    assert engine.backend == "python"
    assert engine.max_batch_size == 8
    assert engine.model_transaction_policy.decoupled
    assert engine.output[0].data_type == 11  # TYPE_FP32
    assert parameter(engine, "gpt_model_path") == "/models/my model"
    assert parameter(engine, "price") == "$5"
    assert parameter(engine, "single") == ""
    assert parameter(post, "tokenizer_dir") == "/models/my model"
    assert parameter(post, "skip_special_tokens") == ""
    assert post.instance_group[0].count == 1
    assert (out / "tensorrt_llm/1/model.py").read_text() == "# adapter\n"
    assert list((out / "postprocessing/1").iterdir()) == []
    assert not list(out.rglob("*.pyc"))
    assert not any("${" in path.read_text() for path in out.rglob("config.pbtxt"))


@pytest.mark.parametrize("value", AWKWARD)
def test_awkward_values_read_back(sources: tuple[Path, Path], tmp_path: Path, value: str) -> None:
    given_values = {"engine_dir": value, "single_quoted": value, "mixed": value, "tokenizer_dir": value}
    render_repository(tmp_path / "out", given_values, None, *sources)
    engine = read(tmp_path / "out/tensorrt_llm/config.pbtxt")
    assert parameter(engine, "gpt_model_path") == value
    assert parameter(engine, "single") == value
    assert parameter(engine, "mixed") == f"a {value} z"
    assert parameter(read(tmp_path / "out/postprocessing/config.pbtxt"), "tokenizer_dir") == value


@given(value=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_reads_back(value: str) -> None:
    for quote in "\"'":
        text = f"parameters: {{ key: {quote}k{quote} value: {{ string_value: {quote}${{v}}{quote} }} }}"
        config = text_format.Parse(render_template(text, {"v": value}, "m"), ModelConfig())
        assert config.parameters["k"].string_value.encode() == value.encode()


def test_twice_gives_the_same_files_and_leaves_the_sources(sources: tuple[Path, Path], tmp_path: Path) -> None:
    out, before = tmp_path / "out", files(sources[0])
    render_repository(out, {"mixed": "x"}, Path("/m"), *sources)
    first = files(out)
    render_repository(out, {"mixed": "x"}, Path("/m"), *sources)
    assert files(out) == first
    assert files(sources[0]) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"skip_special_token": "1"}, "unknown setting 'skip_special_token'; did you mean skip_special_tokens"),
        ({"zzz": "1"}, "unknown setting 'zzz'; known: decoupled_mode, engine_dir"),
        ({"in_a_comment": "1"}, "unknown setting 'in_a_comment'"),
        ({"triton_max_batch_size": "many"}, "triton_max_batch_size='many' is not allowed; use a whole number"),
        ({"triton_max_batch_size": ""}, "triton_max_batch_size='' is not allowed"),
        ({"triton_max_batch_size": "8 } evil {"}, "is not allowed"),
        ({"decoupled_mode": "maybe"}, "decoupled_mode='maybe' is not allowed; use true or false"),
        ({"logits_datatype": "FP32"}, "logits_datatype='FP32' is not allowed; use TYPE_FP16 or TYPE_FP32"),
        ({"postprocessing_instance_count": "0"}, "postprocessing_instance_count='0' is not allowed"),
        (
            {"postprocessing_instance_count": "4"},
            "postprocessing_instance_count=4 is not allowed with decoupled_mode:true",
        ),
        ({"mixed": "\udcff"}, "is not valid UTF-8"),
    ],
)
def test_refusals_name_key_and_value(
    sources: tuple[Path, Path], tmp_path: Path, values: dict[str, str], message: str
) -> None:
    with pytest.raises(RenderError) as error:
        render_repository(tmp_path / "out", values, Path("/m"), *sources)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_several_postprocessing_instances_are_fine_without_streaming(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    render_repository(
        tmp_path / "out", {"postprocessing_instance_count": "4", "decoupled_mode": "False"}, Path("/m"), *sources
    )
    assert read(tmp_path / "out/postprocessing/config.pbtxt").instance_group[0].count == 4


def test_all_problems_are_named_at_once(sources: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RenderError) as error:
        render_repository(tmp_path / "out", {"zz": "1", "decoupled_mode": "x"}, None, *sources)
    assert len(str(error.value).splitlines()) == 2
    with pytest.raises(RenderError) as error:
        render_repository(tmp_path / "out", {}, None, *sources)
    assert "postprocessing: no value for tokenizer_dir" in str(error.value)
    assert "tensorrt_llm: no value for engine_dir" in str(error.value)


def test_unquoted_placeholder_without_default_is_named() -> None:
    with pytest.raises(RenderError, match="m: no value for gadget_count; give --set gadget_count:VALUE"):
        render_template("max_batch_size: ${gadget_count}", {}, "m")


@pytest.mark.parametrize("text", ["x: ${a-b}", 'x: "${"', "x: $", 'x: "${}"', "x: ${open"])
def test_a_dollar_that_is_no_placeholder_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match="is no placeholder"):
        render_template(text, {}, "m")


def test_invalid_template_is_refused_by_model(sources: tuple[Path, Path], tmp_path: Path) -> None:
    (sources[0] / "postprocessing/config.pbtxt").write_text('nome: "x"')
    with pytest.raises(RenderError, match=r"postprocessing: the rendered config.pbtxt is not valid.*nome"):
        render_repository(tmp_path / "out", {}, Path("/m"), *sources)


def test_retired_keys_are_ignored_with_one_line(
    sources: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    render_repository(tmp_path / "out", {"tokenizer_type": "llama"}, Path("/m"), *sources)
    assert capsys.readouterr().err == "note: tokenizer_type has no effect any more and is ignored\n"


@pytest.mark.parametrize(
    ("items", "message"),
    [(["a"], "--set 'a' is not allowed"), ([":x"], "':x' is not allowed"), (["a:1", "a:2"], "a is given twice")],
)
def test_settings_that_are_no_pair_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(RenderError, match=message):
        parse_settings(items)


def test_settings_split_at_the_first_colon() -> None:
    assert parse_settings(["a:b:c,d=1", "e:", "a:b:c,d=1"]) == {"a": "b:c,d=1", "e": ""}


def test_no_templates_is_told(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="no templates in"):
        render_repository(tmp_path / "out", {}, None, tmp_path, tmp_path)


def test_the_products_own_templates_render(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--repository", str(tmp_path), "--model-dir", "/m", "--set", "triton_max_batch_size:3"]
    assert command_line(arguments) == 0
    expected = sorted(path.parent.name for path in TEMPLATES.glob("*/config.pbtxt"))
    assert expected == ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"]
    for model in expected:
        config = read(tmp_path / model / "config.pbtxt")
        assert (config.name, config.max_batch_size) == (model, 3)
        assert (tmp_path / model / "1").is_dir()
        assert (tmp_path / model / "1/model.py").exists() == (ADAPTERS / model / "1/model.py").exists()
    known = {name for path in TEMPLATES.glob("*/config.pbtxt") for name in placeholders(path.read_text())}
    assert {"tokenizer_dir", "engine_dir", "triton_max_batch_size", "decoupled_mode"} <= known
