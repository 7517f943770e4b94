"""Compiles a C source of this package with the machine's own compiler and loads it; the library is kept in a cache.

Called once by the wrapper of each source. Knows nothing of what the library does, and never falls back by itself:
whatever stands in the way is a ``NativeLibraryError`` that says it in one line.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from backend_engine import envs
from backend_engine.errors import EngineError
from backend_engine.logger import get_logger

log = get_logger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
# For this very machine; a compiler that does not know the flag does without.
_NATIVE = "-march=native"
_COMPILER_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size


class NativeLibraryError(EngineError):
    """There is no compiler, it failed, or its library cannot be loaded; the message is one line."""


FOLDER = Path(__file__).with_name("native")
SOURCE = FOLDER / "native.c"


def compile_ahead(tell: Callable[[], None]) -> None:
    """Put the native library into the cache; ``tell`` is called before, unless it is there. For launchers: a model that
    compiles while a server starts it keeps that waiting. Raises ``NativeLibraryError``; ``OSError`` without a cache
    that can be written.
    """
    compiler = _find_compiler()
    flags = _flags(compiler)
    library = _cached(SOURCE, included_files(), compiler, flags)
    if _is_intact(library):
        return
    tell()
    library.parent.mkdir(parents=True, exist_ok=True)
    _compile(compiler, flags, SOURCE, library)


def included_files() -> tuple[Path, ...]:
    """What ``SOURCE`` includes."""
    return tuple(sorted(FOLDER.glob("*.h")))


def load_library(source: Path, *included: Path) -> ctypes.CDLL:
    """The compiled ``source``: from the cache if it holds one of the same source (and the files that it includes),
    compiler, flags and processor.

    A library that was damaged, or that another user put there, is made anew. Without a cache that can be written, it is
    compiled into a temporary folder and gone with the process. Raises ``NativeLibraryError``.
    """
    compiler = _find_compiler()
    flags = _flags(compiler)
    try:
        library = _cached(source, included, compiler, flags)
        if not _is_intact(library):
            library.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, flags, source, library)
    except (OSError, RuntimeError) as error:  # RuntimeError: of a user without a home
        log.info("compiled libraries cannot be kept: %s", error)
        with tempfile.TemporaryDirectory(prefix="inflight-") as temporary:
            library = Path(temporary) / f"{source.stem}.so"
            _compile(compiler, flags, source, library)
            return _open(library)
    return _open(library)


def _cached(source: Path, included: tuple[Path, ...], compiler: str, flags: tuple[str, ...]) -> Path:
    """Where the library is kept. Raises ``RuntimeError`` for a user without a home."""
    content = b"".join(path.read_bytes() for path in (source, *included))
    key = hashlib.sha256(content + repr(flags).encode() + _described(compiler, flags)).hexdigest()
    return Path(envs.INFLIGHT_CACHE.get()).expanduser() / "native" / f"{source.stem}-{key[:20]}.so"


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeLibraryError(f"there is no C compiler ({', '.join(_COMPILERS)})")


def _flags(compiler: str) -> tuple[str, ...]:
    probe = _run([compiler, _NATIVE, "-E", "-x", "c", os.devnull])
    return (*_FLAGS, _NATIVE) if probe.returncode == 0 else _FLAGS


def _described(compiler: str, flags: tuple[str, ...]) -> bytes:
    """What the compiler defines by itself: its version, and the instructions that it may use with these flags."""
    return _run([compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]).stdout.encode()


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_COMPILER_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeLibraryError(f"the C compiler {command[0]} cannot be run: {error}") from None


def _is_intact(library: Path) -> bool:
    """Whether the file is there, whole, and ours: its last bytes are the checksum of those before."""
    try:
        if library.stat().st_uid not in (os.getuid(), 0):
            return False
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(compiler: str, flags: tuple[str, ...], source: Path, library: Path) -> None:
    """Written under another name and renamed, so that two processes do not see half of each other's."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        done = _run([compiler, *flags, str(source), "-o", name])
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            reason = next((line for line in lines if "error" in line), (lines or ["it said nothing"])[0])
            raise NativeLibraryError(f"the C compiler {compiler} failed on {source.name}: {reason}")
        with unfinished.open("ab") as file:
            file.write(hashlib.sha256(unfinished.read_bytes()).digest())
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeLibraryError(f"the compiled library cannot be loaded: {error}") from None
