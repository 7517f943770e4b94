"""Reads a Triton Server log while it grows: which models are loading, loaded or failed, and why.

The launcher calls it. Harmless lines of a machine without a GPU are never reported. It never writes.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_LOADING = re.compile(r'\] "loading: (?P<name>.+):(?P<version>\d+)"')
_LOADED = re.compile(r"\] \"successfully loaded '(?P<name>[^']+)'\"")
_FAILED = re.compile(r"\] \"failed to load '(?P<name>[^']+)' version \d+: (?P<reason>.*)\"$")
_POLL_FAILED = re.compile(r"\] \"Poll failed for model directory '(?P<name>[^']+)': (?P<reason>.*)\"$")
_LIBRARY = re.compile(r"(?P<text>[^:\s]+: error while loading shared libraries: .*)$")
_CREATING = re.compile(r"^error: creating server: (?P<reason>.*)$")
_ERROR_LINE = re.compile(r"^E\d{4} [\d:.]+ \d+ \S+\] (?P<text>.*)$")
_HARMLESS = ("NVML", "DCGM", "CudaDriverHelper", "unable to create stream", "pinned system memory")
_STATUS_WORD = re.compile(r"^(Internal|Invalid argument|Unavailable|Not found|Unsupported|Unknown): ")
_MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class ModelEvent:
    """One model changed state; ``state`` is ``loading``, ``loaded`` or ``failed`` (then with a one-line ``reason``)."""

    model: str
    state: str
    reason: str = ""


class ServerLog:
    """Follows the log file at ``path`` from byte ``start`` on.

    ``poll`` returns what is new, ``relevant_error`` the line that matters.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._offset = start
        self._partial = b""
        self._errors: dict[str, str] = {}
        self._last_line = ""

    def poll(self) -> list[ModelEvent]:
        """Read the lines written since the last call and return the model events among them, in order."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        events = (self._read_line(line.decode(errors="replace")) for line in lines)
        return [event for event in events if event is not None]

    def relevant_error(self) -> str:
        """Return one line that says best why the server is not up: missing library, model, configuration, other."""
        for kind in ("library", "failed", "poll", "creating", "error"):
            if kind in self._errors:
                return self._errors[kind]
        return self._last_line or "the server wrote no log"

    def _read_line(self, line: str) -> ModelEvent | None:
        if line.strip():
            self._last_line = line.strip()[:_MAX_REASON_CHARS]
        if match := _LOADING.search(line):
            return ModelEvent(match["name"], "loading")
        if match := _LOADED.search(line):
            return ModelEvent(match["name"], "loaded")
        if match := _FAILED.search(line):
            reason = _one_line(match["reason"])
            self._errors.setdefault("failed", f"model {match['name']!r} failed to load: {reason}")
            return ModelEvent(match["name"], "failed", reason)
        self._note_error(line)
        return None

    def _note_error(self, line: str) -> None:
        if match := _LIBRARY.search(line):
            self._errors.setdefault("library", match["text"])
        elif match := _POLL_FAILED.search(line):
            self._errors.setdefault("poll", f"model folder {match['name']!r}: {_one_line(match['reason'])}")
        elif match := _CREATING.search(line):
            self._errors.setdefault("creating", _one_line(match["reason"]))
        elif (match := _ERROR_LINE.search(line)) and not any(word in line for word in _HARMLESS):
            self._errors["error"] = _one_line(match["text"].strip('"'))


def _one_line(reason: str) -> str:
    """Cut Triton's reason to its first line, without its status word and the Python traceback."""
    first = reason.split("\\n\\nAt:")[0].replace("\\n", " ").strip()
    while _STATUS_WORD.match(first):
        first = _STATUS_WORD.sub("", first)
    return first[:_MAX_REASON_CHARS]
