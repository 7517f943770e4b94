"""Folders that appear whole or not at all: with real processes that compete, are killed or interrupted."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from backend_engine.builder import new_folder as module
from backend_engine.builder.new_folder import new_folder
from backend_engine.errors import ConfigError

ROOT = Path(__file__).parents[2]
# Builds a folder as told by its standard input: "go" ends the block, anything else writes a file of that name.
BUILDER = """
import sys
from pathlib import Path
from backend_engine.builder.new_folder import new_folder
from backend_engine.errors import ConfigError
try:
    with new_folder(Path(sys.argv[1]), 10) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        print("building", flush=True)
        for line in sys.stdin:
            if line.strip() == "go":
                break
            (folder / line.strip()).write_text(sys.argv[2])
            print("wrote", flush=True)
    print("built", flush=True)
except ConfigError as error:
    print(error, flush=True)
"""


class Builder(NamedTuple):
    process: "subprocess.Popen[str]"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@pytest.fixture
def builders() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(builders: list["subprocess.Popen[str]"], target: Path, mark: str = "x") -> Builder:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", BUILDER, str(target), mark]
    builders.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT))
    return Builder(builders[-1])


def refusal(target: Path, num_bytes: int = 10) -> str:
    with pytest.raises(ConfigError) as caught, new_folder(target, num_bytes):
        pytest.fail("the block ran")
    line = str(caught.value)
    assert line.isprintable() and str(target) in line
    return line


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with new_folder(target, 10) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        assert not target.exists() and folder.parent == tmp_path and names(tmp_path) == [".engine.partial"]
    assert names(tmp_path) == ["engine"] and (target / "sub" / "a").read_text() == "a"
    assert target.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), (tmp_path / "engine").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    with new_folder(tmp_path / "engine", 10) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        (folder / "b").write_text("b")
    assert sorted(synced[:-1]) == [(".engine.partial", False), ("a", False), ("b", False), ("sub", False)]
    assert synced[-1] == (tmp_path.name, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), SystemExit(1), OSError(errno.EIO, "x")])
def test_an_exception_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, new_folder(tmp_path / "engine", 10) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        raise error
    assert caught.value is error and names(tmp_path) == []


def test_an_empty_folder_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty", 10) as folder:
        (folder / "a").write_text("a")
    assert names(tmp_path / "empty") == ["a"]
    (tmp_path / "file").write_text("f")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "to_folder").symlink_to(tmp_path / "other")
    for name in ("empty", "file", "link", "to_folder"):
        assert "exists already; name another or remove it" in refusal(tmp_path / name)
    assert names(tmp_path) == ["empty", "file", "link", "other", "to_folder"]
    assert names(tmp_path / "empty") == ["a"] and (tmp_path / "file").read_text() == "f"


def test_what_appears_while_it_is_built_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be put in its place"), new_folder(tmp_path / "engine", 10) as folder:
        (folder / "a").write_text("a")
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "mine").write_text("m")
    assert names(tmp_path) == ["engine"] and names(tmp_path / "engine") == ["mine"]


def test_a_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with new_folder(Path("engine"), 10) as folder:
        (folder / "a").write_text("a")
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert names(tmp_path / "engine") == ["a"] and names(tmp_path / "elsewhere") == []


def test_places_where_no_folder_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("f")
    assert "does not exist; make it first" in refusal(tmp_path / "none" / "engine")
    assert "does not exist; make it first" in refusal(tmp_path / "file" / "engine")
    assert "File name too long" in refusal(tmp_path / ("x" * 250))
    assert "exists already" in refusal(Path("/"))
    (tmp_path / ".a.partial").write_text("f")
    assert ".a.partial cannot be made: Not a directory" in refusal(tmp_path / "a")
    (tmp_path / ".b.partial").symlink_to(tmp_path / "nowhere")
    assert ".b.partial cannot be made: " in refusal(tmp_path / "b")
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mount")
    assert "is a mount point" in refusal(tmp_path / "mount")
    assert names(tmp_path) == [".a.partial", ".b.partial", "file", "mount"]


def test_a_parent_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only trying tells, as for the superuser and on strange file systems."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert f"the folder {tmp_path} cannot be written to" in refusal(tmp_path / "engine")
    monkeypatch.undo()

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "cannot be made: Read-only file system" in refusal(tmp_path / "engine")


def test_too_little_room_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return shutil._ntuple_diskusage(10**9, 10**9 - 1234, 1234)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    line = refusal(tmp_path / "engine", 1235)
    assert f"takes 1235 bytes, but {tmp_path} has 1234 bytes free" in line
    assert names(tmp_path) == [] and asked == [tmp_path]
    with new_folder(tmp_path / "engine", 1234):
        pass
    assert names(tmp_path) == ["engine"]


def test_what_an_interrupted_build_left_does_not_count_as_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".engine.partial"
    left.mkdir()
    (left / "a").write_bytes(bytes(500))

    def usage(path: Path) -> Any:
        taken = sum(file.stat().st_size for file in left.iterdir())
        return shutil._ntuple_diskusage(1000, taken, 1000 - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with new_folder(tmp_path / "engine", 800):
        pass
    assert names(tmp_path) == ["engine"] and names(tmp_path / "engine") == []


FULL = """
import resource, signal, sys
from pathlib import Path
from backend_engine.builder.new_folder import new_folder
from backend_engine.errors import ConfigError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    with new_folder(Path(sys.argv[1]), 10) as folder:
        if sys.argv[2] == "rust":
            import torch
            from safetensors.torch import save_file
            save_file({"a": torch.zeros(1 << 16)}, folder / "a.safetensors")
        else:
            (folder / "a").write_bytes(bytes(1 << 20))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("writer", ["python", "rust"])
def test_a_file_that_does_not_fit(writer: str, tmp_path: Path) -> None:
    """The system's own refusal, told in one line, whoever wrote the file."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "engine"), writer]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout.strip() == f"output {tmp_path}/engine cannot be written: File too large; nothing of it is kept"
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_while_it_is_written(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems tell it only when the bytes are to reach the disk."""

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError) as caught, new_folder(tmp_path / "engine", 10) as folder:
        (folder / "a").write_text("a")
    assert f"cannot be written: {os.strerror(number)}" in str(caught.value) and names(tmp_path) == []


def test_of_two_builders_one_works_and_the_other_says_so_at_once(
    tmp_path: Path, builders: list["subprocess.Popen[str]"]
) -> None:
    target = tmp_path / "engine"
    first = start(builders, target, "first")
    assert first.line() == "building"
    second = start(builders, target, "second")
    assert second.line() == f"output {target} is being built by another process"
    assert "is being built by another process" in refusal(target)  # and in one process, too
    first.tell("b")
    assert first.line() == "wrote" and names(tmp_path) == [".engine.partial"]
    first.tell("go")
    assert first.line() == "built"
    assert names(tmp_path) == ["engine"] and (target / "b").read_text() == "first"
    third = start(builders, target)
    assert "exists already" in third.line()


def test_many_builders_that_start_at_once(tmp_path: Path, builders: list["subprocess.Popen[str]"]) -> None:
    """One of them builds, and the folder is its work alone."""
    started = [start(builders, tmp_path / "engine", str(i)) for i in range(4)]
    lines = [builder.line() for builder in started]
    assert lines.count("building") == 1
    assert all(line == "building" or "is being built by another process" in line for line in lines)
    winner = lines.index("building")
    started[winner].tell("b")
    started[winner].tell("go")
    assert [started[winner].line(), started[winner].line()] == ["wrote", "built"]
    assert (tmp_path / "engine" / "b").read_text() == str(winner) and names(tmp_path) == ["engine"]


def test_a_builder_that_is_killed_can_be_followed_by_another(
    tmp_path: Path, builders: list["subprocess.Popen[str]"], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first = start(builders, tmp_path / "engine")
    assert first.line() == "building"
    first.tell("left")
    assert first.line() == "wrote"
    first.process.kill()
    first.process.wait()
    assert names(tmp_path) == [".engine.partial"]
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    with new_folder(tmp_path / "engine", 10) as folder:
        assert names(folder) == []
        (folder / "new").write_text("n")
    assert f"clearing {tmp_path}/.engine.partial, which a build that was interrupted left with 2 files" in caplog.text
    assert names(tmp_path) == ["engine"] and names(tmp_path / "engine") == ["new"]


def test_a_builder_that_is_interrupted_leaves_nothing(tmp_path: Path, builders: list["subprocess.Popen[str]"]) -> None:
    first = start(builders, tmp_path / "engine")
    assert first.line() == "building"
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(30) != 0
    assert first.process.stderr is not None and "KeyboardInterrupt" in first.process.stderr.read()
    assert names(tmp_path) == []


@pytest.mark.parametrize("what", ["removed", "renamed", "made anew"])
def test_the_folder_goes_while_it_is_being_locked(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a builder that ends between our opening it and our lock."""
    target, partial = tmp_path / "engine", tmp_path / ".engine.partial"
    partial.mkdir()
    lock, done = module.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not done:
            done.append(what)
            partial.rename(target if what == "renamed" else tmp_path / "gone")
            if what == "renamed":
                (target / "theirs").write_text("t")
            if what == "made anew":
                partial.mkdir()
        lock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", late)
    if what == "renamed":
        assert "exists already" in refusal(target)
        assert names(tmp_path) == ["engine"] and names(target) == ["theirs"]
        return
    with new_folder(target, 10) as folder:
        (folder / "ours").write_text("o")
    assert names(tmp_path) == ["engine", "gone"] and names(target) == ["ours"]


def test_the_next_builder_is_not_disturbed_by_an_error_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the folder has its name, a folder of the hidden name is another process's."""
    target, sync = tmp_path / "engine", module._sync_one

    def interrupted(path: Path) -> None:
        if path == tmp_path:
            target.rename(tmp_path / "moved")
            (tmp_path / ".engine.partial").mkdir()
            raise KeyboardInterrupt
        sync(path)

    monkeypatch.setattr(module, "_sync_one", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(target, 10):
        pass
    assert names(tmp_path) == [".engine.partial", "moved"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes the hidden folder has it; what lies there may be somebody's who is at work."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with new_folder(tmp_path / "engine", 10) as folder:
        (folder / "a").write_text("a")
        line = refusal(tmp_path / "engine")
        assert f"{tmp_path}/.engine.partial; remove that if none is running" in line
    assert names(tmp_path) == ["engine"] and names(tmp_path / "engine") == ["a"]
