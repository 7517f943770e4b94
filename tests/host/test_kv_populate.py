"""The pool's memory is taken soon after the start, without changing what it holds."""

import ctypes
import gc
import mmap
import time
from pathlib import Path

import numpy as np

from backend_engine.kv_cache import populate


class Owner:
    """Holds memory that is fresh from the system (numpy's own may be a piece that was used before)."""

    def __init__(self, num_bytes: int) -> None:
        self.array = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)

    @property
    def region(self) -> tuple[int, int]:
        return self.array.ctypes.data, self.array.nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def can_populate() -> bool:
    page = np.zeros(1 << 16, np.uint8)
    address = -(-page.ctypes.data // 4096) * 4096
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(4096), 23) == 0


def test_the_memory_is_taken_and_holds_what_it_held() -> None:
    owner = Owner(100 << 20)
    owner.array[12345] = 7
    before = resident_bytes()
    populate.populate_in_background(owner, [owner.region]).join(30)
    grown = resident_bytes() - before
    assert (grown > 90 << 20) == can_populate(), grown
    assert owner.array[12345] == 7 and int(owner.array.sum()) == 7


def test_the_thread_ends_with_its_owner() -> None:
    before = resident_bytes()
    owner = Owner(2 << 30)
    thread = populate.populate_in_background(owner, [owner.region])
    time.sleep(0.02)
    del owner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert resident_bytes() < before + (1 << 30)
