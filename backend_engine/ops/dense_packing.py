"""Packing of plain weights for ``dense_products.py``: in C (``native/dense_pack.h``) with all threads, and by torch,
which is the reference and packs where there is no native library. Both give the same bits.

Called by the quantization methods. Knows no checkpoint formats.
"""

import ctypes
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.ops.dense_products import (
    PANEL_ROWS,
    ZERO_CODE,
    DenseKind,
    DenseWeight,
    num_panels,
    num_units,
    row_parts,
)
from backend_engine.ops.huge_pages import HugePages
from backend_engine.ops.native_runtime import NativeRuntime, OpKind, native_runtime

_MOST_COLUMNS = 1 << 17
# What the C source reads; a weight of another dtype is converted first.
_FORMS = {torch.float32: DenseKind.F32, torch.float16: DenseKind.F16, torch.bfloat16: DenseKind.BF16}


class _PackOp(ctypes.Structure):
    """``pack_op`` of dense_pack.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("form", ctypes.c_int64),
    )


def pack_dense(
    weight: Tensor, kind: DenseKind, bias: Tensor | None = None, memory: HugePages | None = None
) -> DenseWeight:
    """``weight [rows, columns]`` of any float dtype, and ``bias [rows]``, packed. Of int8 and W8A8: each row to the
    nearest of 255 numbers, the largest magnitude / 127 apart; of int16: 64 columns of a row to one of 8191. float16
    makes numbers beyond 65504 infinite. ``memory``: where the packed numbers go, by default pages of their own.
    """
    runtime = native_runtime()
    packed = _empty(weight.shape, kind, memory)
    if runtime is None:
        _pack_by_torch(packed, weight.detach())
    else:
        _pack_by(runtime, packed, weight.detach())
    return with_bias(packed, bias)


def pack_dense_reference(weight: Tensor, kind: DenseKind) -> DenseWeight:
    """What ``pack_dense`` gives, by torch."""
    packed = _empty(weight.shape, kind, None)
    _pack_by_torch(packed, weight.detach())
    return packed


def with_bias(w: DenseWeight, bias: Tensor | None) -> DenseWeight:
    """``w`` with another bias, ``[rows]`` of any float dtype."""
    return w if bias is None else dataclasses.replace(w, bias=_padded_rows(bias.detach()))


def _empty(shape: torch.Size, kind: DenseKind, memory: HugePages | None) -> DenseWeight:
    """Zeros."""
    assert len(shape) == 2 and shape[0] > 0 and 0 < shape[1] <= _MOST_COLUMNS, tuple(shape)
    (rows, columns), panels = shape, num_panels(shape[0])
    numbers = (num_units(kind, columns), PANEL_ROWS, kind.unit) if kind.is_integer else (columns, PANEL_ROWS)
    data = (memory or HugePages()).empty((panels, *numbers), kind.dtype)
    scales = None
    if kind == DenseKind.I16:
        scales = torch.zeros(panels, kind.num_blocks(columns), PANEL_ROWS)
    elif kind.is_integer:
        scales = torch.zeros(panels * PANEL_ROWS)
    return DenseWeight(kind, rows, columns, data, scales, None)


def _pack_by(runtime: NativeRuntime, packed: DenseWeight, weight: Tensor) -> None:
    if weight.dtype not in _FORMS or weight.stride(1) != 1:
        weight = weight.to(torch.float32).contiguous()
    native, form = packed.native, _FORMS[weight.dtype]
    op = _PackOp(OpKind.PACK, ctypes.addressof(native), weight.data_ptr(), weight.stride(0), form)
    runtime.run(op, 1)


def _pack_by_torch(packed: DenseWeight, weight: Tensor) -> None:
    kind, scales = packed.kind, packed.scales
    if kind == DenseKind.W8A8:
        packed.data.fill_(ZERO_CODE)
    for start, stop in row_parts(weight):
        part = weight[start:stop]
        if scales is not None:
            part, found = _to_codes(part.to(torch.float32), kind)
            if kind == DenseKind.I16:
                panels = F.pad(found, (0, 0, 0, -len(found) % PANEL_ROWS)).view(-1, PANEL_ROWS, found.shape[1])
                scales[start // PANEL_ROWS : num_panels(stop)] = panels.transpose(1, 2)
            else:
                scales[start:stop] = found[:, 0]
        _put(packed, start, part)


def _put(packed: DenseWeight, start: int, part: Tensor) -> None:
    """Rows from ``start`` on, the first of a panel."""
    kind, data = packed.kind, packed.data
    whole, (rows, columns) = part.shape[0] // PANEL_ROWS, part.shape
    if kind.is_integer:
        # The columns of a unit are moved as one number.
        unit = torch.int16 if kind == DenseKind.I8 else torch.int32
        part = F.pad(part, (0, -columns % kind.unit))
        if kind == DenseKind.W8A8:
            part = (part.to(torch.int16) + ZERO_CODE).to(torch.uint8)
        part, data = part.contiguous().view(unit), data.view(unit).squeeze(-1)
    panel, done = start // PANEL_ROWS, whole * PANEL_ROWS
    data[panel : panel + whole].copy_(part[:done].view(whole, PANEL_ROWS, part.shape[1]).transpose(1, 2))
    if done < rows:
        data[panel + whole, :, : rows - done].copy_(part[done:].T)


def _to_codes(part: Tensor, kind: DenseKind) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each row, of int16 for each block of one; where there is NaN or infinity it is that."""
    largest, (rows, columns) = kind.largest_codes[0], part.shape
    width = kind.block(columns) if kind == DenseKind.I16 else columns
    blocks = F.pad(part, (0, -columns % width)).view(rows, -1, width)
    scales = blocks.abs().amax(2) / largest
    codes = blocks / torch.where(scales > 0, scales, 1.0)[:, :, None]
    codes = codes.round_().nan_to_num_(0.0).clamp_(-largest, largest)
    codes = codes.to(torch.int8 if kind == DenseKind.W8A8 else kind.dtype)
    return codes.view(rows, -1)[:, :columns], scales


def _padded_rows(values: Tensor) -> Tensor:
    """float32 numbers of all rows of all panels."""
    wide = values.to(torch.float32)
    return F.pad(wide, (0, -len(wide) % PANEL_ROWS)).contiguous()
