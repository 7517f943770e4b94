"""Engine folders whose files are not those that were written: each is refused by name, by whoever opens the folder."""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from backend_engine.checkpoint.engine_folder import verifying
from backend_engine.checkpoint.generation_config import generation_defaults
from backend_engine.checkpoint.open_checkpoint import is_checkpoint, kind_of, open_checkpoint
from backend_engine.config import engine_files
from backend_engine.config.engine_files import (
    check_listed,
    check_small_files,
    check_weight_files,
    entry_of,
    is_engine_folder,
    weight_names,
)
from backend_engine.config.engine_manifest import ENGINE_FILE, EngineManifest, FileEntry, manifest_text, read_manifest
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.text.tokenizer import load_tokenizer
from tests.support.engine_folders import some_manifest, write_engine_folder
from tests.support.table_model import token_id

WEIGHTS = ["rank0-00001.safetensors", "rank0-00002.safetensors", "rank1-00001.safetensors", "rank1-00002.safetensors"]
SMALL = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "engine"
    write_engine_folder(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "engine")
    return tmp_path / "engine"


def check_all(folder: Path) -> None:
    manifest = read_manifest(folder)
    check_listed(folder, manifest)
    check_small_files(folder, manifest)
    check_weight_files(folder, manifest)


def refusal(run: Callable[[], object], name: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        run()
    line = str(caught.value)
    assert line.isprintable() and name in line, line
    return line


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def list_anew(folder: Path) -> None:
    """engine.json as it would be had the files been written as they are."""
    (folder / ENGINE_FILE).unlink(missing_ok=True)
    files = {path.name: entry_of(path) for path in folder.iterdir()}
    (folder / ENGINE_FILE).write_text(manifest_text(some_manifest(files=files)))


def test_a_folder_as_it_was_written(good: Path) -> None:
    check_all(good)
    manifest = read_manifest(good)
    assert weight_names(manifest) == WEIGHTS
    assert sorted(manifest.files) == sorted([*WEIGHTS, *SMALL])
    assert is_engine_folder(good) and kind_of(good) == "engine" and is_checkpoint(good)
    assert not is_engine_folder(good.parent) and not is_engine_folder(good / "config.json")


def test_what_is_listed_of_a_file(tmp_path: Path) -> None:
    """Its size and the SHA-256 that FIPS 180-4 gives for it."""
    (tmp_path / "a").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert entry_of(tmp_path / "a") == FileEntry(3, digest)
    (tmp_path / "a").write_bytes(b"a" * 10**6)
    digest = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    assert entry_of(tmp_path / "a") == FileEntry(10**6, digest)
    with pytest.raises(OSError, match="No such file"):
        entry_of(tmp_path / "b")


@pytest.mark.parametrize("read_bytes", [1, 7, 64, 1 << 23])
def test_files_are_read_in_pieces(read_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "_READ_BYTES", read_bytes)
    check_weight_files(folder, read_manifest(folder))
    flip(folder / WEIGHTS[2], 100)
    refusal(lambda: check_weight_files(folder, read_manifest(folder)), WEIGHTS[2])


@pytest.mark.parametrize("at", [0, 9, -1])
@pytest.mark.parametrize("name", [*WEIGHTS, *SMALL])
def test_one_flipped_bit(name: str, at: int, folder: Path) -> None:
    before = read_manifest(folder).files[name].sha256
    flip(folder / name, at)
    line = refusal(lambda: check_all(folder), str(folder / name))
    after = entry_of(folder / name).sha256
    assert line == f"{folder / name} was changed or damaged: sha256 {after} instead of {before}"


@pytest.mark.parametrize("check", [check_listed, check_small_files, check_weight_files])
@pytest.mark.parametrize("length", [0, -1, 1])
def test_another_length(length: int, check: Callable[[Path, EngineManifest], None], folder: Path) -> None:
    name = "tokenizer.json" if check is check_small_files else WEIGHTS[1]
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data + b" " if length > 0 else data[:length])
    line = refusal(lambda: check(folder, read_manifest(folder)), str(folder / name))
    assert "was changed or cut off: " in line and str(len(data)) in line


def test_a_file_that_does_not_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grew after its size was looked at; no more of it is read than is listed."""

    def opened(path: Path) -> IO[bytes]:
        return Path("/dev/zero").open("rb")

    monkeypatch.setattr(engine_files, "open_regular", opened)
    line = refusal(lambda: check_weight_files(folder, read_manifest(folder)), WEIGHTS[0])
    assert "was changed or cut off: it has not the " in line


def test_sizes_are_told_without_reading_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(folder / WEIGHTS[0], 3)
    monkeypatch.setattr(engine_files, "open_regular", None)
    check_listed(folder, read_manifest(folder))


@pytest.mark.parametrize("name", [WEIGHTS[3], "config.json"])
def test_a_file_that_is_missing(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert "does not exist, but engine.json lists it" in refusal(lambda: check_all(folder), str(folder / name))
    refusal(lambda: open_checkpoint(folder), name)


@pytest.mark.parametrize(
    "name", ["custom.py", "adapter", "rank2-00001.safetensors", "model.bin", "new\nline", "\udcff"]
)
def test_a_file_that_is_not_listed(name: str, folder: Path) -> None:
    path = folder / os.fsdecode(os.fsencode(name))
    path.mkdir() if name == "adapter" else path.write_text("x")
    shown = name if name.isprintable() else ascii(name)
    line = f"engine folder {folder} holds {shown}, which engine.json does not list"
    for run in (lambda: check_all(folder), lambda: open_checkpoint(folder), lambda: load_tokenizer(folder)):
        assert refusal(run, str(folder)) == line


def test_hidden_files_do_not_matter(folder: Path) -> None:
    (folder / ".gitattributes").write_text("x")
    (folder / ".cache").mkdir()
    check_all(folder)
    assert open_checkpoint(folder).kind == "engine"


FAKES: dict[str, Callable[[Path, Path], object]] = {
    "fifo": lambda path, copy: os.mkfifo(path),
    "folder": lambda path, copy: os.mkdir(path),
    "endless": lambda path, copy: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS[0]])
@pytest.mark.parametrize("fake", FAKES)
def test_what_is_no_file_of_the_folder(fake: str, name: str, folder: Path) -> None:
    shutil.move(folder / name, folder.parent / "copy")
    FAKES[fake](folder / name, folder.parent / "copy")
    manifest = read_manifest(folder)
    for run in (
        lambda: check_listed(folder, manifest),
        lambda: (check_small_files(folder, manifest), check_weight_files(folder, manifest)),
    ):
        assert "is no regular file" in refusal(run, str(folder / name))


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS[0]])
def test_links_lead_to_files_or_are_refused(name: str, folder: Path) -> None:
    """As in the Hub's cache; what they lead to has the right bytes or is refused as well."""
    copy = folder.parent / "copy"
    shutil.move(folder / name, copy)
    (folder / name).symlink_to(copy)
    check_all(folder)
    flip(copy, 20)
    assert "was changed or damaged" in refusal(lambda: check_all(folder), str(folder / name))
    copy.unlink()
    assert "does not exist" in refusal(lambda: check_all(folder), str(folder / name))


def test_the_first_wrong_file_is_named_and_the_others_are_let_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of names, however the threads come along; those still at work stop."""
    flip(folder / WEIGHTS[1], 20)
    flip(folder / WEIGHTS[2], 20)
    flip(folder / WEIGHTS[3], 20)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    done: list[tuple[int, int, str]] = []
    refusal(lambda: check_weight_files(folder, read_manifest(folder), lambda *step: done.append(step)), WEIGHTS[1])
    assert done == [(1, 4, WEIGHTS[0])]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checksum")]


def test_whoever_watches_may_stop_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before a large file has been read."""
    manifest = read_manifest(folder)
    endless = {name: FileEntry(1 << 62, entry.sha256) for name, entry in manifest.files.items() if name != WEIGHTS[0]}
    manifest = dataclasses.replace(manifest, files={**manifest.files, **endless})

    def opened(path: Path) -> IO[bytes]:
        return (path if path.name == WEIGHTS[0] else Path("/dev/zero")).open("rb")

    def stop(num_done: int, num_files: int, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_files, "open_regular", opened)
    with pytest.raises(KeyboardInterrupt):
        check_weight_files(folder, manifest, stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checksum")]


def test_a_folder_is_read_while_its_checksums_are_compared(folder: Path) -> None:
    """What is made of it counts at the end, where a wrong one is told of, instead of what it led to."""
    with verifying(open_checkpoint(folder)) as checkpoint, verifying(checkpoint) as again:
        assert again.is_verified and again.open_tensors()
        assert len([thread for thread in threading.enumerate() if thread.name.startswith("checksums")]) <= 1
    flip(folder / WEIGHTS[1], 20)
    reached: list[str] = []

    def use(*errors: BaseException) -> None:
        with verifying(open_checkpoint(folder)):
            reached.append("inside")
            for error in errors:
                raise error

    refusal(use, WEIGHTS[1])
    refusal(lambda: use(ModelLoadError("a tensor has an odd shape")), WEIGHTS[1])
    for other in (KeyboardInterrupt(), ConfigError("no such precision")):
        with pytest.raises(type(other)):
            use(other)
    assert len(reached) == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checksum")]


def test_nobody_waits_for_checksums_after_an_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.engine is not None
    endless = {name: FileEntry(1 << 62, entry.sha256) for name, entry in checkpoint.engine.files.items()}
    checkpoint = dataclasses.replace(checkpoint, engine=dataclasses.replace(checkpoint.engine, files=endless))

    def opened(path: Path) -> IO[bytes]:
        return Path("/dev/zero").open("rb")

    monkeypatch.setattr(engine_files, "open_regular", opened)
    monkeypatch.setattr(engine_files, "_size", lambda path: 1 << 62)
    with pytest.raises(KeyboardInterrupt), verifying(checkpoint):
        raise KeyboardInterrupt


def test_a_checkpoint_without_checksums_is_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    with verifying(checkpoint) as found:
        assert found is checkpoint


def test_progress_comes_in_order(folder: Path) -> None:
    done: list[tuple[int, int, str]] = []
    check_weight_files(folder, read_manifest(folder), lambda *step: done.append(step))
    assert done == [(i + 1, 4, name) for i, name in enumerate(WEIGHTS)]


def test_an_engine_folder_is_a_checkpoint(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    assert checkpoint.kind == "engine" and checkpoint.path == good and checkpoint.origin == "config.json"
    assert checkpoint.engine == read_manifest(good)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert generation_defaults(checkpoint).end_ids == (1, 2)
    readers = checkpoint.open_tensors()
    assert [reader.path.name for reader in readers] == WEIGHTS
    assert [sorted(reader.names())[-1] for reader in readers] == ["norm.weight"] * 4
    assert [float(reader.read("norm.weight")[0]) for reader in readers] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", SMALL)
def test_no_small_file_is_read_that_was_changed(name: str, folder: Path) -> None:
    """Weights are left to whoever loads them, since they take long."""
    flip(folder / WEIGHTS[0], -1)
    assert open_checkpoint(folder).kind == "engine" and load_tokenizer(folder)
    flip(folder / name, 5)
    for run in (lambda: open_checkpoint(folder), lambda: load_tokenizer(folder)):
        assert "was changed or damaged" in refusal(run, str(folder / name))


def test_configurations_that_do_not_agree(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    list_anew(folder)
    line = refusal(lambda: open_checkpoint(folder), str(folder / "config.json"))
    assert line.endswith("architectures is GPT2LMHeadModel; expected LlamaForCausalLM, as engine.json says")
    (folder / "config.json").unlink()
    list_anew(folder)
    refusal(lambda: open_checkpoint(folder), "has no config.json")


def test_a_folder_without_weights(folder: Path) -> None:
    for name in WEIGHTS:
        (folder / name).unlink()
    list_anew(folder)
    assert "lists no file of weights" in refusal(open_checkpoint(folder).open_tensors, ENGINE_FILE)


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_an_engine_json_of_any_kind_makes_it_an_engine_folder(text: str, folder: Path) -> None:
    (folder / ENGINE_FILE).write_text(text)
    for run in (lambda: open_checkpoint(folder), lambda: load_tokenizer(folder)):
        refusal(run, str(folder / ENGINE_FILE))


def test_the_tokenizer_of_an_engine_folder_runs_no_code(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it is asked for, and listed."""
    assert load_tokenizer(folder).encode("Count") == [token_id("Count")]
    path, mark = folder / "tokenizer_config.json", folder.parent / "mark"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    list_anew(folder)
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    caplog.set_level("INFO")
    assert load_tokenizer(folder, trust_remote_code=True).encode("Count") == [token_id("Count")]
    assert not mark.exists() and "trust_remote_code is ignored" in caplog.text
    (folder / "tokenizer.json").unlink()
    list_anew(folder)
    with pytest.raises(ModelLoadError, match="OwnTokenizer"):
        load_tokenizer(folder, trust_remote_code=True)
    assert not mark.exists()


def test_the_tokenizer_is_loaded_without_torch(folder: Path) -> None:
    """Preprocessing and postprocessing have no other use for it."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    list_anew(folder)
    script = (
        "import sys\nfrom backend_engine.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(sys.argv[1]).encode('a')\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
