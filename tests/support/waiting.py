"""``eventually``: wait for what another thread or process does. Limits are for liveness, with wide margins."""

import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], seconds: float = 10.0, pause_s: float = 0.002) -> bool:
    """Look every ``pause_s`` seconds whether ``check`` holds; False when it still does not after ``seconds``."""
    end = time.monotonic() + seconds
    while not check() and time.monotonic() < end:
        time.sleep(pause_s)
    return check()
