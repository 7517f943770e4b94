"""``NativeAttention``: attention on a CPU by the native library, over the blocks where they lie; nothing is gathered.

Used by layers through ``AttentionBackend``; ``step`` is what recorded steps read. A token's result has the same bits
alone, in a batch, in chunks and with reused blocks. Knows no maths: that is in ``ops/native/attention.h``.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec, IntArray
from backend_engine.attention.paged_kv import Fp8Kv, Int8Kv, KvScales, PagedKv
from backend_engine.ops.native_runtime import NativeStep, OpKind, native_runtime
from backend_engine.ops.torch_ops import TorchOps

_MAX_HEAD_DIM = 512
# Tokens of a row that one piece of work takes: the more, the fewer times a text is read.
_LEAST_PIECE_TOKENS, _MOST_PIECE_TOKENS = 8, 64
# Pieces of a step, for each head of the cache, unless they would be too short; as many as there are threads, at least.
_PIECES = 2
# Kinds of kv_numbers.h.
_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
_number, _address, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _AppendKv(ctypes.Structure):
    """``append_kv_op`` of attention.h."""

    _fields_ = (
        ("kind", _number), ("pool", _address), ("pool_scales", _address), ("k", _address), ("v", _address),
        ("pool_dtype", _number), ("num_kv_heads", _number), ("head_dim", _number), ("k_stride", _number),
        ("v_stride", _number), ("k_scale", _float), ("v_scale", _float),
    )  # fmt: skip


class _Attend(ctypes.Structure):
    """``attend_op`` of attention.h."""

    _fields_ = (
        ("kind", _number), ("pool", _address), ("pool_scales", _address), ("q", _address), ("sinks", _address),
        ("out", _address), ("pool_dtype", _number), ("num_heads", _number), ("num_kv_heads", _number),
        ("head_dim", _number), ("window", _number), ("q_stride", _number), ("out_stride", _number), ("scale", _float),
        ("softcap", _float), ("k_scale", _float), ("v_scale", _float),
    )  # fmt: skip


class NativeAttention(AttentionBackend):
    """See the module."""

    name = "native"
    preference = 10
    appends_by_ops = False

    def __init__(self, ops: TorchOps, device: torch.device) -> None:
        runtime = native_runtime()
        assert runtime is not None and device.type == "cpu", f"native attention without a library or on {device}"
        self._runtime = runtime
        self.native_step = self.step = NativeStep()
        """The step that ``prepare`` was last called for, at one address."""
        self._kept: Sequence[object] = ()

    @classmethod
    def unsupported(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append(f"device {device} is not a CPU")
        if dtype != torch.float32:
            reasons.append(f"dtype {dtype} is not float32")
        if spec.value_dim is not None:
            reasons.append("the cache holds one vector for keys and values")
        if spec.head_dim % 8 or spec.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim {spec.head_dim} is not a multiple of 8 up to {_MAX_HEAD_DIM}")
        if not reasons and native_runtime() is None:
            reasons.append("there is no native library")
        return reasons

    def prepare(self, metadata: AttentionMetadata) -> None:
        tables = np.ascontiguousarray(metadata.block_tables_host, np.int32)
        kv_lens = np.ascontiguousarray(metadata.kv_lens_host, np.int32)
        slots = metadata.slot_mapping
        assert slots.dtype == torch.int32 and slots.is_contiguous(), (slots.dtype, slots.stride())
        items = pieces_of_work(metadata.q_lens_host, kv_lens)
        step = self.step
        step.num_tokens = len(slots)
        step.num_items = len(items)
        step.items, step.kv_lens = _address_of(items), _address_of(kv_lens)
        step.block_tables = _address_of(tables)
        step.slot_mapping = slots.data_ptr()
        step.table_stride = tables.shape[1]
        step.tokens_per_block = metadata.tokens_per_block
        self._kept = (items, kv_lens, tables, slots)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: PagedKv, sinks: Tensor | None = None
    ) -> Tensor:
        assert (sinks is not None) == spec.has_sinks, f"layer {spec.layer_idx}: has_sinks is {spec.has_sinks}"
        assert self._kept, "forward before prepare"
        num_tokens = q.shape[0]
        assert num_tokens == self.step.num_tokens, (num_tokens, self.step.num_tokens)
        q, k, v = (_with_heads_side_by_side(x) for x in (q, k, v))
        for x in (q, k, v):
            self._runtime.check_input(x)
        kind, scales, (k_scale, v_scale) = _form_of(kv, spec)
        pool, heads, dim = kv.stored[0].data_ptr(), spec.num_kv_heads, spec.head_dim
        append = _AppendKv(
            OpKind.APPEND_KV, pool, scales, k.data_ptr(), v.data_ptr(), kind, heads, dim, k.stride(0), v.stride(0),
            k_scale, v_scale,
        )  # fmt: skip
        self._runtime.run_step_op(append, self.step, kv)
        out = self._runtime.empty(num_tokens, spec.num_heads * dim)
        sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
        attend = _Attend(
            OpKind.ATTEND, pool, scales, q.data_ptr(), None if sinks is None else sinks.data_ptr(), out.data_ptr(),
            kind, spec.num_heads, heads, dim, spec.sliding_window or 0, q.stride(0), out.stride(0), spec.scale,
            spec.logit_softcap or 0.0, k_scale, v_scale,
        )  # fmt: skip
        self._runtime.run_step_op(attend, self.step, (kv, sinks))
        return out.view(num_tokens, spec.num_heads, dim)


def pieces_of_work(q_lens: IntArray, kv_lens: IntArray) -> IntArray:
    """int32 ``[n, 4]``: row, its first token within the step, number of tokens, position of the first in its text; what
    takes longest comes first.
    """
    num_rows = len(q_lens)
    starts = np.cumsum(q_lens) - q_lens
    num_tokens = int(starts[-1] + q_lens[-1]) if num_rows else 0
    if num_tokens == num_rows and bool((q_lens == 1).all()):
        order = np.argsort(-kv_lens, kind="stable") if num_rows > 1 else np.zeros(num_rows, np.int64)
        items = np.empty((num_rows, 4), np.int32)
        items[:, 0] = items[:, 1] = order
        items[:, 2] = 1
        items[:, 3] = kv_lens[order] - 1
        return items
    size = num_tokens // max(_PIECES, torch.get_num_threads()) // 8 * 8
    size = min(max(size, _LEAST_PIECE_TOKENS), _MOST_PIECE_TOKENS)
    counts = -(-q_lens // size)
    rows = np.repeat(np.arange(num_rows), counts)
    firsts = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * size
    lengths = np.minimum(size, q_lens[rows] - firsts)
    positions = (kv_lens - q_lens)[rows] + firsts
    items = np.stack((rows, starts[rows] + firsts, lengths, positions), 1)
    order = np.argsort(-lengths * (2 * positions + lengths), kind="stable")
    return np.ascontiguousarray(items[order], np.int32)


def _form_of(kv: PagedKv, spec: AttentionSpec) -> tuple[int, int | None, KvScales]:
    """The kind of its numbers, the address of scales that lie beside them, and those of the layer."""
    numbers = kv.stored[0]
    shape = (2, spec.num_kv_heads, spec.head_dim)
    found = (numbers.shape[1], *numbers.shape[3:])
    assert found == shape and numbers.is_contiguous(), f"layer {spec.layer_idx}: cache {found}, expected {shape}"
    if isinstance(kv, Fp8Kv):
        return _KINDS[kv.dtype], None, kv.scales
    if isinstance(kv, Int8Kv):
        assert kv.stored[1].is_contiguous(), kv.stored[1].stride()
        return _KINDS[numbers.dtype], kv.stored[1].data_ptr(), KvScales()
    return _KINDS[numbers.dtype], None, KvScales()


def _with_heads_side_by_side(x: Tensor) -> Tensor:
    """``x [num_tokens, heads, head_dim]``, copied where the numbers of a token have gaps."""
    assert x.dtype == torch.float32, x.dtype
    return x if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) else x.contiguous()


def _address_of(array: IntArray) -> int:
    return int(array.__array_interface__["data"][0])
