"""The rooms that ``PyExecutor.step`` walks through, as the executor sees them.

Logits are opaque here: they go from ``ModelEngine`` to ``Decoder`` untouched, so the executor needs no torch
and its tests run with fakes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.outputs import DecoderOutput, KvUsage
from backend_engine.core.protocols import KvCapacity
from backend_engine.core.request import LlmRequest
from backend_engine.executor.fault_injection import NoFaults
from backend_engine.executor.step_dump import NoDump

IntArray = NDArray[np.int32]


class RequestSchedulerRoom(Protocol):
    """Decides who runs (``scheduler.RequestScheduler``)."""

    def add(self, request: LlmRequest) -> None: ...
    def remove(self, request: LlmRequest) -> None: ...
    def schedule(self, kv: KvCapacity) -> SchedulerOutput: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...


class KvCacheRoom(KvCapacity, Protocol):
    """Owns the blocks (``kv_cache.KVCacheManager``)."""

    @property
    def num_used_blocks(self) -> int: ...
    @property
    def num_reused_blocks_total(self) -> int: ...
    def usage(self, request_id: int) -> KvUsage: ...
    def prepare_resources(self, output: SchedulerOutput) -> None: ...
    def update_resources(self, output: SchedulerOutput) -> None: ...
    def free_resources(self, request: LlmRequest) -> None: ...
    def block_tables(self, output: SchedulerOutput) -> IntArray: ...
    def check_integrity(self, requests: Iterable[LlmRequest]) -> None: ...


class ModelEngineRoom(Protocol):
    """Turns rows into logits (``model_engine.ModelEngine``)."""

    def forward(self, output: SchedulerOutput, block_tables: IntArray) -> Any: ...


class DecodeHandleRoom(Protocol):
    """Tokens that are on their way."""

    def wait(self) -> DecoderOutput: ...


class DecoderRoom(Protocol):
    """Turns logits into tokens (``decoder.Decoder``)."""

    def decode_async(self, logits: Any, output: SchedulerOutput) -> DecodeHandleRoom: ...
    def remove(self, request_id: int) -> None: ...


@dataclass(frozen=True)
class Rooms:
    """Everything a step needs, built by ``executor/build.py``."""

    scheduler: RequestSchedulerRoom
    kv_cache: KvCacheRoom
    model_engine: ModelEngineRoom
    decoder: DecoderRoom
    faults: NoFaults = field(default_factory=NoFaults)
    dump: NoDump = field(default_factory=NoDump)
