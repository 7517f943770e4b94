"""``NativeRuntime``: runs operations of the native library (``native/native.c``), one at a time or a recorded step.

Called by the wrappers of each kind of operation, which have a reference in torch. An operation is a ctypes structure
that begins with its kind; it is float32, and a token's result has the same bits whatever other tokens and threads there
are. While a step is being recorded every operation is run and kept, with results in memory that stays (``Recording``).
"""

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from backend_engine import envs
from backend_engine.logger import get_logger
from backend_engine.ops import native_library
from backend_engine.ops.native_library import NativeLibraryError, load_library

log = get_logger(__name__)


class OpKind(IntEnum):
    """Kinds of operations, the numbers of native.h."""

    DENSE = 1
    APPEND_KV = 2
    ATTEND = 3
    RMS_NORM = 4
    ADD_RMS_NORM = 5
    ROPE = 6
    ACTIVATION = 7
    LAYER_NORM = 8
    PACKED = 9
    ROUND = 10
    SCALE = 11
    ADD = 12
    PACKED_DECODE = 13
    PACK = 14


class NativeStep(ctypes.Structure):
    """``native_step`` of native.h: what differs from step to step."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_items", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("tokens_per_block", ctypes.c_int64),
    )


class AddOp(ctypes.Structure):
    """``add_op`` of rows.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class Recording:
    """The operations of one step, to be run again for any number of tokens up to ``capacity``.

    Results are made in memory that is kept here, as wide as the most tokens need; a result that nobody holds any more
    gives its place to a later one, as it does while the step is run. ``why_not``: the reason why what was recorded is
    not all that happened, ``None`` when it is.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.why_not: str | None = None
        self._ops: list[ctypes.Structure] = []
        self._memory: list[np.ndarray[tuple[int, int], np.dtype[np.float32]]] = []
        self._free: dict[int, list[np.ndarray[tuple[int, int], np.dtype[np.float32]]]] = {}
        self._kept: list[object] = []
        self._adopted: list[tuple[int, int]] = []
        self._addresses: ctypes.Array[ctypes.c_void_p] | None = None

    @property
    def ops(self) -> Sequence[ctypes.Structure]:
        """What was run, in order."""
        return self._ops

    def replace(self, ops: Sequence[ctypes.Structure]) -> None:
        """Run ``ops`` instead, which may read what those before them did, these themselves too."""
        self._kept.append(self._ops)
        self._ops, self._addresses = list(ops), None

    def same_memory(self, address: int, other: int) -> bool:
        """Whether both lie in the memory of one result."""
        return any(start <= address < stop and start <= other < stop for start, stop in self._spans())

    @property
    def num_bytes(self) -> int:
        """Memory of the results."""
        return sum(array.nbytes for array in self._memory)

    def keep(self, op: ctypes.Structure, owner: object) -> None:
        """Another operation, and what owns the memory that it reads."""
        self._ops.append(op)
        self._kept.append(owner)

    def empty(self, num_tokens: int, width: int) -> Tensor:
        """float32 ``[num_tokens, width]`` within memory of ``[capacity, width]``."""
        assert num_tokens <= self.capacity, (num_tokens, self.capacity)
        free = self._free.setdefault(width, [])
        if free:
            array = free.pop()
        else:
            # Numpy takes zeroed pages from the system, each when it is first written.
            array = np.zeros((self.capacity, width), np.float32)
            self._memory.append(array)
        view = array[:num_tokens]
        # The view is what the tensor, and each view of that, hold on to.
        weakref.finalize(view, free.append, array).atexit = False
        return torch.from_numpy(view)

    def whole(self, x: Tensor) -> Tensor:
        """All of the memory that the result ``x`` is the beginning of, ``[capacity, width]``."""
        address = x.data_ptr()
        return torch.from_numpy(next(array for array in self._memory if array.ctypes.data == address))

    def adopt(self, x: Tensor) -> None:
        """Let operations read ``x``, which stays where it is and is filled before each step."""
        self._kept.append(x)
        self._adopted.append((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()))

    def holds(self, x: Tensor) -> bool:
        """Whether ``x`` lies in the memory of results, or in what was adopted."""
        address = x.data_ptr()
        return any(start <= address < stop for start, stop in (*self._spans(), *self._adopted))

    def _spans(self) -> Iterator[tuple[int, int]]:
        """First address of each result's memory, and the one behind it."""
        return ((array.ctypes.data, array.ctypes.data + array.nbytes) for array in self._memory)

    def addresses(self) -> "ctypes.Array[ctypes.c_void_p]":
        """Of all operations."""
        if self._addresses is None:
            self._addresses = (ctypes.c_void_p * len(self._ops))(*(ctypes.addressof(op) for op in self._ops))
        return self._addresses


class NativeRuntime:
    """``library``: the compiled source. Serves one thread at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._run = library.native_run
        self._run.argtypes = (address, number, address, threads)
        self._run_one = library.native_run_one
        self._run_one.argtypes = (address, number, threads)
        self._profile = library.native_profile
        self._profile.argtypes = (address, number, address, threads, address)
        self.lanes = int(library.native_lanes())
        self.has_avx2 = bool(library.native_has_avx2())
        self.has_vnni = bool(library.native_has_vnni())
        self._local = threading.local()

    @property
    def _recording(self) -> Recording | None:
        """Of the calling thread."""
        return getattr(self._local, "recording", None)

    @property
    def is_recording(self) -> bool:
        """Whether the calling thread's operations are kept."""
        return self._recording is not None

    def run(self, op: ctypes.Structure, num_tokens: int, owner: object = None) -> None:
        """Run ``op`` for ``num_tokens`` tokens. ``owner``: keeps alive what it reads besides activations."""
        if self._recording is not None:
            self._recording.keep(op, owner)
        _check(self._run_one(ctypes.addressof(op), num_tokens, torch.get_num_threads()))

    def run_step_op(self, op: ctypes.Structure, step: NativeStep, owner: object = None) -> None:
        """Run an operation that reads more of the step than its number of tokens."""
        if self._recording is not None:
            self._recording.keep(op, owner)
        one = ctypes.c_void_p(ctypes.addressof(op))
        _check(self._run(ctypes.addressof(one), 1, ctypes.addressof(step), torch.get_num_threads()))

    def replay(self, recording: Recording, step: NativeStep) -> None:
        """All operations of ``recording``, for the tokens of ``step``."""
        assert step.num_tokens <= recording.capacity, (step.num_tokens, recording.capacity)
        addresses = recording.addresses()
        _check(self._run(addresses, len(addresses), ctypes.addressof(step), torch.get_num_threads()))

    def profile(self, recording: Recording, step: NativeStep) -> list[float]:
        """As ``replay``: seconds of each operation."""
        addresses = recording.addresses()
        seconds = np.zeros(len(addresses))
        num_threads = torch.get_num_threads()
        address = ctypes.addressof(step)
        _check(self._profile(addresses, len(addresses), address, num_threads, seconds.ctypes.data))
        return [float(each) for each in seconds]

    def empty(self, num_tokens: int, width: int) -> Tensor:
        """float32 ``[num_tokens, width]`` for an operation's result."""
        if self._recording is not None:
            return self._recording.empty(num_tokens, width)
        return torch.empty(num_tokens, width)

    def check_input(self, x: Tensor) -> None:
        """Called for every activation that an operation reads: a recorded step may read nothing but what recorded
        operations, or the step's beginning, have written.
        """
        recording = self._recording
        if recording is not None and recording.why_not is None and not recording.holds(x):
            recording.why_not = "something between two native operations is computed by torch"

    @contextmanager
    def record(self, recording: Recording) -> Iterator[None]:
        """Keep what is run meanwhile."""
        assert self._recording is None, "one recording at a time"
        self._local.recording = recording
        try:
            yield
        finally:
            self._local.recording = None


def _check(status: int) -> None:
    if status:
        raise MemoryError("the native library found no memory for a thread's scratch")


@functools.cache
def native_runtime() -> NativeRuntime | None:
    """The runtime of this process, compiled if need be; ``None`` without it, and the log says why."""
    if envs.ENGINE_OPS.get() == "torch":
        log.info("operators on a CPU are torch's (ENGINE_OPS=torch)")
        return None
    start = time.perf_counter()
    try:
        runtime = NativeRuntime(load_library(native_library.SOURCE, *native_library.included_files()))
    except NativeLibraryError as error:
        log.warning("operators on a CPU are torch's, which is slower: %s", error)
        return None
    vectors = "AVX2" if runtime.has_avx2 and runtime.lanes == 8 else f"{runtime.lanes} numbers a vector"
    vectors += ", VNNI for integers" if runtime.has_vnni else ""
    log.info("native operators (%s): loaded in %.1f s", vectors, time.perf_counter() - start)
    return runtime
