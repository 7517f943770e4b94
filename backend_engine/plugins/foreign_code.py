"""``call_foreign``: the border to code that is not ours. Whatever it raises becomes one line that names the plugin.

Used wherever a plugin's code is called while it is loaded, and where a request uses it. Knows no plugins.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

from backend_engine.errors import ConfigError, EngineError

T = TypeVar("T")
_MAX_SHOWN = 500


def call_foreign(owner: str, what: str, call: Callable[[], T], error_class: type[EngineError] = ConfigError) -> T:
    """What ``call`` returns. Whatever it raises becomes an ``error_class``: ``owner``, ``what`` and the error; for the
    operator (``ConfigError``) also its file and line, which are none of a client's business.
    """
    try:
        return call()
    except EngineError as error:
        if str(error).startswith(owner):
            raise
        raise error_class(f"{owner}: {what}: {error}") from error
    except (Exception, SystemExit) as error:  # border: a plugin; one line, told by whoever catches it
        raise error_class(f"{owner}: {what}: {in_a_line(error, error_class is ConfigError)}") from error


def in_a_line(error: BaseException, with_place: bool) -> str:
    """Class and text of an error in one line, and the file and line where it was raised."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if with_place and frames else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
