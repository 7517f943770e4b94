"""``GgufHeader``: what a GGUF file says before the bytes of its tensors, its metadata and the list of its tensors.

Read by the checkpoint reader and by the tokenizer's. Follows the GGUF specification (ggml/docs/gguf.md), versions 2 and
3, little-endian. Walks the header once (0.1 s for 260,000 tokens) and decodes a value when it is asked for. Never
touches a tensor's bytes; every fault is a one-line ``ModelLoadError`` that names file and key.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from backend_engine.config.regular_files import open_regular
from backend_engine.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type of the file -> how struct writes one.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_PROJECTOR = "mmproj"  # begins the names of files with an image encoder, which lie beside the language model
_MAX_DIMS = 4
_MAX_NAME_CHARS = 1000  # of a key or a tensor; the format's own limits are 65535 and 64
_SHOWN_CHARS = 60


class GgufTensor(NamedTuple):
    """dims: sizes, the fastest-changing first (a matrix of N rows of K numbers is ``(K, N)``). type_id: ggml's number
    of the packing. offset: where its bytes begin, from the beginning of the file.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class _Entry(NamedTuple):
    """type_id: of the value or an array's items. length: the array's, ``None`` for one value. at: its first byte."""

    type_id: int
    length: int | None
    at: int


class GgufHeader:
    """The header of one file. Made by ``read_gguf_header``; any thread may read it. Holds no open file."""

    def __init__(self, path: Path, data: bytes, entries: dict[str, _Entry], tensors: tuple[GgufTensor, ...]) -> None:
        self.path = path
        self.tensors = tensors
        """In the order of the file; names differ. Whether their bytes are there is not checked."""
        self._data = data
        self._entries = entries

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        """The keys, in the order of the file."""
        return iter(self._entries)

    def get(self, key: str) -> Any:
        """The value: an int, float, bool or str, or a tuple of those; ``None`` when there is none.

        ``ModelLoadError`` for text that is not UTF-8.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.type_id == _STRING:
            texts = self._texts(key, entry)
            return texts[0] if entry.length is None else tuple(texts)
        kind = _SCALARS[entry.type_id]
        if entry.length is None:
            return struct.unpack_from(f"<{kind}", self._data, entry.at)[0]
        return struct.unpack_from(f"<{entry.length}{kind}", self._data, entry.at)

    def refuse(self, key: str, allowed: str) -> ModelLoadError:
        """The error for a value that is not allowed or missing; the caller raises it."""
        entry = self._entries.get(key)
        if entry is None:
            found = "is missing"
        elif entry.length is not None:
            found = f"is an array of {entry.length}"
        else:
            found = f"is {_shown(self.get(key))}"
        return ModelLoadError(f"{self.path}: {key} {found}; expected {allowed}")

    def text(self, key: str, default: str | None = None) -> str:
        """A text; without a default it must be there."""
        value = default if key not in self else self.get(key)
        if not isinstance(value, str):
            raise self.refuse(key, "a text")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0; without a default it must be there."""
        value = default if key not in self else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(key, "an integer of at least 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key) if key in self else default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of texts; it must be there."""
        entry = self._entries.get(key)
        if entry is None or entry.length is None or entry.type_id != _STRING:
            raise self.refuse(key, "an array of texts")
        return tuple(self._texts(key, entry))

    def integers(self, key: str) -> tuple[int, ...]:
        """An array of integers; it must be there."""
        return self._numbers(key, "BbHhIiQq", "integers")

    def numbers(self, key: str) -> tuple[float, ...]:
        """An array of numbers; it must be there."""
        return self._numbers(key, "BbHhIiQqfd", "numbers")

    def _numbers(self, key: str, kinds: str, what: str) -> tuple[Any, ...]:
        entry = self._entries.get(key)
        if entry is None or entry.length is None or _SCALARS.get(entry.type_id, "?") not in kinds:
            raise self.refuse(key, f"an array of {what}")
        values: tuple[Any, ...] = self.get(key)
        return values

    def _texts(self, key: str, entry: _Entry) -> list[str]:
        data, at, texts = self._data, entry.at, []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(1 if entry.length is None else entry.length):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                texts.append(data[begin:at].decode("utf-8"))
        except UnicodeDecodeError as error:
            place = key if entry.length is None else f"{key}[{len(texts)}]"
            raise ModelLoadError(f"{self.path}: {place} is {_shown(error.object)}; expected UTF-8 text") from None
        return texts


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file. ``ModelLoadError`` for a file that is no GGUF, cut off or of another version."""
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).header()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # mmap has nothing to map
        raise ModelLoadError(f"{path} is empty; expected a GGUF file") from None


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` means: itself, or the only model of that kind in a folder, of its parts the first.

    Files with an image encoder (``mmproj...``) do not count. ``None`` for a folder without one and for other files;
    ``ModelLoadError`` for a folder with several models, or without the first part of one.
    """
    if not path.is_dir():
        return path if path.suffix == ".gguf" else None
    models: dict[str, Path] = {}
    for file in sorted(path.glob("*.gguf")):
        if file.is_file() and not file.name.startswith(_PROJECTOR):
            split = _SPLIT.fullmatch(file.name)
            models.setdefault(f"{split[1]}-of-{split[3]}" if split else file.name, file)
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise ModelLoadError(f"{path} has {len(models)} GGUF models ({names}); name the one that is meant")
    found = next(iter(models.values()), None)
    return None if found is None else split_files(found)[0]


def split_files(path: Path) -> list[Path]:
    """All parts of the model that ``path`` (NAME-00001-of-0000N.gguf, or any other part) belongs to, in order.

    A file of another name is the whole model. ``ModelLoadError`` when a part is missing.
    """
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    parts = [path.with_name(f"{split[1]}-{i:05}-of-{split[3]}.gguf") for i in range(1, int(split[3]) + 1)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None or path not in parts:
        raise ModelLoadError(f"{missing or path} does not belong to a whole model; expected {len(parts)} parts of it")
    return parts


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class _Walk:
    """One way through a file's header. ``at``: the next byte. ``place``: what is being read, for messages."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._place = "the header"

    def header(self) -> GgufHeader:
        self._check_format()
        num_tensors, num_entries = self._take("Q"), self._take("Q")
        entries: dict[str, _Entry] = {}
        for number in range(num_entries):
            self._place = f"metadata entry {number + 1} of {num_entries}"
            key = self._text()
            self._place = key
            if key in entries:
                raise ModelLoadError(f"{self._path}: {key} is there twice; expected each key once")
            entries[key] = self._entry()
        tensors = [self._tensor(number, num_tensors) for number in range(num_tensors)]
        data = self._data[: self._at]
        header = GgufHeader(self._path, data, entries, ())
        return GgufHeader(self._path, data, entries, self._placed(tensors, header))

    def _placed(self, tensors: list[GgufTensor], header: GgufHeader) -> tuple[GgufTensor, ...]:
        """The tensors with offsets from the beginning of the file, where they are stated from that of the tensors."""
        alignment = header.count("general.alignment", 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise header.refuse("general.alignment", "a power of two")
        begin = -(-self._at // alignment) * alignment
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names or tensor.offset % alignment:
                what = "is there twice" if tensor.name in names else f"begins at {tensor.offset}"
                raise ModelLoadError(
                    f"{self._path}: tensor {tensor.name} {what}; expected each once, at multiples of {alignment}"
                )
            names.add(tensor.name)
        return tuple(tensor._replace(offset=begin + tensor.offset) for tensor in tensors)

    def _check_format(self) -> None:
        magic = self._data[:4]
        if magic != _MAGIC:
            raise ModelLoadError(
                f"{self._path} begins with {magic!r}; expected a GGUF file, which begins with {_MAGIC!r}"
            )
        self._at = 4
        version = self._take("I")
        if version not in _VERSIONS:
            is_big = version & 0xFFFF == 0
            found = "is big-endian" if is_big else f"has GGUF version {version}"
            raise ModelLoadError(f"{self._path} {found}; expected version 2 or 3, little-endian")

    def _entry(self) -> _Entry:
        type_id = self._take("I")
        length = None
        if type_id == _ARRAY:
            type_id, length = self._take("I"), self._take("Q")
        entry = _Entry(type_id, length, self._at)
        num = 1 if length is None else length
        if type_id == _STRING:
            self._skip_texts(num)
        elif type_id in _SCALARS:
            self._skip(num * struct.calcsize(f"<{_SCALARS[type_id]}"))
        else:
            what = "a value" if length is None else "an array"
            raise ModelLoadError(
                f"{self._path}: {self._place} is {what} of type {type_id}; expected 0 to 8 or 10 to 12"
            )
        return entry

    def _tensor(self, number: int, total: int) -> GgufTensor:
        self._place = f"tensor {number + 1} of {total}"
        name = self._text()
        self._place = f"tensor {name}"
        num_dims = self._take("I")
        if num_dims > _MAX_DIMS:
            raise ModelLoadError(f"{self._path}: tensor {name} has {num_dims} dimensions; expected {_MAX_DIMS} at most")
        dims = tuple(self._take("Q") for _ in range(num_dims))
        return GgufTensor(name, dims, self._take("I"), self._take("Q"))

    def _take(self, kind: str) -> int:
        begin = self._at
        self._skip(struct.calcsize(f"<{kind}"))
        value: int = struct.unpack_from(f"<{kind}", self._data, begin)[0]
        return value

    def _text(self) -> str:
        begin = self._at
        length = self._take("Q")
        self._skip(length)
        data = self._data[begin + 8 : self._at]
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self._path}: {self._place} is called {_shown(data)}; expected UTF-8 text") from None
        if not text.isprintable() or len(text) > _MAX_NAME_CHARS:
            allowed = f"at most {_MAX_NAME_CHARS} characters that can be printed"
            raise ModelLoadError(f"{self._path}: {self._place} is called {_shown(text)}; expected {allowed}")
        return text

    def _skip_texts(self, num: int) -> None:
        unpack, data, at, last = struct.Struct("<Q").unpack_from, self._data, self._at, self._size - 8
        for _ in range(num):
            if at > last:
                raise self._cut_off()
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._skip(0)

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > self._size:
            raise self._cut_off()

    def _cut_off(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path} is cut off or corrupt: it has {self._size} bytes, and {self._place} goes on behind them"
        )
