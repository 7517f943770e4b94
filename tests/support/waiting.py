"""``eventually``: wait for what another thread or process does. Limits are for liveness, with wide margins."""

import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], seconds: float = 10.0, pause_s: float = 0.002) -> bool:
    """Look every ``pause_s`` seconds whether ``check`` holds; False when it still does not after ``seconds``.

    Once it has held it is not asked again: what it sees may be a moment. The last look begins after the time is up.
    """
    end = time.monotonic() + seconds
    while True:
        is_last = time.monotonic() >= end
        if check():
            return True
        if is_last:
            return False
        time.sleep(pause_s)
