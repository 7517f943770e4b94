"""Texts that a model is calibrated and judged with, as windows of token ids.

Called by ``scripts/quantize.py`` before any long work. Without a file the texts are the topics of Python's own manual,
which every Python brings: prose and code, half of them to calibrate with and the other half to judge with.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO, NamedTuple

from backend_engine.config.regular_files import open_regular
from backend_engine.errors import ConfigError, shown
from backend_engine.text.tokenizer import Tokenizer

_CALIBRATION, _EVALUATION = 0, 1
# Of a long file, the beginning is read: so many times what is needed, from which windows are taken at equal distances.
_SPREAD = 8
_PIECE_CHARS = 1 << 16
_LONG_CHARS = 60  # of a paragraph that says something of its own


class WindowLimits(NamedTuple):
    """vocab_size: of the model's embedding; max_positions: tokens that a text may have; ``None`` = no limit known."""

    vocab_size: int | None = None
    max_positions: int | None = None


def calibration_windows(
    tokenizer: Tokenizer, path: Path | None, num_windows: int, window_len: int, limits: WindowLimits = WindowLimits()
) -> list[list[int]]:
    """At most ``num_windows`` windows of ``window_len`` ids, fewer where the text has no more, always the same ones.
    Each begins with what the tokenizer puts in front of a text.

    path: a .txt file, or a .jsonl file with a text under ``text`` in each line; ``None`` = the texts of the module.
    Raises ``ConfigError``, one line that names the file.
    """
    return _windows(tokenizer, _Text(path, _CALIBRATION), (num_windows, window_len), limits)


def evaluation_windows(
    tokenizer: Tokenizer, path: Path | None, num_windows: int, window_len: int, limits: WindowLimits = WindowLimits()
) -> list[list[int]]:
    """The same from other texts: without ``path``, from topics that ``calibration_windows`` has nothing of."""
    return _windows(tokenizer, _Text(path, _EVALUATION), (num_windows, window_len), limits)


class _Text(NamedTuple):
    """A file, or which half of the topics."""

    path: Path | None
    half: int

    @property
    def where(self) -> str:
        return "the text of Python's topics" if self.path is None else str(self.path)

    def pieces(self) -> Iterator[str]:
        if self.path is None:
            return _topics(self.half)
        if self.path.suffix not in (".txt", ".jsonl"):
            raise ConfigError(f"{self.path} is no text to calibrate with; expected a file named .txt or .jsonl")
        return _lines(self.path)


def _topics(half: int) -> Iterator[str]:
    """Every other topic, in the order of their names. They quote each other at length: a paragraph counts once, where
    it is met first, those of the first half before all of the second.
    """
    names = sorted(topics)
    seen: set[str] = set()
    for number in range(half + 1):
        for name in names[number::2]:
            paragraphs = topics[name].split("\n\n")
            kept = [paragraph for paragraph in paragraphs if paragraph.strip() not in seen]
            seen.update(text for text in map(str.strip, paragraphs) if len(text) >= _LONG_CHARS)
            if number == half and kept:
                yield "\n\n".join(kept) + "\n\n"


def _lines(path: Path) -> Iterator[str]:
    """The texts of a .jsonl file; of any other some lines at a time."""
    try:
        with open_regular(path) as file:
            yield from _texts(path, file) if path.suffix == ".jsonl" else _joined(path, file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _texts(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(_decoded(path, file), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} line {number} is not valid JSON: {shown(line)}") from None
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{path} line {number} is {shown(value)}; expected an object with a text under 'text'")
        yield text


def _joined(path: Path, file: IO[bytes]) -> Iterator[str]:
    lines: list[str] = []
    num_chars = 0
    for line in _decoded(path, file):
        lines.append(line)
        num_chars += len(line)
        if num_chars >= _PIECE_CHARS:
            yield "".join(lines)
            lines, num_chars = [], 0
    yield "".join(lines)


def _decoded(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} line {number} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _windows(tokenizer: Tokenizer, text: _Text, size: tuple[int, int], limits: WindowLimits) -> list[list[int]]:
    num_windows, window_len = size
    prefix = tokenizer.encode("")
    _check_size(num_windows, window_len, len(prefix), limits)
    body_len = window_len - len(prefix)
    ids: list[int] = []
    for piece in text.pieces():
        ids += _encoded(tokenizer, text, piece)
        if text.path is not None and len(ids) >= _SPREAD * num_windows * body_len:
            break
    if len(ids) < body_len:
        raise ConfigError(f"{text.where} has {len(ids)} tokens; a window needs {body_len}")
    _check_ids(ids, text.where, limits)
    available = len(ids) // body_len
    count = min(num_windows, available)
    starts = (window * available // count * body_len for window in range(count))
    return [[*prefix, *ids[start : start + body_len]] for start in starts]


def _encoded(tokenizer: Tokenizer, text: _Text, piece: str) -> list[int]:
    """Ids of a text, in which nothing is a control token."""
    try:
        piece.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text.where} has half of a surrogate pair; expected Unicode text") from None
    return tokenizer.encode_plain(piece)


def _check_size(num_windows: int, window_len: int, prefix_len: int, limits: WindowLimits) -> None:
    if num_windows < 1:
        raise ConfigError(f"the number of windows is {num_windows}; expected at least 1")
    least = prefix_len + 2
    if window_len < least:
        raise ConfigError(f"the length of a window is {window_len}; expected at least {least} tokens")
    if limits.max_positions is not None and window_len > limits.max_positions:
        raise ConfigError(
            f"the length of a window is {window_len}; the model takes texts of at most {limits.max_positions} tokens"
        )


def _check_ids(ids: list[int], where: str, limits: WindowLimits) -> None:
    highest = max(ids)
    if limits.vocab_size is not None and highest >= limits.vocab_size:
        raise ConfigError(
            f"the tokenizer gives the id {highest} for {where}, but the model's vocabulary has {limits.vocab_size} "
            "tokens; expected the model's own tokenizer"
        )
