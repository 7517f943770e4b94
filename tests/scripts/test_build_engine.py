"""``scripts/build_engine.py``: whole runs, limits, one line for whatever is wrong, two at once, and Ctrl-C."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import build_engine
import pytest
import torch
from safetensors.torch import load_file

from backend_engine.config.build_config import BuildConfig
from backend_engine.config.engine_manifest import read_manifest
from backend_engine.model_engine.model_loader import load_model
from tests.support.client import strict_json

ROOT = Path(__file__).resolve().parents[2]


def command_line(model: Path, output: Path, *arguments: str) -> list[str]:
    """Later arguments win over those that are given here."""
    return ["--model", str(model), "--output", str(output), *arguments]


def status(argv: list[str]) -> int | str | None:
    """The exit status, whether it is returned or raised by the parser."""
    try:
        return build_engine.main(argv)
    except SystemExit as end:
        return end.code


def check_same(model: Path, engine: Path) -> None:
    """Both load as the same parameters."""
    expected, found = (load_model(path, "float32", "cpu").model.state_dict() for path in (model, engine))
    assert expected.keys() == found.keys() and expected
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def names_below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_whole_run_as_a_program(random_model_dir: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    command = [sys.executable, str(ROOT / "scripts" / "build_engine.py"), *command_line(random_model_dir, engine)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for_people, last = done.stdout.splitlines()
    row = strict_json(last.encode())
    assert list(row) == ["output", "bytes", "build_s", "peak_bytes"]
    files = [path for path in engine.iterdir() if path.name != "engine.json"]
    assert row["output"] == str(engine) and row["bytes"] == sum(path.stat().st_size for path in files)
    assert row["build_s"] >= 0 and row["peak_bytes"] > 2**20
    assert re.fullmatch(rf"{re.escape(str(engine))}: 0\.5 MB in {len(files)} files, \d+\.\d s", for_people), for_people
    check_same(random_model_dir, engine)


def test_limits_precision_and_ranks_reach_the_folder(
    random_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--max-batch-size", "4", "--max-input-len", "20", "--max-seq-len", "64", "--max-num-tokens", "48"]
    ranks = ["--tp", "2", "--pp", "2", "--precision", "bfloat16", "--plugins", "none"]
    assert status(command_line(random_model_dir, tmp_path / "engine", *limits, *ranks)) == 0
    assert strict_json(capsys.readouterr().out.splitlines()[-1].encode())["output"] == str(tmp_path / "engine")
    assert json.loads((tmp_path / "engine" / "engine.json").read_text())["build"]["max_input_len"] == 20
    assert read_manifest(tmp_path / "engine").build == BuildConfig(4, 20, 64, 48, "bfloat16", 2, 2, ("none",))
    files = sorted((tmp_path / "engine").glob("*.safetensors"))
    assert [path.name for path in files] == [f"rank{rank}-00001.safetensors" for rank in range(4)]
    stored = [load_file(path) for path in files]
    assert {tensor.dtype for tensors in stored for tensor in tensors.values()} == {torch.bfloat16}
    assert load_model(tmp_path / "engine", "float32", "cpu").traits.vocab_size > 0


def test_without_limits_the_models_own_are_taken(random_model_dir: Path, tmp_path: Path) -> None:
    longer = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"]
    assert status(command_line(random_model_dir, tmp_path / "engine", *longer)) == 0
    build = read_manifest(tmp_path / "engine").build
    assert (build.max_seq_len, build.max_batch_size, build.max_num_tokens) == (256, None, None)
    assert (build.precision, build.tensor_parallel_size, build.pipeline_parallel_size) == ("float32", 2, 1)
    check_same(random_model_dir, tmp_path / "engine")


def test_what_is_missing_is_noted(random_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = without_tokenizer(random_model_dir, tmp_path)
    assert status(command_line(model, tmp_path / "engine")) == 0
    assert f"build_engine: note: no tokenizer in {model}: none is written\n" in capsys.readouterr().err


BAD_ARGUMENTS = {
    "--max-batch-size 0": "argument --max-batch-size: '0' is not allowed; use a whole number of 1 or more",
    "--max-batch-size many": "argument --max-batch-size: 'many' is not allowed",
    "--max-input-len -1": "argument --max-input-len: '-1' is not allowed",
    "--max-input-len 1e3": "argument --max-input-len: '1e3' is not allowed",
    "--max-input-len 64 --max-seq-len 64": "max_input_len 64 is out of range; it must be 1 to 63",
    "--max-seq-len 0": "argument --max-seq-len: '0' is not allowed",
    "--max-seq-len 257": "max_seq_len 257 is more than the checkpoint's max_position_embeddings 256",
    "--max-num-tokens 0": "argument --max-num-tokens: '0' is not allowed",
    "--precision int8": "argument --precision: invalid choice: 'int8' (choose from 'auto', ",
    "--tp 0": "argument --tensor-parallel-size/--tp: '0' is not allowed",
    "--tp two": "argument --tensor-parallel-size/--tp: 'two' is not allowed",
    "--tp 3": "tensor_parallel_size 3 does not divide the heads",
    "--pp 0": "argument --pipeline-parallel-size/--pp: '0' is not allowed",
    "--pp 9": "pipeline_parallel_size 9 is more than the model can be divided into",
    "--model {tmp}/none": "model folder {tmp}/none does not exist; expected a Hugging Face model folder",
    "--model {tmp}/empty": "{tmp}/empty",
    "--model {tmp}/bare/config.json": "model folder {tmp}/bare/config.json is not a folder; expected",
    "--model {tmp}/cut": "{tmp}/cut/model.safetensors",
    "--model {tmp}/unknown": "StableLmForCausalLM has no family file",
    "--model {tmp}/flipped": "{tmp}/flipped/rank0-00001.safetensors was changed or damaged: sha256 ",
    "--output {tmp}/bare": "output {tmp}/bare exists already; name another or remove it",
    "--output {tmp}/bare/config.json": "output {tmp}/bare/config.json exists already; name another or remove it",
    "--output {tmp}/none/engine": "output {tmp}/none/engine: the folder {tmp}/none does not exist; make it first",
    "--plugins {tmp}/none.py": "plugin {tmp}/none.py: there is no such file or folder",
    "--max-seq 64": "unrecognized arguments: --max-seq 64",
    "more": "unrecognized arguments: more",
}


def without_tokenizer(model: Path, where: Path) -> Path:
    shutil.copytree(model, where / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    return where / "bare"


@pytest.fixture(scope="module")
def bad_models(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models that are refused; read only."""
    folder = tmp_path_factory.mktemp("bad")
    without_tokenizer(random_model_dir, folder)
    (folder / "empty").mkdir()
    for name in ("cut", "unknown"):
        shutil.copytree(random_model_dir, folder / name)
    os.truncate(folder / "cut" / "model.safetensors", 100_000)
    config = json.loads((folder / "unknown" / "config.json").read_text())
    (folder / "unknown" / "config.json").write_text(json.dumps({**config, "architectures": ["StableLmForCausalLM"]}))
    assert status(command_line(random_model_dir, folder / "flipped")) == 0
    weights = folder / "flipped" / "rank0-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return folder


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_what_is_wrong_is_told_in_one_line(
    arguments: str, bad_models: Path, random_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names_below(bad_models)
    message = BAD_ARGUMENTS[arguments].replace("{tmp}", str(bad_models))
    more = [argument.replace("{tmp}", str(bad_models)) for argument in arguments.split()]
    capsys.readouterr()
    assert status(command_line(random_model_dir, tmp_path / "engine", *more)) == 1
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1, told
    assert told.err.startswith("build_engine: ") and message in told.err
    assert names_below(bad_models) == before and not list(tmp_path.iterdir())


def test_an_output_must_be_given(random_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["--model", str(random_model_dir)]) == 1
    assert capsys.readouterr().err == "build_engine: the following arguments are required: --output\n"


def test_a_small_model_that_cannot_be_fetched_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    assert status(["--output", str(tmp_path / "engine")]) == 1
    told = capfd.readouterr().err
    assert str(tmp_path / "cache") in told and len(told.splitlines()) == 1, told
    assert not (tmp_path / "engine").exists()


BUILD_AND_WAIT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, "scripts")
import build_engine
from backend_engine.builder import rank_files
flush = rank_files.RankWriter.flush
def flush_and_wait(self):
    flush(self)
    print("written", flush=True)
    sys.stdin.readline()
rank_files.RankWriter.flush = flush_and_wait
sys.exit(build_engine.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def half_way(model: Path, engine: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has written the weights and waits for a line before it goes on."""
    command = [sys.executable, "-c", BUILD_AND_WAIT, *command_line(model, engine)]
    pipe = subprocess.PIPE
    building = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    assert building.stdout is not None
    with building:
        try:
            assert building.stdout.readline() == "written\n"
            yield building
        finally:
            building.kill()


def test_of_two_at_once_one_builds_and_the_other_says_so(
    random_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    with half_way(random_model_dir, engine) as first:
        assert status(command_line(random_model_dir, engine)) == 1
        told = capsys.readouterr()
        assert told.err == f"build_engine: output {engine} is being built by another process\n"
        assert told.out == "" and not engine.exists()
        out, err = first.communicate("go on\n", timeout=60)
        assert first.returncode == 0 and strict_json(out.splitlines()[-1].encode())["output"] == str(engine), err
    assert list(tmp_path.iterdir()) == [engine]
    check_same(random_model_dir, engine)


def test_control_c_leaves_nothing(random_model_dir: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    with half_way(random_model_dir, engine) as building:
        assert list(tmp_path.glob("*/rank0-00001.safetensors")) and not engine.exists()
        building.send_signal(signal.SIGINT)
        out, err = building.communicate(timeout=60)
        assert building.returncode == 130 and out == "" and "Traceback" not in err, err
    told = re.split("[\r\n]+", err.strip())[-1]
    assert told == f"build_engine: interrupted; nothing was left in {engine}"
    assert not list(tmp_path.iterdir())
