"""What the command lines of scripts share: one line for what is wrong, types of values, and a progress bar."""

import argparse
import re
import sys
from typing import Any, NoReturn, Self

from tqdm import tqdm


class OneLineParser(argparse.ArgumentParser):
    """``name``: what its messages begin with. Exits with 1 after one line."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._name = name

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self._name}: {message}\n")


def whole_number(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number of 1 or more")
    return int(text)


class ProgressBar:
    """A bar on standard error, for what reports steps done, steps in all and what was just done. Nothing is shown
    before the first step, so that what is refused until then is told in one line.
    """

    def __init__(self, what: str, unit: str = "step") -> None:
        self._what, self._unit = what, unit
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            self._bar = tqdm(desc=self._what, unit=self._unit, file=sys.stderr, dynamic_ncols=True)
        if done < self._bar.n:
            # Another kind of steps has begun.
            self._bar.reset()
        self._bar.total, self._bar.n = total, done
        self._bar.set_postfix_str(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
