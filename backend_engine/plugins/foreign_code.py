"""``call_foreign``: the border to code that is not ours. Whatever it raises becomes one line that names the plugin.

Used wherever a plugin's code is called while it is loaded, and where a request uses it. Knows no plugins.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

from backend_engine.errors import ConfigError, EngineError

T = TypeVar("T")


def call_foreign(
    owner: str, what: str, call: Callable[[], T], error_class: Callable[[str], EngineError] = ConfigError
) -> T:
    """What ``call`` returns. Whatever it raises becomes an ``error_class``: ``owner``, ``what``, the error and its place."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # border: a plugin; one line, told by whoever catches it
        raise error_class(f"{owner}: {what}: {in_a_line(error)}") from error


def in_a_line(error: BaseException) -> str:
    """Class and text of an error in one line, and the file and line where it was raised."""
    text = " ".join(str(error).split())
    place = next((frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if _is_file(frame)), None)
    where = "" if place is None else f" ({place.filename}:{place.lineno})"
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def _is_file(frame: traceback.FrameSummary) -> bool:
    """Whether the frame is in a file that somebody may look at; Python's own importing is not."""
    return not frame.filename.startswith("<")
