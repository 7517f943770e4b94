"""``new_folder``: a folder that appears under its name when it is whole and on the disk, or not at all.

Called by whatever writes a folder: engine folders and quantized checkpoints. Until then it is a hidden sibling, locked
by the process that writes it. Knows nothing of what is written.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from backend_engine.errors import ConfigError
from backend_engine.logger import get_logger

_log = get_logger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a file system says that has no locks on folders, such as NFS.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")  # how the Rust library tells it


@contextlib.contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """A folder to write into, which is ``target`` once the block is left, and is removed if it ends in an exception.

    num_bytes: what it will take. Raises ``ConfigError`` (one line), before the block runs: ``target`` exists and is no
    empty folder, its parent cannot be written to, the disk has less room, or another process builds the same; after it:
    the room did not suffice. What a killed process left is cleared.
    """
    target = target.absolute()
    check_output(target)
    partial = target.parent / f".{target.name}.partial"
    with _owned(partial, target) as descriptor:
        try:
            _clear(partial)
            _check_target(target)  # somebody else may have finished it just before it was ours
            _check_room(target, num_bytes)
            with _room_errors(target):
                yield partial
                _sync(partial)
            _publish(partial, target)
        except BaseException:
            if _is_same(descriptor, partial):  # once it has its name, another process may be at the next one
                shutil.rmtree(partial, ignore_errors=True)
            raise


def check_output(target: Path) -> None:
    """What can be told of ``target`` before any work. Raises ``ConfigError`` as ``new_folder`` does."""
    _check_target(target.absolute())
    _check_parent(target.absolute())


def _check_target(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir() or os.listdir(target):
        raise ConfigError(f"output {target} exists already; name another or remove it")
    if target.is_mount():
        raise ConfigError(f"output {target} is a mount point, which cannot be replaced; name a folder inside it")


def _check_parent(target: Path) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"output {target}: the folder {target.parent} does not exist; make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"output {target}: the folder {target.parent} cannot be written to")


def _check_room(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ConfigError(f"output {target} takes {num_bytes} bytes, but {target.parent} has {free} bytes free")


@contextlib.contextmanager
def _owned(partial: Path, target: Path) -> Iterator[int]:
    """``partial`` exists and is this process's alone; the system ends that when the process dies. Gives it, open."""
    descriptor = None
    while descriptor is None:
        try:
            is_new = _make(partial)
            descriptor = _open_locked(partial, target, is_new)
        except OSError as error:
            raise ConfigError(f"output {target}: {partial} cannot be made: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make(partial: Path) -> bool:
    try:
        partial.mkdir()
    except FileExistsError:
        return False
    return True


def _open_locked(partial: Path, target: Path, is_new: bool) -> int | None:
    """The open folder, locked; ``None`` where whoever had it renamed or removed it meanwhile."""
    try:
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as unless_kept:
        unless_kept.callback(os.close, descriptor)
        is_locked = _lock(descriptor, partial, target, is_new)
        if not _is_same(descriptor, partial):
            return None
        if not is_locked:
            raise ConfigError(f"output {target} is being built by another process")
        unless_kept.pop_all()
    return descriptor


def _lock(descriptor: int, partial: Path, target: Path, is_new: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not is_new:  # only who made it can know whose it is
            raise ConfigError(
                f"output {target} is being built by another process, or one that was killed left {partial}; remove "
                "that if none is running"
            ) from None
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _clear(partial: Path) -> None:
    left = sorted(partial.iterdir())
    if left:
        _log.warning("clearing %s, which a build that was interrupted left with %d files", partial, len(left))
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def _room_errors(target: Path) -> Iterator[None]:
    """Tell in one line that the disk is full, however a library tells it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        match = _RUST_ERRNO.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if number not in _NO_ROOM:
            raise
        raise ConfigError(f"output {target} cannot be written: {os.strerror(number)}; nothing of it is kept") from error


def _sync(folder: Path) -> None:
    """Everything in the folder is on the disk, not only in memory."""
    for root, _, names in os.walk(folder):
        for path in (*(Path(root, name) for name in names), Path(root)):
            _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"output {target} cannot be put in its place: {error.strerror}") from None
    _sync_one(target.parent)
