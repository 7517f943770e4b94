"""Files that hold files: folders, tar archives and the zip files that torch writes, read in place.

``open_files`` is for the formats that are a folder or a tar of one; ``stored_members`` for zip files. Nothing is
unpacked to a path, and nothing outside is reached: links, devices, names that leave the archive, sparse members and
archives that unpack to far more than they are end in a one-line ``ModelLoadError``.
"""

import errno
import gzip
import io
import mmap
import os
import re
import tarfile
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from backend_engine.config.regular_files import open_regular
from backend_engine.errors import ModelLoadError, one_line, shown

# A model's numbers hardly shrink by compression: what grows by more is no model.
MAX_GROWTH = 20
MAX_MEMBERS = 100_000
_MAX_TAR_HEADER = 1 << 16
_TAR_KIND = 156
_LONG_NUMBER = re.compile(rb"\d{64}")
_CHUNK = 1 << 22
# Linux: a private mapping takes memory for what is touched only, however large the file.
_MAP_NORESERVE = 0x4000
_ZIP_LOCAL_HEADER = 30


class MappedFile:
    """A whole file in the address space, pages read when touched. ``label`` names it in messages."""

    def __init__(self, file: IO[bytes], label: str) -> None:
        self.label = label
        self.size = os.fstat(file.fileno()).st_size
        self._map: mmap.mmap | None = None
        if self.size:
            flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(file.fileno(), self.size, flags=flags, prot=access)

    def view(self) -> memoryview:
        """All bytes; writing to them changes this process's copy, not the file."""
        return memoryview(self._map) if self._map is not None else memoryview(bytearray())

    def forget(self, start: int, size: int) -> None:
        """Give the memory of whole pages within the range back; they are read again when touched."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if self._map is not None and length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


class Window(NamedTuple):
    """``size`` bytes of ``file`` from ``start`` on. ``label`` names it in messages."""

    file: MappedFile
    start: int
    size: int
    label: str

    def view(self) -> memoryview:
        return self.file.view()[self.start : self.start + self.size]

    def part(self, start: int, size: int, label: str) -> "Window":
        """A window within this one."""
        assert start >= 0 and size >= 0 and start + size <= self.size, f"{label}: {start} + {size} of {self.size} bytes"
        return Window(self.file, self.start + start, size, label)


class _WindowFile(io.RawIOBase):
    """A window as a seekable file."""

    def __init__(self, window: Window) -> None:
        self._view = window.view()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self._view[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def open_window(path: Path) -> Window:
    """A whole file of the disk. Raises ``ModelLoadError``."""
    try:
        with open_regular(path) as file:
            mapped = MappedFile(file, str(path))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    return Window(mapped, 0, mapped.size, str(path))


def as_file(window: Window) -> io.BufferedReader:
    """The window as a seekable file."""
    return io.BufferedReader(_WindowFile(window))


def stored_members(window: Window) -> dict[str, Window]:
    """The members of a zip file, each where it lies. Raises ``ModelLoadError`` for a damaged file and for members that
    are compressed, encrypted, named twice, overlapping or beyond the end.
    """
    try:
        with zipfile.ZipFile(as_file(window)) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error) as error:
        raise ModelLoadError(f"{window.label} is not a whole zip file ({one_line(error)})") from None
    if len(listed) > MAX_MEMBERS:
        raise ModelLoadError(f"{window.label} holds {len(listed)} members; expected at most {MAX_MEMBERS}")
    view, members = window.view(), {}
    for item in listed:
        label = f"{window.label}: member {shown(item.filename)}"
        if not item.filename.isprintable():
            raise ModelLoadError(f"{label} has a name that cannot be printed")
        if item.filename in members:
            raise ModelLoadError(f"{label} is there twice")
        if item.compress_type != zipfile.ZIP_STORED or item.flag_bits & 1 or item.file_size != item.compress_size:
            raise ModelLoadError(f"{label} is compressed or encrypted; expected it stored as it is")
        header = bytes(view[item.header_offset : item.header_offset + _ZIP_LOCAL_HEADER])
        start = item.header_offset + _ZIP_LOCAL_HEADER
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if item.header_offset < 0 or header[:4] != b"PK\x03\x04" or start + item.file_size > window.size:
            raise ModelLoadError(f"{label} is beyond the end of the file ({window.size} bytes)")
        members[item.filename] = window.part(start, item.file_size, f"{window.label}: {item.filename}")
    _refuse_overlaps(members)
    return members


def _refuse_overlaps(members: dict[str, Window]) -> None:
    end = 0
    for member in sorted((m for m in members.values() if m.size), key=lambda m: m.start):
        if member.start < end:
            raise ModelLoadError(f"{member.label} overlaps the member before it")
        end = member.start + member.size


class FileTree(ABC):
    """Files by their names relative to ``path``, with slashes."""

    path: Path

    @abstractmethod
    def names(self) -> list[str]:
        """All files, sorted."""

    @abstractmethod
    def window(self, name: str) -> Window:
        """The bytes of one of them."""

    def read(self, name: str, limit: int) -> bytes:
        """All bytes of one of them, which is refused beyond ``limit`` bytes."""
        window = self.window(name)
        if window.size > limit:
            raise ModelLoadError(f"{window.label} has {window.size} bytes; expected at most {limit}")
        return bytes(window.view())


class FolderTree(FileTree):
    """The files of a folder of the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        self._names = sorted(files)

    def names(self) -> list[str]:
        return list(self._names)

    def window(self, name: str) -> Window:
        return open_window(self.path / name)


class TarTree(FileTree):
    """The files of a tar archive, read where they lie; one that is compressed by gzip is first expanded into a
    temporary file without a name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = open_window(path)
        self._archive = _expanded(whole) if bytes(whole.view()[:2]) == b"\x1f\x8b" else whole
        self._members = _tar_members(self._archive)

    def names(self) -> list[str]:
        return sorted(self._members)

    def window(self, name: str) -> Window:
        return self._members[name]


def open_files(path: Path) -> FileTree:
    """The files of a folder or of a tar archive. Raises ``ModelLoadError``."""
    return FolderTree(path) if path.is_dir() else TarTree(path)


def is_tar(path: Path) -> bool:
    """Whether the file begins as a tar archive does, or as one compressed by gzip."""
    try:
        with open_regular(path) as file:
            head = file.read(512)
    except OSError:
        return False
    return head[257:262] == b"ustar" or head[:2] == b"\x1f\x8b"


def _expanded(window: Window) -> Window:
    limit = window.size * MAX_GROWTH + _CHUNK
    with tempfile.TemporaryFile() as target:
        try:
            source = gzip.GzipFile(fileobj=as_file(window))
            while chunk := source.read(_CHUNK):
                if target.tell() + len(chunk) > limit:
                    raise ModelLoadError(
                        f"{window.label} unpacks to more than {MAX_GROWTH} times its {window.size} bytes; expected the "
                        "weights of a model"
                    )
                target.write(chunk)
            target.flush()
        except (OSError, EOFError, zlib.error) as error:
            reason = one_line(error)
            raise ModelLoadError(f"{window.label} cannot be unpacked ({reason}); expected a whole archive") from None
        mapped = MappedFile(target, window.label)
    return Window(mapped, 0, mapped.size, window.label)


class _BoundedTarInfo(tarfile.TarInfo):
    """Headers are checked before anything of their size is read."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_BoundedTarInfo":
        """``tarfile`` searches extended headers in time that grows with the square of their longest run of digits."""
        file: Any = archive.fileobj
        at = file.tell()
        head = file.read(tarfile.BLOCKSIZE)
        if head[_TAR_KIND : _TAR_KIND + 1] in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
            size = cls.frombuf(head, archive.encoding or "utf-8", archive.errors or "strict").size
            if _LONG_NUMBER.search(file.read(size)):
                raise tarfile.ReadError("an extended header with a number of many digits")
        file.seek(at)
        return super().fromtarfile(archive)

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_BoundedTarInfo":
        info = super().frombuf(buf, encoding, errors)
        is_name = info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if info.size < 0:
            raise tarfile.ReadError(f"member {shown(info.name)} has {info.size} bytes")
        if (is_name or info.type not in tarfile.SUPPORTED_TYPES) and info.size > _MAX_TAR_HEADER:
            raise tarfile.ReadError(f"a header of {info.size} bytes; expected at most {_MAX_TAR_HEADER}")
        return info


def _tar_members(window: Window) -> dict[str, Window]:
    members: dict[str, Window] = {}
    try:
        with tarfile.open(fileobj=as_file(window), mode="r:", tarinfo=_BoundedTarInfo) as archive:
            for count, item in enumerate(archive):
                if count >= MAX_MEMBERS:
                    raise ModelLoadError(f"{window.label} holds more than {MAX_MEMBERS} members")
                if not item.isdir():
                    name, member = _tar_member(window, item)
                    if name in members:
                        raise ModelLoadError(f"{member.label} is there twice")
                    members[name] = member
            rest = window.view()[archive.offset : archive.offset + tarfile.BLOCKSIZE]
            # What tarfile cannot read, it takes for the end.
            if any(rest):
                raise tarfile.ReadError(f"a damaged header at byte {archive.offset}")
    except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{window.label} is not a whole tar archive ({one_line(error)})") from None
    return members


def _tar_member(window: Window, item: tarfile.TarInfo) -> tuple[str, Window]:
    path = PurePosixPath(item.name)
    label = f"{window.label}: member {shown(item.name)}"
    if not item.name.isprintable():
        raise ModelLoadError(f"{label} has a name that cannot be printed")
    if path.is_absolute() or ".." in path.parts or "\\" in item.name or "\0" in item.name:
        raise ModelLoadError(f"{label} leaves the archive; expected a name within it")
    if item.issparse():
        raise ModelLoadError(f"{label} is sparse; expected a plain file")
    if not item.isreg():
        raise ModelLoadError(f"{label} is a link or a device; expected a plain file")
    if item.size < 0 or item.offset_data + item.size > window.size:
        raise ModelLoadError(f"{label} has {item.size} bytes, more than the archive holds ({window.size} bytes)")
    return path.as_posix(), window.part(item.offset_data, item.size, f"{window.label}: {path.as_posix()}")
