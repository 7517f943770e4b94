"""``scripts/quantize.py``: whole runs, one line for whatever is wrong before anything is written, and Ctrl-C."""

import json
import math
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
import quantize
import torch

from backend_engine.builder.engine_builder import build_engine
from backend_engine.model_engine.model_loader import describe_model, load_model
from backend_engine.post_training import perplexity as perplexity_module
from tests.support.client import strict_json

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--device", "cpu", "--calib-max-seq-length", "32", "--calib-size", "4", "--eval-size", "2")
KEYS = [
    "model", "output", "qformat", "kv_cache_dtype", "bytes_before", "bytes_after", "perplexity_before",
    "perplexity_after", "quantize_s", "peak_bytes", "num_weights",
]  # fmt: skip
TEXT = "Count one two three four, and say what the words are that come after them.\n"
FORMATS = "int8_wo, int8_dyn, int8_sq, int4_awq, int4_gptq, fp8, nvfp4"


def command_line(model: Path, output: Path, *arguments: str, qformat: str = "int8_wo") -> list[str]:
    """Later arguments win over those that are given here."""
    return ["--model", str(model), "--output", str(output), "--qformat", qformat, *SMALL, *arguments]


def status(argv: list[str]) -> int | str | None:
    """The exit status, whether it is returned or raised by the parser."""
    try:
        return quantize.main(argv)
    except SystemExit as end:
        return end.code


def weights_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def check_report(told: str, model: Path, output: Path) -> dict[str, Any]:
    """The table, and the JSON line behind it, as values."""
    *lines, last = told.splitlines()
    row = strict_json(last.encode())
    assert list(row) == KEYS
    assert (row["model"], row["output"]) == (str(model), str(output))
    assert row["bytes_before"] == (model / "model.safetensors").stat().st_size
    assert row["bytes_after"] == len(weights_of(output)) < row["bytes_before"]
    assert row["peak_bytes"] > 2**20 and row["quantize_s"] >= 0
    assert lines[0].split() == ["before", "after"] and set(lines[1]) == {"-", " "}
    rows = {line[:13].strip(): line[13:] for line in lines[2:]}
    assert list(rows) == ["weights", *(["perplexity"] if row["perplexity_before"] else []), "time", "peak memory"]
    return dict(row)


@pytest.mark.parametrize(
    ("qformat", "arguments", "bits", "group_size"),
    [("int8_wo", (), 8, None), ("int4_gptq", ("--group-size", "16"), 4, 16)],
)
def test_a_whole_run(
    qformat: str,
    arguments: tuple[str, ...],
    bits: int,
    group_size: int | None,
    random_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "output"
    assert status(command_line(random_model_dir, output, *arguments, qformat=qformat)) == 0
    row = check_report(capsys.readouterr().out, random_model_dir, output)
    assert (row["qformat"], row["kv_cache_dtype"], row["num_weights"]) == (qformat, "auto", 2 * 4)
    before, after = row["perplexity_before"], row["perplexity_after"]
    assert all(math.isfinite(value) and value > 1 for value in (before, after))
    # The weights were rounded, not spoilt.
    assert before != after and abs(math.log(after / before)) < 0.5
    quantization = json.loads((output / "config.json").read_text())["quantization_config"]
    [group] = quantization["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (bits, group_size)
    assert load_model(output, "float32", "cpu").traits.vocab_size > 0
    assert list(tmp_path.iterdir()) == [output]


def test_as_a_program_without_perplexity_a_tokenizer_is_not_needed(random_model_dir: Path, tmp_path: Path) -> None:
    model, output = without_tokenizer(random_model_dir, tmp_path), tmp_path / "output"
    script = str(ROOT / "scripts" / "quantize.py")
    command = [sys.executable, script, *command_line(model, output, "--no-perplexity", "--kv-cache-dtype", "int8")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    row = check_report(done.stdout, model, output)
    assert (row["perplexity_before"], row["perplexity_after"], row["kv_cache_dtype"]) == (None, None, "int8")
    assert f"quantize: note: no tokenizer in {model}" in done.stderr and "Traceback" not in done.stderr
    assert describe_model(output).kv_cache_dtype == "int8"


def test_the_text_to_calibrate_with_decides(random_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text(TEXT * 8)
    (tmp_path / "same.jsonl").write_text(json.dumps({"text": TEXT * 8}) + "\n")
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "0123456789 " * 64}) + "\n")
    found = []
    for number, name in enumerate(("some.txt", "same.jsonl", "other.jsonl")):
        more = ("--no-perplexity", "--calib-data", str(tmp_path / name))
        output = tmp_path / str(number)
        assert status(command_line(random_model_dir, output, *more, qformat="int4_gptq")) == 0
        found.append(weights_of(output))
    assert found[0] == found[1] != found[2]


def test_a_perplexity_that_is_not_finite_is_null(
    random_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity_module, "perplexity", lambda *_: math.inf)
    assert status(command_line(random_model_dir, tmp_path / "output")) == 0
    row = strict_json(capsys.readouterr().out.splitlines()[-1].encode())
    assert row["perplexity_before"] is None and row["perplexity_after"] is None


BAD_ARGUMENTS = {
    "--qformat int3": f"qformat 'int3' is not allowed; use {FORMATS}",
    "--qformat": "argument --qformat: expected one argument",
    "--kv-cache-dtype int4": "kv_cache_dtype 'int4' is not allowed; use auto, fp8, int8",
    "--qformat int4_awq --group-size 0": "argument --group-size: '0' is not allowed; use a whole number of 1 or more",
    "--qformat int4_awq --group-size x": "argument --group-size: 'x' is not allowed; use a whole number of 1 or more",
    "--qformat int4_awq --group-size -8": "argument --group-size: '-8' is not allowed",
    "--qformat int4_awq --group-size 1.5": "argument --group-size: '1.5' is not allowed",
    "--qformat int4_awq --group-size 48": "has no product that the format can hold; layers.0.mixer.qkv_proj.weight: ",
    "--group-size 16": "group_size 16 is not allowed with qformat int8_wo, whose groups are fixed",
    "--device tpu": "device 'tpu' is not allowed; use auto, cpu, cuda",
    "--device cuda": "device 'cuda' is not available: torch sees no CUDA device; use device 'cpu' or 'auto'",
    "--calib-size 0": "argument --calib-size: '0' is not allowed",
    "--calib-size many": "argument --calib-size: 'many' is not allowed",
    "--eval-size 0": "argument --eval-size: '0' is not allowed",
    "--calib-max-seq-length 0": "argument --calib-max-seq-length: '0' is not allowed",
    "--calib-max-seq-length 1": "the length of a window is 1; expected at least 2 tokens",
    "--calib-max-seq-length 257": "the length of a window is 257; the model takes texts of at most 256 tokens",
    "--model {tmp}/none": "model folder {tmp}/none does not exist; expected a Hugging Face model folder",
    "--model {tmp}/engine": "{tmp}/engine is an engine folder; name the checkpoint that it was built from",
    "--model {tmp}/bare": "no tokenizer in {tmp}/bare",
    "--model {tmp}/bare --no-perplexity --qformat int4_gptq": "no tokenizer in {tmp}/bare",
    "--model {tmp}/bare --no-perplexity --kv-cache-dtype fp8": "no tokenizer in {tmp}/bare",
    "--output {tmp}/bare": "output {tmp}/bare exists already; name another or remove it",
    "--output {tmp}/short.txt": "output {tmp}/short.txt exists already; name another or remove it",
    "--output {tmp}/none/output": "output {tmp}/none/output: the folder {tmp}/none does not exist; make it first",
    "--calib-data {tmp}/none.txt": "{tmp}/none.txt cannot be read: No such file or directory",
    "--calib-data {tmp}/none.txt --no-perplexity": "{tmp}/none.txt cannot be read: No such file or directory",
    "--calib-data {tmp}/bare": "{tmp}/bare is no text to calibrate with; expected a file named .txt or .jsonl",
    "--calib-data {tmp}/binary.txt": "{tmp}/binary.txt line 1 is not UTF-8 text: ",
    "--calib-data {tmp}/binary.bin": "{tmp}/binary.bin is no text to calibrate with; expected a file named .txt",
    "--calib-data {tmp}/short.txt": "{tmp}/short.txt has 5 tokens; a window needs 32",
    "--calib-data {tmp}/bad.jsonl": "{tmp}/bad.jsonl line 2 is 5; expected an object with a text under 'text'",
    "--qform int8_wo": "unrecognized arguments: --qform int8_wo",
    "--quiet": "unrecognized arguments: --quiet",
}


def without_tokenizer(model: Path, where: Path) -> Path:
    shutil.copytree(model, where / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    return where / "bare"


@pytest.fixture(scope="module")
def bad_files(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and texts that are refused; read only."""
    folder = tmp_path_factory.mktemp("bad")
    without_tokenizer(random_model_dir, folder)
    build_engine(random_model_dir, folder / "engine")
    (folder / "binary.txt").write_bytes(b"\x80\x81\x00" * 500)
    (folder / "binary.bin").write_bytes(b"\x80\x81\x00" * 500)
    (folder / "short.txt").write_text("Count one two three four")
    (folder / "bad.jsonl").write_text(json.dumps({"text": TEXT}) + "\n5\n")
    return folder


def names_below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_what_is_wrong_is_told_in_one_line_before_any_work(
    arguments: str,
    bad_files: Path,
    random_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = names_below(bad_files)
    message = BAD_ARGUMENTS[arguments].replace("{tmp}", str(bad_files))
    more = [argument.replace("{tmp}", str(bad_files)) for argument in arguments.split()]
    assert status(command_line(random_model_dir, tmp_path / "output", *more)) == 1
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1, told
    assert told.err.startswith("quantize: ") and message in told.err
    assert names_below(bad_files) == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["--output", "--qformat"])
def test_what_must_be_given(
    missing: str, random_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command_line(random_model_dir, tmp_path / "output")
    place = argv.index(missing)
    assert status(argv[:place] + argv[place + 2 :]) == 1
    assert capsys.readouterr().err == f"quantize: the following arguments are required: {missing}\n"
    assert not list(tmp_path.iterdir())


def test_a_small_model_that_cannot_be_fetched_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    assert status(["--qformat", "int8_wo", "--output", str(tmp_path / "output"), *SMALL]) == 1
    told = capfd.readouterr().err
    assert str(tmp_path / "cache") in told and len(told.splitlines()) == 1, told
    assert not (tmp_path / "output").exists()


HANG = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, "scripts")
import quantize
from backend_engine.post_training import {module} as module
run = module.{function}
def run_and_hang(*arguments):
    run(*arguments)
    print("reached", flush=True)
    time.sleep(600)
module.{function} = run_and_hang
sys.exit(quantize.main(sys.argv[1:]))
"""


def interrupted(module: str, function: str, argv: list[str], look: Callable[[], None]) -> str:
    """Send Ctrl-C when ``function`` has done its work and ``look`` was called. Returns the last line that is told."""
    program = HANG.format(module=module, function=function)
    running = subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert running.stdout is not None
    try:
        assert running.stdout.readline() == "reached\n"
        look()
    finally:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert out == "" and "Traceback" not in err
    return re.split("[\r\n]+", err.strip())[-1]


def test_control_c_in_the_middle_leaves_nothing(random_model_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"

    def look() -> None:
        assert not output.exists() and list(tmp_path.glob("*/*.safetensors"))

    told = interrupted("quantize_model", "write_quantized", command_line(random_model_dir, output), look)
    assert told == f"quantize: interrupted; nothing was left in {output}"
    assert not list(tmp_path.iterdir())


def test_control_c_while_measuring_leaves_what_is_whole(random_model_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    told = interrupted("perplexity", "perplexity", command_line(random_model_dir, output), lambda: None)
    assert told == f"quantize: interrupted; {output} is whole, but its perplexity was not measured"
    assert list(tmp_path.iterdir()) == [output]
    assert load_model(output, "float32", "cpu").traits.vocab_size > 0
