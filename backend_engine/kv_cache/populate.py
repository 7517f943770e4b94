"""Takes the memory of a CPU's KV pool from the system in the background, soon after the start.

The pool's pages come from the system when they are first written. Left alone, the process would grow for hours while
the cache fills, and might find no memory late. ``populate_in_background`` is called by the composition root; what the
pages hold is not changed, so the engine runs meanwhile. Linux 5.14 or later; elsewhere nothing happens.
"""

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Sequence

from backend_engine.logger import get_logger

_log = get_logger(__name__)

_MADV_POPULATE_WRITE = 23
_CHUNK_BYTES = 32 << 20
# A chunk's time is followed by this many times as much sleep: the first requests need the cores.
_REST = 3.0


def populate_in_background(owner: object, regions: Sequence[tuple[int, int]]) -> threading.Thread:
    """Start populating ``regions``, each an address and a number of bytes, which live as long as ``owner`` does.

    The thread ends when it is done, when the system refuses, or when ``owner`` is gone.
    """
    alive = weakref.ref(owner)
    thread = threading.Thread(target=_populate, args=(alive, regions), name="kv-pool-populate", daemon=True)
    thread.start()
    return thread


def _populate(alive: "weakref.ref[object]", regions: Sequence[tuple[int, int]]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for address, num_bytes in regions:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(begin, end, _CHUNK_BYTES):
            owner = alive()
            if owner is None:
                return
            started = time.perf_counter()
            if libc.madvise(start, min(_CHUNK_BYTES, end - start), _MADV_POPULATE_WRITE) != 0:
                _log.info("the KV pool's memory is taken as it fills up (errno %d)", ctypes.get_errno())
                return
            del owner
            time.sleep(_REST * (time.perf_counter() - started))
