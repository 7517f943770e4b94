"""The files of an engine folder against what engine.json lists: which there are, their sizes and their checksums.

Called by whoever opens such a folder, and ``entry_of`` by whoever writes one. Regular files only, or links to some, as
the Hub's cache has them. Reads bytes, knows nothing of what they mean.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend_engine.config.engine_manifest import ENGINE_FILE, EngineManifest, FileEntry
from backend_engine.config.regular_files import open_regular
from backend_engine.errors import ModelLoadError

WEIGHTS_SUFFIX = ".safetensors"
_READ_BYTES = 1 << 23
_MAX_THREADS = 16
Progress = Callable[[int, int, str], None]
"""Called with files checked so far, files in all, and the name of the last one."""


def is_engine_folder(path: Path) -> bool:
    """Whether the folder has an engine.json, of whatever content."""
    return os.path.lexists(path / ENGINE_FILE)


def weight_names(manifest: EngineManifest) -> list[str]:
    """Names of the files with weights, of all ranks, sorted."""
    return sorted(name for name in manifest.files if name.endswith(WEIGHTS_SUFFIX))


def check_listed(folder: Path, manifest: EngineManifest) -> None:
    """Every file that engine.json lists is there and has its size, and nothing else but hidden names. Reads no file.

    Raises ``ModelLoadError`` (one line).
    """
    for name in sorted(manifest.files):
        num_bytes, listed = _size(folder / name), manifest.files[name].num_bytes
        if num_bytes != listed:
            raise ModelLoadError(f"{folder / name} was changed or cut off: {num_bytes} bytes instead of {listed}")
    known = {*manifest.files, ENGINE_FILE}
    try:
        others = sorted(name for name in os.listdir(folder) if name not in known and not name.startswith("."))
    except OSError as error:
        raise ModelLoadError(f"engine folder {folder} cannot be read: {error.strerror}") from None
    if others:
        shown = others[0] if others[0].isprintable() else ascii(others[0])
        raise ModelLoadError(f"engine folder {folder} holds {shown}, which {ENGINE_FILE} does not list")


def check_small_files(folder: Path, manifest: EngineManifest) -> None:
    """The checksum of every file but those of weights. Raises ``ModelLoadError`` (one line) for the first wrong one."""
    for name in sorted(manifest.files.keys() - weight_names(manifest)):
        _check(folder / name, manifest.files[name], threading.Event())


def check_weight_files(
    folder: Path, manifest: EngineManifest, progress: Progress | None = None, stop: threading.Event | None = None
) -> None:
    """The checksum of every file of weights, several at a time. Raises ``ModelLoadError`` (one line) for the first
    wrong one, and once ``stop`` is set for any.
    """
    names, stop = weight_names(manifest), stop or threading.Event()
    num_threads = max(1, min(len(names), os.cpu_count() or 1, _MAX_THREADS))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checksum") as pool:
        checks = [pool.submit(_check, folder / name, manifest.files[name], stop) for name in names]
        try:
            for i, (name, check) in enumerate(zip(names, checks, strict=True)):
                check.result()
                if progress:
                    progress(i + 1, len(names), name)
        finally:  # the rest, where one was wrong or somebody is tired of waiting
            stop.set()


def entry_of(path: Path) -> FileEntry:
    """What engine.json says of a file that was written. Raises ``OSError``."""
    return _entry(path, None, threading.Event())


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist, but {ENGINE_FILE} lists it") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{path} is no regular file; expected one, since {ENGINE_FILE} lists it")
    return status.st_size


def _check(path: Path, listed: FileEntry, stop: threading.Event) -> None:
    _size(path)
    try:
        found = _entry(path, listed.num_bytes, stop)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    if found.num_bytes != listed.num_bytes:
        raise ModelLoadError(f"{path} was changed or cut off: it has not the {listed.num_bytes} bytes that are listed")
    if found.sha256 != listed.sha256:
        raise ModelLoadError(f"{path} was changed or damaged: sha256 {found.sha256} instead of {listed.sha256}")


def _entry(path: Path, limit: int | None, stop: threading.Event) -> FileEntry:
    """Size and checksum, of no more than one byte beyond ``limit``. Once stopped: of what was read so far, since
    nobody asks for it any more.
    """
    digest, num_bytes, buffer = hashlib.sha256(), 0, memoryview(bytearray(_READ_BYTES))
    with open_regular(path) as file:
        while not stop.is_set():
            room = _READ_BYTES if limit is None else min(_READ_BYTES, limit + 1 - num_bytes)
            num_read = file.readinto(buffer[:room])  # type: ignore[attr-defined]
            if not num_read:
                break
            digest.update(buffer[:num_read])
            num_bytes += num_read
    return FileEntry(num_bytes, digest.hexdigest())
