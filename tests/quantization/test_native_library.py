"""``native_library``: what is compiled once and kept, what is made anew, and what is done without."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from backend_engine.ops import native_library

SMALL = "int answer(void) { return %d; }"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept; empty."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def small(fresh: Path, tmp_path: Path) -> Path:
    source = tmp_path / "small.c"
    source.write_text(SMALL % 42)
    return source


def test_a_library_is_compiled_once(small: Path, fresh: Path) -> None:
    assert native_library.load_library(small).answer() == 42
    (library,) = fresh.iterdir()
    before = library.stat()
    assert native_library.load_library(small).answer() == 42
    assert [path.name for path in fresh.iterdir()] == [library.name]
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_another_source_is_another_library(small: Path, fresh: Path) -> None:
    native_library.load_library(small)
    small.write_text(SMALL % 43)
    assert native_library.load_library(small).answer() == 43
    assert len(list(fresh.iterdir())) == 2


def test_another_file_that_the_source_includes_is_another_library(small: Path, fresh: Path) -> None:
    header = small.with_name("number.h")
    small.write_text('#include "number.h"\nint answer(void) { return NUMBER; }')
    for number in (1, 2):
        header.write_text(f"#define NUMBER {number}")
        assert native_library.load_library(small, header).answer() == number
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_broken_library_is_made_anew(small: Path, fresh: Path, damage: str) -> None:
    native_library.load_library(small)
    (library,) = fresh.iterdir()
    content = library.read_bytes()
    broken = {"cut": content[: len(content) // 2], "changed": content.replace(b"answer", b"anwser"), "emptied": b""}
    library.unlink()
    library.write_bytes(broken[damage])
    assert not native_library._is_intact(library)
    assert native_library.load_library(small).answer() == 42
    assert native_library._is_intact(library)


def test_a_library_of_another_user_is_not_trusted(small: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_library.load_library(small)
    (library,) = fresh.iterdir()
    owner = library.stat().st_uid
    monkeypatch.setattr(native_library.os, "getuid", lambda: owner)
    assert native_library._is_intact(library)
    if owner == 0:
        os.chown(library, 1234, -1)
    else:
        monkeypatch.setattr(native_library.os, "getuid", lambda: owner + 1)
    assert not native_library._is_intact(library)


def test_a_cache_that_cannot_be_written(
    small: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    caplog.set_level("INFO")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "file"))
    assert native_library.load_library(small).answer() == 42
    assert "compiled libraries cannot be kept" in caplog.text


def test_a_compiler_that_does_not_know_this_processor(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("cc") or shutil.which("gcc")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nfor a; do [ "$a" = -march=native ] && exit 1; done; exec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert native_library.load_library(small).answer() == 42
