"""Products with packed weights on a CPU, in C (``native/packed.h``): a thin, typed wrapper.

Called by the weight schemes, which have a reference in torch for where there is none of it. A row of a result has the
same bits whatever other tokens, rows and threads there are. Knows no checkpoint formats.
"""

import ctypes
import functools
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.logger import get_logger
from backend_engine.ops.native_runtime import AddOp, NativeRuntime, OpKind, native_runtime

log = get_logger(__name__)

_SCALES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.uint8: 4,  # powers of two with bias 127
}
# Tokens a multiple of so many columns apart would compete for the same lines of a cache; padded if they are many.
_COLUMNS_APART = 512
_MANY_TOKENS = 16


class Codes(IntEnum):
    """What the codes of a weight are; the numbers are those of the C source."""

    INT4 = 0
    INT8 = 1
    CODEBOOK4 = 2
    E4M3 = 3
    E5M2 = 4


class PackedWeight(NamedTuple):
    """``(code - zero) * scale``, of integers ``+ offset``, of a codebook ``* row_scale``.

    codes: ``[rows, columns]``, or ``[rows, columns / 2]`` with two of four bits a byte, the first in the lower half.
    scales: ``[rows, groups]``, uint8 = powers of two with bias 127. group_size: columns of a group, ``None`` = all.
    zeros (uint8; without them ``midpoint`` is the zero) and offsets (float32): as scales. row_scale: float32 ``[rows,
    1]``. values: the sixteen of the codebook.
    """

    kind: Codes
    codes: Tensor
    scales: Tensor
    group_size: int | None
    midpoint: float = 0.0
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    row_scale: Tensor | None = None
    values: tuple[float, ...] = ()

    def num_columns(self) -> int:
        """Columns of the decoded weight."""
        return self.codes.shape[1] * (2 if self.kind in (Codes.INT4, Codes.CODEBOOK4) else 1)


class _NativeWeight(ctypes.Structure):
    """``packed_weight`` of the C source."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("values", ctypes.c_float * 16),
        ("midpoint", ctypes.c_float),
        ("codes_kind", ctypes.c_int32),
        ("scales_kind", ctypes.c_int32),
    )


class _PackedOp(ctypes.Structure):
    """``packed_op`` of packed.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


class _DecodeOp(ctypes.Structure):
    """``packed_decode_op`` of packed.h."""

    _fields_ = (("kind", ctypes.c_int64), ("w", ctypes.c_void_p), ("out", ctypes.c_void_p))


class PackedProducts:
    """Products by ``runtime``."""

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def multiply(self, weight: PackedWeight, x: Tensor) -> Tensor:
        """``x [num_tokens, columns]`` times the weight, ``[num_tokens, rows]`` in the dtype of ``x``."""
        columns = weight.num_columns()
        assert x.ndim == 2 and x.shape[1] == columns, (x.shape, columns)
        (num_tokens, _), num_rows = x.shape, weight.codes.shape[0]
        if not (num_tokens and num_rows and columns):
            return x.new_zeros(num_tokens, num_rows)
        native = _native(weight, columns)
        wide = self._whole_vectors(x, columns)
        self._runtime.check_input(wide)
        out = self._runtime.empty(num_tokens, num_rows)
        op = _PackedOp(OpKind.PACKED, ctypes.addressof(native), wide.data_ptr(), wide.stride(0), out.data_ptr())
        self._runtime.run(op, num_tokens, (native, weight))
        return out.to(x.dtype)

    def _whole_vectors(self, x: Tensor, columns: int) -> Tensor:
        """``x`` in float32, with zeros up to a whole vector where a row has none of its own."""
        padding = -columns % self._runtime.lanes
        is_recorded = self._runtime.is_recording
        if x.shape[0] >= _MANY_TOKENS and (columns + padding) % _COLUMNS_APART == 0 and not is_recorded:
            padding += self._runtime.lanes
        wide = x.to(torch.float32)
        if padding:
            return F.pad(wide, (0, padding))
        return wide if wide.stride(1) == 1 else wide.contiguous()

    def decode(self, weight: PackedWeight) -> Tensor:
        """The weight, float32 ``[rows, columns]``: what ``multiply`` multiplies with, bit for bit."""
        columns = weight.num_columns()
        out = torch.empty(weight.codes.shape[0], columns)
        if out.numel():
            native = _native(weight, columns)
            self._runtime.run(_DecodeOp(OpKind.PACKED_DECODE, ctypes.addressof(native), out.data_ptr()), 1, native)
        return out

    def add_bias(self, out: Tensor, bias: Tensor) -> None:
        """``out [num_tokens, rows] += bias [rows]``, in place; float32 without gaps."""
        address = out.data_ptr()
        op = AddOp(OpKind.ADD, address, bias.data_ptr(), address, out.stride(0), 0, out.shape[1])
        self._runtime.check_input(out)
        self._runtime.run(op, out.shape[0], bias)


def _native(weight: PackedWeight, columns: int) -> _NativeWeight:
    kind, codes, scales, group_size, midpoint, zeros, offsets, row_scale, values = weight
    num_rows, size = codes.shape[0], columns if group_size is None else group_size
    num_groups = -(-columns // size)
    assert scales.shape == (num_rows, num_groups), (scales.shape, codes.shape, group_size)
    assert zeros is None or (zeros.shape == scales.shape and zeros.dtype == torch.uint8), zeros
    assert offsets is None or (offsets.shape == scales.shape and offsets.dtype == torch.float32), offsets
    is_integer, is_codebook = kind in (Codes.INT4, Codes.INT8), kind == Codes.CODEBOOK4
    assert (is_integer or (zeros is None and offsets is None)) and (is_codebook or row_scale is None), kind
    assert row_scale is None or (row_scale.numel() == num_rows and row_scale.dtype == torch.float32), row_scale
    return _NativeWeight(
        num_rows, columns, size, num_groups, codes.data_ptr(), scales.data_ptr(), _address(zeros), _address(offsets),
        _address(row_scale), values, midpoint, kind, _SCALES[scales.dtype],
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def multiply_packed(weight: PackedWeight, x: Tensor) -> Tensor | None:
    """``x [num_tokens, columns]`` times the weight; ``None`` where it has to be done in another way: not on a CPU, no
    library, tensors with gaps, or ``x`` of a dtype other than the three that models run in.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    tensors = (weight.codes, weight.scales, weight.zeros, weight.offsets, weight.row_scale)
    if not all(t is None or t.is_contiguous() for t in tensors):
        return None
    products = packed_products()
    return None if products is None else products.multiply(weight, x)


def add_bias(out: Tensor, bias: Tensor) -> Tensor:
    """``out [num_tokens, rows] += bias [rows]``, in place."""
    is_plain = out.dtype == bias.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()
    products = packed_products() if is_plain else None
    if products is None:
        return out.add_(bias)
    products.add_bias(out, bias)
    return out


@functools.cache
def packed_products() -> PackedProducts | None:
    """The products of this process; ``None`` without a native library, or where it gives wrong answers."""
    runtime = native_runtime()
    if runtime is None:
        return None
    products = PackedProducts(runtime)
    if not gives_right_answers(products):
        log.warning("packed weights are multiplied by torch, which is slow: the compiled products give wrong answers")
        return None
    return products


def gives_right_answers(products: PackedProducts) -> bool:
    """Every kind of code on a small case, all of whose numbers are exact in float32."""
    columns, size = 80, 16
    byte = torch.arange(3 * columns).view(3, columns).mul(7).remainder(120).to(torch.uint8)
    halves = byte[:, : columns // 2].contiguous()
    nibbles = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
    values = tuple(float(i * i - 40) for i in range(16))
    decoded = {
        Codes.INT4: nibbles.float() - 8,
        Codes.INT8: byte.float() - 128,
        Codes.CODEBOOK4: torch.tensor(values)[nibbles.long()],
        Codes.E4M3: byte.clamp(48, 80).view(torch.float8_e4m3fn).float(),
        Codes.E5M2: byte.clamp(48, 72).view(torch.float8_e5m2).float(),
    }
    codes = {
        Codes.INT4: halves,
        Codes.INT8: byte,
        Codes.CODEBOOK4: halves,
        Codes.E4M3: byte.clamp(48, 80),
        Codes.E5M2: byte.clamp(48, 72),
    }
    scales = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.5]).repeat(3, 1)
    x = torch.arange(4 * columns).view(4, columns).remainder(5).float() - 2
    for kind, plain in decoded.items():
        midpoint = {Codes.INT4: 8.0, Codes.INT8: 128.0}.get(kind, 0.0)
        weight = PackedWeight(kind, codes[kind], scales, size, midpoint, values=values)
        expected = plain * scales.repeat_interleave(size, 1)
        for tokens in (x, x[:1]):
            if not torch.equal(products.multiply(weight, tokens), tokens @ expected.T):
                return False
    return True
