"""Engine folders: what is built loads again, bit for bit, whatever the family, the form of the weights and the number
of ranks; limits; interrupted builds; folders that were moved, changed, or made by somebody else.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine import LLM, BuildConfig, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.builder.engine_builder import build_engine
from backend_engine.config.engine_files import entry_of
from backend_engine.config.engine_manifest import ENGINE_FILE, EngineManifest, PartForm, manifest_text, read_manifest
from backend_engine.errors import ConfigError, InvalidRequestError, ModelLoadError
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.model_engine.model_loader import load_model, plan_memory
from backend_engine.model_engine.weight_memory import weight_bytes
from backend_engine.plugins.catalog import ARCHITECTURES
from tests.checkpoints import test_packed_loading as float8
from tests.support.engine_driver import EngineDriver
from tests.support.parity import prompt
from tests.support.tiny_gguf import build_tiny, packed_as, write_gguf
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import TINY_MODELS, build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"kv_cache_config": KvCacheConfig(max_tokens=4096), "skip_tokenizer_init": True}


def is_recurrent(name: str) -> bool:
    row = TINY_MODELS[name]
    spec = ARCHITECTURES.get(row.architecture).from_hf(json.loads(row.config().to_json_string()))
    return any(isinstance(layer.mixer, Mamba2Decl) for layer in spec.layers)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """Of a prompt in two chunks and the tokens after it."""
    driver = EngineDriver(folder, **options)
    request = driver.add(1, prompt(13))
    driver.step([(request, 5)])
    driver.step([(request, 8)])
    driver.step(generation=[request])
    return torch.stack(driver.logits[1])


def check_same(source: Path, engine: Path, **options: Any) -> None:
    expected, found = logits(source, **options), logits(engine, **options)
    assert torch.equal(found, expected), (found - expected).abs().max()


def edit(folder: Path, change: Callable[[EngineManifest], EngineManifest]) -> None:
    """Write another engine.json, as somebody who knows how its checksum is made."""
    manifest = change(read_manifest(folder))
    files = {name: entry_of(folder / name) for name in manifest.files}
    (folder / ENGINE_FILE).write_text(manifest_text(dataclasses.replace(manifest, files=files)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama; read only."""
    folder = tmp_path_factory.mktemp("llama")
    build_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def llama_engine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine folder; read only."""
    folder = tmp_path_factory.mktemp("engines") / "llama"
    build_engine(llama, folder)
    return folder


@pytest.fixture
def engine(llama_engine: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(llama_engine, tmp_path / "engine"))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_answers_as_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path / "source")
    build_engine(tmp_path / "source", tmp_path / "engine")
    check_same(tmp_path / "source", tmp_path / "engine")


DIVIDED = [name for name in TINY_MODELS if not is_recurrent(name)]


@pytest.mark.parametrize("name", DIVIDED)
def test_weights_of_several_ranks_are_put_together(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path / "source")
    build = BuildConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    build_engine(tmp_path / "source", tmp_path / "engine", build)
    assert len(list((tmp_path / "engine").glob("rank*.safetensors"))) == 4
    check_same(tmp_path / "source", tmp_path / "engine")


def test_groups_of_columns_are_not_divided(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    float8.export(tmp_path / "source")
    message = "tensor_parallel_size 2 cannot divide layers.0.mlp.down_proj.weight: columns 0 to 56 of 112 begin or end"
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_engine(tmp_path / "source", tmp_path / "engine", BuildConfig(tensor_parallel_size=2))
    assert not (tmp_path / "engine").exists()


def test_recurrent_layers_are_divided_into_stages_only(tmp_path: Path) -> None:
    build_tiny_model("mamba2", tmp_path / "source")
    build_engine(tmp_path / "source", tmp_path / "engine", BuildConfig(pipeline_parallel_size=2))
    check_same(tmp_path / "source", tmp_path / "engine")
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: recurrent layers are not divided; use 1"):
        build_engine(tmp_path / "source", tmp_path / "other", BuildConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("left", ["nothing", "k_proj"])
def test_packed_weights_keep_their_form(ranks: tuple[int, int], left: str, tmp_path: Path) -> None:
    """With a plain part beside packed ones too."""
    source = tmp_path / "source"
    source.mkdir()
    float8.export(source, lambda name: left in name, tie_word_embeddings=True, intermediate_size=128)
    build = BuildConfig(tensor_parallel_size=ranks[0], pipeline_parallel_size=ranks[1])
    build_engine(source, tmp_path / "engine", build)
    check_same(source, tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")
    forms = {part.scheme["scheme"] for parts in manifest.packed.values() for part in parts}
    assert forms == ({"float8"} if left == "nothing" else {"float8", "plain"})
    taken = [weight_bytes(load_model(path, "float32", "cpu").model) for path in (source, tmp_path / "engine")]
    assert taken[0] == taken[1]
    plan = plan_memory(tmp_path / "engine", "float32", "cpu")
    assert plan is not None and plan.num_bytes == taken[1]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_gguf_file_becomes_an_engine_folder(tp: int, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType as Type

    (tmp_path / "source").mkdir()
    build_tiny("llama", tmp_path / "source", Type.Q4_0)
    path = write_gguf(tmp_path / "source", tmp_path / "model.gguf", packed_as(Type.Q4_0))
    build_engine(path, tmp_path / "engine", BuildConfig(tensor_parallel_size=tp))
    packed = read_manifest(tmp_path / "engine").packed
    assert {part.scheme["scheme"] for parts in packed.values() for part in parts} == {"groupwise_int"}
    check_same(path, tmp_path / "engine")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_precision_is_that_of_plain_weights(precision: str, llama: Path, tmp_path: Path) -> None:
    build_engine(llama, tmp_path / "engine", BuildConfig(precision=precision))
    stored = load_file(tmp_path / "engine" / "rank0-00001.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, precision)}
    check_same(llama, tmp_path / "engine", dtype=precision)
    assert torch.allclose(logits(tmp_path / "engine"), logits(llama), atol=0.4)


def test_an_engine_folder_is_built_into_another(llama: Path, llama_engine: Path, tmp_path: Path) -> None:
    build_engine(llama_engine, tmp_path / "two", BuildConfig(tensor_parallel_size=2))
    build_engine(tmp_path / "two", tmp_path / "one")
    check_same(llama, tmp_path / "one")
    stored = [load_file(folder / "rank0-00001.safetensors") for folder in (llama_engine, tmp_path / "one")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


def test_all_files_have_the_same_mode(llama_engine: Path) -> None:
    """Those of weights too, which others of a group may have to read."""
    assert len({path.stat().st_mode for path in llama_engine.iterdir()}) == 1


def test_a_folder_that_was_moved_loads(llama: Path, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "else where").mkdir()
    moved = engine.rename(tmp_path / "else where" / "moved")
    check_same(llama, moved)


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_byte_in_any_file_is_refused(where: str, engine: Path) -> None:
    for name in names_of(engine):
        whole = (engine / name).read_bytes()
        data = bytearray(whole)
        data[{"first": 0, "middle": len(data) // 2, "last": -1}[where]] ^= 1
        (engine / name).write_bytes(data)
        with pytest.raises(ModelLoadError) as error:
            load_model(engine, "float32", "cpu")
        assert name in str(error.value) and "\n" not in str(error.value)
        (engine / name).write_bytes(whole)
    load_model(engine, "float32", "cpu")


def test_a_cut_off_missing_or_additional_file_is_refused(engine: Path) -> None:
    for name in names_of(engine):
        whole = (engine / name).read_bytes()
        for spoil in (lambda path: path.unlink(), lambda path: os.truncate(path, path.stat().st_size - 1)):
            spoil(engine / name)
            with pytest.raises(ModelLoadError, match=name if name != ENGINE_FILE else str(engine)):
                load_model(engine, "float32", "cpu")
            (engine / name).write_bytes(whole)
    (engine / "modeling_llama.py").write_text("raise SystemExit")
    with pytest.raises(ModelLoadError, match=r"modeling_llama\.py, which engine\.json does not list"):
        load_model(engine, "float32", "cpu")


def test_limits_of_the_build_are_those_of_the_run_unless_smaller(llama: Path, tmp_path: Path) -> None:
    build = BuildConfig(max_batch_size=4, max_input_len=20, max_seq_len=64, max_num_tokens=48)
    build_engine(llama, tmp_path / "engine", build)
    with LLM(str(tmp_path / "engine"), **SMALL) as llm:
        scheduler = llm.config.scheduler
        assert (scheduler.max_batch_size, scheduler.max_num_tokens) == (4, 48)
        assert (llm.config.max_input_len, llm.config.max_seq_len) == (20, 64)
        assert len(llm.generate([5] * 20, SamplingParams(max_tokens=3, ignore_eos=True)).outputs[0].token_ids) == 3
        with pytest.raises(InvalidRequestError, match=r"Prompt length \(21\) exceeds maximum input length \(20\)"):
            llm.generate([5] * 21)
    with LLM(str(tmp_path / "engine"), max_batch_size=2, max_seq_len=16, max_num_tokens=8, **SMALL) as llm:
        assert (llm.config.max_input_len, llm.config.scheduler.max_batch_size) == (15, 2)
    for name, value, most in (
        ("max_batch_size", 5, 4), ("max_input_len", 21, 20), ("max_seq_len", 65, 64), ("max_num_tokens", 49, 48),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name} {value} is more than .* was built for; use {most} or less"):
            LLM(str(tmp_path / "engine"), **{name: value}, **SMALL)
    with pytest.raises(ConfigError, match="max_batch_size 8 is more than"):
        LLM(str(tmp_path / "engine"), scheduler_config=SchedulerConfig(max_batch_size=8), **SMALL)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (BuildConfig(max_seq_len=1000), "max_seq_len 1000 is more than the checkpoint's max_position_embeddings 256"),
        (BuildConfig(max_seq_len=64, max_input_len=64), "max_input_len 64 is out of range; it must be 1 to 63"),
        (BuildConfig(max_batch_size=0), "max_batch_size 0 is out of range; it must be 1 or more"),
        (BuildConfig(precision="int8"), "precision 'int8' is not allowed; use auto, float32, bfloat16, float16"),
        (BuildConfig(tensor_parallel_size=0), "tensor_parallel_size 0 is out of range"),
        (BuildConfig(tensor_parallel_size=3), "tensor_parallel_size 3 does not divide the heads"),
        (BuildConfig(pipeline_parallel_size=9), "pipeline_parallel_size 9 is more than the model can be divided into"),
    ],
)
def test_a_build_that_cannot_be_is_refused_before_anything_is_written(
    build: BuildConfig, message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(llama, tmp_path / "engine", build)
    assert not list(tmp_path.iterdir())


def test_save_and_load_again(llama: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(str(llama), max_batch_size=3, max_seq_len=100, **SMALL) as llm:
        expected = llm.generate(prompt(9), params).outputs[0].token_ids
        llm.save(tmp_path / "engine")
        with pytest.raises(ConfigError, match="exists already"):
            llm.save(tmp_path / "engine")
    with LLM(str(tmp_path / "engine"), **SMALL) as llm:
        assert llm.generate(prompt(9), params).outputs[0].token_ids == expected
        assert (llm.config.scheduler.max_batch_size, llm.config.max_seq_len) == (3, 100)
        llm.save(tmp_path / "copy", BuildConfig(max_seq_len=50))
    build = read_manifest(tmp_path / "copy").build
    assert (build.max_seq_len, build.max_input_len) == (50, 49)


def test_other_versions_are_told_and_load(
    llama: Path, engine: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    edit(engine, lambda m: dataclasses.replace(m, versions={**m.versions, "torch": "1.0", "gone": "2"}))
    with caplog.at_level(logging.INFO), LLM(str(engine), **SMALL):
        pass
    assert f"built with torch 1.0, here is {torch.__version__}" in caplog.text
    assert "built with gone 2, here is none" in caplog.text
    check_same(llama, engine)


def test_code_beside_a_checkpoint_is_left_behind(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "modeling_own.py").write_text("raise SystemExit('run')")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.OwnConfig"}
    (source / "config.json").write_text(json.dumps(config))
    build_engine(source, tmp_path / "engine", trust_remote_code=True)
    assert not list((tmp_path / "engine").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "engine" / "config.json").read_text())
    check_same(llama, tmp_path / "engine")


def test_a_model_without_a_family_file_has_no_engine_folder(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["StableLmForCausalLM"]}))
    with pytest.raises(ConfigError, match="StableLmForCausalLM has no family file"):
        build_engine(source, tmp_path / "engine")


BUILD_AND_HANG = """
import sys, time
from backend_engine.builder import engine_builder, rank_files
write = rank_files.RankWriter.flush
def flush(self):
    write(self)
    print("written", flush=True)
    time.sleep(600)
rank_files.RankWriter.flush = flush
engine_builder.build_engine(sys.argv[1], engine_builder.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing_that_loads(how: signal.Signals, llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "engine"
    command = [sys.executable, "-c", BUILD_AND_HANG, str(llama), str(target)]
    building = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert building.stdout is not None
    try:
        assert building.stdout.readline() == "written\n"
        with pytest.raises(ConfigError, match="is being built by another process"):
            build_engine(llama, target)
    finally:
        building.send_signal(how)
        building.wait(60)
        building.stdout.close()
    left = list(tmp_path.iterdir())
    assert bool(left) == (how == signal.SIGKILL) and target not in left
    for folder in left:
        with pytest.raises(ModelLoadError):
            load_model(folder, "float32", "cpu")
    build_engine(llama, target)
    assert list(tmp_path.iterdir()) == [target]
    check_same(llama, target)


def test_a_folder_can_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    float8.export(tmp_path / "source", intermediate_size=128)
    build_engine(tmp_path / "source", tmp_path / "engine", BuildConfig(max_seq_len=99, tensor_parallel_size=2))
    command = [sys.executable, "scripts/inspect_checkpoint.py", str(tmp_path / "engine")]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for expected in ("max_seq_len: .* 99", "max_batch_size: .* chosen at load", f"torch {re.escape(torch.__version__)}",
                     r"layers.N.mlp.down_proj.weight: .* 2 x Float8\("):  # fmt: skip
        assert re.search(expected, told), told


def test_plugins_that_are_missing_are_told(engine: Path) -> None:
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))

    def with_plugin(manifest: EngineManifest) -> EngineManifest:
        build = dataclasses.replace(manifest.build, plugins=("own_models",))
        return dataclasses.replace(manifest, architecture="OwnForCausalLM", build=build)

    edit(engine, with_plugin)
    with pytest.raises(
        ModelLoadError, match=r"OwnForCausalLM.* was built with plugins own_models, which have to be named"
    ):
        load_model(engine, "float32", "cpu")


def test_forms_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    float8.export(source, lambda name: "nothing" in name, tie_word_embeddings=False)
    build_engine(source, tmp_path / "whole")
    name = "layers.0.mlp.down_proj.weight"
    part = read_manifest(tmp_path / "whole").packed[name][0]

    def with_parts(*parts: PartForm, of: str = name) -> Callable[[EngineManifest], EngineManifest]:
        return lambda manifest: dataclasses.replace(manifest, packed={**manifest.packed, of: parts})

    changes = {
        "rows, which the model": with_parts(part._replace(num_rows=part.num_rows - 1)),
        "which the model that": with_parts(part, of="layers.9.mlp.down_proj.weight"),
        "norm.weight with": with_parts(part, of="norm.weight"),
        "codes is F8_E4M3 of shape": with_parts(part._replace(scheme={**part.scheme, "dtype": "float8_e5m2"})),
        "is not allowed|expected": with_parts(part._replace(scheme={"scheme": "os.system"})),
        "make 5000000000 ranks, but the folder has 1 files": lambda manifest: dataclasses.replace(
            manifest,
            build=dataclasses.replace(manifest.build, tensor_parallel_size=50000, pipeline_parallel_size=100000),
        ),
        "is not there": lambda manifest: dataclasses.replace(
            manifest, packed={key: parts for key, parts in manifest.packed.items() if key != name}
        ),
    }
    for number, (message, change) in enumerate(changes.items()):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        edit(folder, change)
        with pytest.raises(ModelLoadError, match=message) as error:
            load_model(folder, "float32", "cpu")
        assert "\n" not in str(error.value)


def test_tensors_that_are_not_those_of_the_model_are_refused(engine: Path) -> None:
    path = engine / "rank0-00001.safetensors"
    whole = load_file(path)
    name = "layers.1.mixer.o_proj.weight"
    for change, message in (
        ({name: whole[name][:-1]}, "o_proj.weight is F32 of shape"),
        ({name: whole[name].to(torch.int32)}, "o_proj.weight is I32 of shape"),
        ({"layers.7.more": whole[name].clone()}, "layers.7.more has no place in the model"),
    ):
        save_file({**whole, **change}, path)
        edit(engine, lambda manifest: manifest)
        with pytest.raises(ModelLoadError, match=message):
            load_model(engine, "float32", "cpu")
    del whole[name]
    save_file(whole, path)
    edit(engine, lambda manifest: manifest)
    with pytest.raises(ModelLoadError, match=r"o_proj\.weight is not there"):
        load_model(engine, "float32", "cpu")


def test_a_config_that_claims_more_than_the_files_hold_is_refused_at_once(engine: Path) -> None:
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**config, "hidden_size": 1 << 22, "vocab_size": 1 << 22}))
    edit(engine, lambda manifest: manifest)
    with pytest.raises(ModelLoadError, match="but the files of the checkpoint hold"):
        load_model(engine, "float32", "cpu")
