"""``ChunkedTensor``: a tensor that lies in pieces, in one file or several, cut and put together before it is read.

Used for checkpoints that are split over ranks. Every operation only counts: where each piece lies and where it goes.
Reading then touches those bytes alone, so that memory is bounded by the tensor that is read.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.checkpoint.torch_file import DTYPE_NAMES, StoredTensor
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError

_MAX_CHUNKS = 2048


class Chunk(NamedTuple):
    """A piece, and where its first element goes."""

    offset: tuple[int, ...]
    tensor: StoredTensor


class ChunkedTensor(NamedTuple):
    """A tensor of ``shape`` that ``chunks`` cover, each element once."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.chunks[0].tensor.dtype

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, DTYPE_NAMES[self.dtype])

    def read(self) -> Tensor:
        """The tensor: the file's memory where one piece is all of it, else put together."""
        if len(self.chunks) == 1:
            return self.chunks[0].tensor.read()
        whole = torch.empty(self.shape, dtype=self.dtype)
        for offset, piece in self.chunks:
            slices = tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))
            whole[slices] = piece.read()
        return whole

    def part(self, dim: int, start: int, size: int) -> "ChunkedTensor":
        """Elements ``start`` to ``start + size`` of one dimension."""
        assert start >= 0 and start + size <= self.shape[dim], f"{start} + {size} of {self.shape}, dimension {dim}"
        chunks = []
        for offset, piece in self.chunks:
            first, last = max(offset[dim], start), min(offset[dim] + piece.shape[dim], start + size)
            if first < last:
                place = _with(offset, dim, first - start)
                chunks.append(Chunk(place, narrow(piece, dim, first - offset[dim], last - first)))
        return ChunkedTensor(_with(self.shape, dim, size), tuple(chunks))

    def first(self, index: int) -> "ChunkedTensor":
        """Entry ``index`` of the first dimension, which is dropped."""
        chunks = tuple(Chunk(offset[1:], _drop_first(piece)) for offset, piece in self.part(0, index, 1).chunks)
        return ChunkedTensor(self.shape[1:], chunks)

    def every(self, start: int, step: int) -> "ChunkedTensor":
        """Rows ``start``, ``start + step``, ... of a tensor in one piece."""
        assert len(self.chunks) == 1 and self.shape[0] % step == 0, f"{self.shape} in {len(self.chunks)} pieces"
        piece = self.chunks[0].tensor
        offset = piece.offset + start * piece.stride[0]
        shape, stride = _with(piece.shape, 0, piece.shape[0] // step), _with(piece.stride, 0, piece.stride[0] * step)
        return whole(piece._replace(offset=offset, shape=shape, stride=stride))

    def transposed(self) -> "ChunkedTensor":
        """The two dimensions swapped."""
        assert len(self.shape) == 2, self.shape
        turned = (
            Chunk(offset[::-1], piece._replace(shape=piece.shape[::-1], stride=piece.stride[::-1]))
            for offset, piece in self.chunks
        )
        return ChunkedTensor(self.shape[::-1], tuple(turned))


def whole(tensor: StoredTensor) -> ChunkedTensor:
    """A tensor in one piece."""
    return ChunkedTensor(tensor.shape, (Chunk((0,) * len(tensor.shape), tensor),))


def joined(parts: Sequence[ChunkedTensor], dim: int = 0) -> ChunkedTensor:
    """The parts one after the other along ``dim``; their other dimensions and dtypes are the same (asserted)."""
    chunks, start = [], 0
    for part in parts:
        assert _with(part.shape, dim, 0) == _with(parts[0].shape, dim, 0), f"{part.shape} beside {parts[0].shape}"
        assert part.dtype == parts[0].dtype, f"{part.dtype} beside {parts[0].dtype}"
        chunks += [Chunk(_with(offset, dim, offset[dim] + start), piece) for offset, piece in part.chunks]
        start += part.shape[dim]
    return ChunkedTensor(_with(parts[0].shape, dim, start), tuple(chunks))


def check_cover(tensor: ChunkedTensor, where: str) -> ChunkedTensor:
    """The tensor, if its pieces cover it and have one dtype. Raises ``ModelLoadError`` that begins with ``where``."""
    covered = 0
    if len(tensor.chunks) > _MAX_CHUNKS:
        raise ModelLoadError(f"{where} lies in {len(tensor.chunks)} pieces; expected at most {_MAX_CHUNKS}")
    for i, (offset, piece) in enumerate(tensor.chunks):
        ends = tuple(start + size for start, size in zip(offset, piece.shape, strict=True))
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)) or piece.dtype != tensor.dtype:
            raise ModelLoadError(f"{where} has a piece {list(piece.shape)} at {list(offset)} that does not fit into it")
        covered += math.prod(piece.shape)
        for other_offset, other in tensor.chunks[:i]:
            other_ends = tuple(start + size for start, size in zip(other_offset, other.shape, strict=True))
            if all(a < d and c < b for a, b, c, d in zip(offset, ends, other_offset, other_ends, strict=True)):
                raise ModelLoadError(f"{where} has two pieces for the elements at {list(offset)}")
    if not covered or covered != math.prod(tensor.shape):
        raise ModelLoadError(f"{where}, shape {list(tensor.shape)}, is stored with {covered} elements only")
    return tensor


def narrow(piece: StoredTensor, dim: int, start: int, size: int) -> StoredTensor:
    """Elements ``start`` to ``start + size`` of one dimension of a piece."""
    return piece._replace(offset=piece.offset + start * piece.stride[dim], shape=_with(piece.shape, dim, size))


def _drop_first(piece: StoredTensor) -> StoredTensor:
    return piece._replace(shape=piece.shape[1:], stride=piece.stride[1:])


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
