"""Products with plain weights on a CPU, in C (``native/dense.h``): a thin wrapper, and a reference in torch.

Called by the quantization methods; ``dense_packing.py`` makes the weights. A row of a result has the same bits whatever
other tokens and threads there are. Integers are multiplied as such: int8 weights have a scale for each row, int16 ones
for each row of 64 columns (block floating point), and tokens are rounded in the same blocks; of W8A8 tokens have 7
bits, too, with a factor for each 32 columns. Knows no checkpoint formats.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.ops.native_runtime import OpKind, native_runtime

PANEL_ROWS = 16
# A weight is packed, or multiplied by the reference, in parts of about so many numbers.
_CHUNK_NUMBERS = 1 << 18
# Those of dense_int.h; the largest code of a token and of a weight.
_INT8_BLOCK, _INT16_BLOCK = 512, 64
_SMALLEST_PEAK = 1e-30
_PART, _LARGEST_FACTOR = 32, 511
ZERO_CODE = 128  # of W8A8, whose codes have no sign


class DenseKind(IntEnum):
    """What the numbers of a weight are; the values are those of the C source."""

    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3
    I16 = 4
    W8A8 = 5

    @classmethod
    def of(cls, precision: str) -> "DenseKind":
        """By ``weight_only_precision`` of ``EngineArgs``; a float32 dtype's own for all other names."""
        kinds = {"float16": cls.F16, "bfloat16": cls.BF16, "int8": cls.I8, "int16": cls.I16, "w8a8": cls.W8A8}
        return kinds.get(precision, cls.F32)

    @property
    def for_head(self) -> "DenseKind":
        """Of the projection to the vocabulary, for which tokens of 7 bits would cost more than they save."""
        return DenseKind.I8 if self == DenseKind.W8A8 else self

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored numbers."""
        return (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.uint8)[self]

    @property
    def unit(self) -> int:
        """Columns that are packed together."""
        return {DenseKind.I8: 2, DenseKind.I16: 2, DenseKind.W8A8: 4}.get(self, 1)

    @property
    def is_integer(self) -> bool:
        """Whether tokens are rounded, too."""
        return self >= DenseKind.I8

    @property
    def largest_codes(self) -> tuple[int, int]:
        """Of weights and of tokens; a block's sums of their products are less than 2^31."""
        return {DenseKind.I16: (4095, 8191), DenseKind.W8A8: (127, 64)}.get(self, (127, 32767))

    def block(self, columns: int) -> int:
        """Columns whose sum is an exact integer: at most 512 of int8, in equal lengths but for whole pairs or parts."""
        if self == DenseKind.I16:
            return _INT16_BLOCK
        equal, whole = -(-columns // -(-columns // _INT8_BLOCK)), _PART if self == DenseKind.W8A8 else 2
        return -(-equal // whole) * whole

    def num_blocks(self, columns: int) -> int:
        """Scales of a token."""
        return -(-columns // self.block(columns))


class NativeWeight(ctypes.Structure):
    """``dense_weight`` of the C source."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )

    @property
    def is_integer(self) -> bool:
        """Whether it is multiplied in integers."""
        return DenseKind(self.kind).is_integer


class DenseOp(ctypes.Structure):
    """``dense_op`` of the C source."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rounded", ctypes.c_void_p),
        ("rounded_stride", ctypes.c_int64),
        ("gated", ctypes.c_void_p),
    )


class RoundOp(ctypes.Structure):
    """``round_op`` of the C source."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("weight_kind", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A packed weight.

    data: panels of 16 rows, column after column: ``[panels, columns, 16]``, of integers two or four columns together
    ``[panels, units, 16, columns of a unit]``; zeros behind the last row and column. Of W8A8 128 is added to the codes.
    scales: float32, of int8 and W8A8 ``[panels * 16]``, of int16 ``[panels, blocks, 16]``, else ``None``. bias: float32
    ``[panels * 16]`` or ``None``.
    """

    kind: DenseKind
    rows: int
    columns: int
    data: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @cached_property
    def native(self) -> NativeWeight:
        """What the C source reads; this object has to live as long."""
        scales, bias = (None if t is None else t.data_ptr() for t in (self.scales, self.bias))
        return NativeWeight(self.rows, self.columns, self.kind, self.data.data_ptr(), scales, bias)

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return sum(t.nbytes for t in (self.data, self.scales, self.bias) if t is not None)


def dense_bytes(kind: DenseKind, rows: int, columns: int) -> int:
    """Memory of a packed weight without its bias."""
    padded = num_panels(rows) * PANEL_ROWS
    if not kind.is_integer:
        return padded * columns * kind.dtype.itemsize
    num_scales = kind.num_blocks(columns) if kind == DenseKind.I16 else 1
    return padded * (num_units(kind, columns) * kind.unit * kind.dtype.itemsize + 4 * num_scales)


def unpack_dense(w: DenseWeight) -> Tensor:
    """The weight that is multiplied, float32 ``[rows, columns]``."""
    out = torch.empty(w.rows, w.columns)
    for start, stop in row_parts(out):
        part = _rows(w, start, stop).to(torch.float32)
        if w.kind == DenseKind.I16:
            part *= _block_scales(w, start, stop).repeat_interleave(_INT16_BLOCK, 1)[:, : w.columns]
        elif w.scales is not None:
            part *= w.scales[start:stop, None]
        out[start:stop] = part
    return out


def multiply_dense(w: DenseWeight, x: Tensor) -> Tensor | None:
    """``x [num_tokens, columns]`` times the weight, plus its bias: ``[num_tokens, rows]`` in the dtype of ``x``;
    ``None`` where there is no native library.
    """
    runtime = native_runtime()
    if runtime is None:
        return None
    assert x.ndim == 2 and x.shape[1] == w.columns, (x.shape, w.columns)
    runtime.check_input(x)
    num_tokens, dtype = x.shape[0], x.dtype
    if dtype != torch.float32 or x.stride(1) != 1:
        x = x.to(torch.float32).contiguous()
        runtime.check_input(x)
    op = DenseOp(OpKind.DENSE, ctypes.addressof(w.native), x.data_ptr(), x.stride(0))
    if w.kind.is_integer:
        rounded = runtime.empty(num_tokens, _rounded_width(w.kind, w.columns))
        op.rounded, op.rounded_stride = rounded.data_ptr(), rounded.stride(0)
        into = RoundOp(OpKind.ROUND, op.x, op.x_stride, w.columns, w.kind, op.rounded, op.rounded_stride)
        runtime.run(into, num_tokens)
    out = runtime.empty(num_tokens, w.rows)
    op.out, op.out_stride = out.data_ptr(), out.stride(0)
    runtime.run(op, num_tokens, w)
    return out.to(dtype)


def dense_reference(w: DenseWeight, x: Tensor) -> Tensor:
    """What ``multiply_dense`` gives, in torch: the same bits of integers, of others the same within rounding."""
    wide = x.to(torch.float32)
    if not w.kind.is_integer:
        return F.linear(wide, unpack_dense(w), None if w.bias is None else w.bias[: w.rows]).to(x.dtype)
    assert w.scales is not None
    out = torch.empty(x.shape[0], w.rows)
    block = w.kind.block(w.columns)
    for start, stop in row_parts(out.T):
        part = _rows(w, start, stop).to(torch.float64)
        block_scales = _block_scales(w, start, stop) if w.kind == DenseKind.I16 else None
        total = torch.zeros(x.shape[0], stop - start)
        for number, begin in enumerate(range(0, w.columns, block)):
            of_block = wide[:, begin : begin + block]
            codes, scales = _round_in_parts(of_block) if w.kind == DenseKind.W8A8 else _round_tokens(of_block, w.kind)
            exact = codes @ part[:, begin : begin + block].T
            total += exact.to(torch.float32) * (scales if block_scales is None else scales * block_scales[:, number])
        out[:, start:stop] = total * w.scales[start:stop] if block_scales is None else total
    return (out if w.bias is None else out + w.bias[: w.rows]).to(x.dtype)


def num_panels(rows: int) -> int:
    """Of a weight of so many rows."""
    return -(-rows // PANEL_ROWS)


def num_units(kind: DenseKind, columns: int) -> int:
    """Of a row of so many columns."""
    return -(-columns // kind.unit)


def _rounded_width(kind: DenseKind, columns: int) -> int:
    """Floats of a token's codes and scales. An odd number of cache lines, so that tokens do not compete for them."""
    num_words, num_blocks = num_units(kind, columns), kind.num_blocks(columns)
    if kind == DenseKind.W8A8:
        num_words, num_blocks = num_words + -(-columns // _PART), 2 * num_blocks
    lines = -(-(num_words + num_blocks) // 16)
    return 16 * (lines + (lines % 2 == 0))


def row_parts(weight: Tensor) -> Iterator[tuple[int, int]]:
    """First rows of parts of a weight of some 2^18 numbers, and the ones behind their last: whole panels."""
    rows = weight.shape[0]
    step = max(1, _CHUNK_NUMBERS // max(weight.shape[1], 1) // PANEL_ROWS) * PANEL_ROWS
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _rows(w: DenseWeight, start: int, stop: int) -> Tensor:
    """The numbers as they are stored ``[stop - start, columns]``; ``start``: the first row of a panel."""
    panels = w.data[start // PANEL_ROWS : num_panels(stop)]
    panels = panels.permute(0, 2, 1, 3).flatten(2) if w.kind.is_integer else panels.transpose(1, 2)
    rows = panels.reshape(-1, panels.shape[2])[: stop - start, : w.columns]
    return rows.to(torch.int16) - ZERO_CODE if w.kind == DenseKind.W8A8 else rows


def _block_scales(w: DenseWeight, start: int, stop: int) -> Tensor:
    """Of int16, ``[stop - start, blocks]``; ``start``: the first row of a panel."""
    assert w.scales is not None
    panels = w.scales[start // PANEL_ROWS : num_panels(stop)]
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[: stop - start]


def _round_tokens(x: Tensor, kind: DenseKind) -> tuple[Tensor, Tensor]:
    """Integers in float64 ``[num_tokens, columns]`` and scales ``[num_tokens, 1]`` of a block, as in dense_int16.h."""
    peaks, largest = x.abs().amax(1, keepdim=True), kind.largest_codes[1]
    is_number = peaks.isfinite()
    is_used = is_number & (peaks >= _SMALLEST_PEAK)
    # A number divided by a tensor would be multiplied with its reciprocal.
    factors = torch.where(is_used, torch.full_like(peaks, largest) / peaks, 0.0)
    codes = torch.where(is_used, x * factors, 0.0).round()
    scales = torch.where(is_used, peaks / largest, 0.0)
    return codes.to(torch.float64), torch.where(is_number, scales, torch.nan)


def _round_in_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_round_tokens``, as in dense_int8.h: codes times the factor of their part, which are integers as well."""
    (num_tokens, columns), largest = x.shape, DenseKind.W8A8.largest_codes[1]
    parts = F.pad(x, (0, -columns % _PART)).view(num_tokens, -1, _PART)
    peaks = parts.abs().amax(2, keepdim=True)
    peak = peaks.amax(1, keepdim=True)
    is_number = peak.isfinite()
    is_used = is_number & (peak >= _SMALLEST_PEAK)
    peak = torch.where(is_used, peak, 1.0)
    factors = (peaks * (torch.full_like(peak, _LARGEST_FACTOR) / peak)).ceil().clamp_(1, _LARGEST_FACTOR)
    codes = torch.where(is_used, parts * (torch.full_like(peak, largest * _LARGEST_FACTOR) / peak / factors), 0.0)
    exact = codes.round().to(torch.float64) * factors
    scales = torch.where(is_used, peak / (largest * _LARGEST_FACTOR), 0.0)
    scales = torch.where(is_number, scales, torch.nan)
    return exact.flatten(1)[:, :columns], scales[:, 0]
