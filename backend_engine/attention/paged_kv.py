"""``PagedKv``: one layer's keys and values in the pool, and the form that their numbers are kept in.

Made once by the model engine over the pool's tensors (``paged_kv``), handed to layers, written and read by attention
backends. One class a form; a backend never learns which it has. Knows no rows and no requests.

int8: ``x = code * scale`` with one scale for each token, plane and head, the largest magnitude there over 127
(symmetric, nearest code). fp8: ``x = code * scale`` with one scale a layer for keys and one for values. In each form
what is beyond its largest number becomes that one, and NaN stays NaN.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.ops.torch_ops import TorchOps

Codes = tuple[Tensor, ...]

_FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_INT8_MAX = 127.0
# Bounds of a scale: it is divided by, and 127 of it are no infinity.
_INT8_SCALES = (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / _INT8_MAX * (1 - 2**-20))
# Exponents are biased by 7 in E4M3 and by 15 in float16.
_E4M3_FROM_FLOAT16 = 2.0 ** (15 - 7)
# On a CPU so many numbers are decoded at once: what is made on the way stays in its cache.
_DECODED_AT_ONCE = 2**18


class KvScales(NamedTuple):
    """What the codes of one layer's keys and values are multiplied with in an fp8 cache; more than 0 and finite."""

    k: float = 1.0
    v: float = 1.0


_NO_SCALES = KvScales()


@dataclass(frozen=True)
class PagedKv(ABC):
    """``stored``: the pool's tensors, each ``[num_blocks, num_planes, tokens_per_block, num_kv_heads, width]``, all
    indexed alike. num_planes: 2 for K and V, 1 for vectors that are both.
    """

    stored: Codes

    @property
    def num_planes(self) -> int:
        """2 for keys and values, 1 for one vector a token."""
        return self.stored[0].shape[1]

    @abstractmethod
    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether numbers of ``dtype`` are read as they were written."""

    @abstractmethod
    def encode(self, x: Tensor, plane: int) -> Codes:
        """``x [num_tokens, num_kv_heads, dim]`` as it is kept in ``stored``, one tensor for each."""

    @abstractmethod
    def decode(self, codes: Codes, plane: int, out: Tensor) -> None:
        """Fill ``out [..., num_kv_heads, dim]`` with the numbers that ``codes`` stand for, taken from ``stored``."""

    def append(self, ops: TorchOps, k: Tensor, v: Tensor, rows: tuple[Tensor, ...]) -> None:
        """Write ``k, v [num_tokens, num_kv_heads, dim]`` at ``rows`` of ``TorchOps.kv_rows``; one plane takes k."""
        keys = self.encode(k, 0)
        values = self.encode(v, 1) if self.num_planes > 1 else keys
        for key, value, tensor in zip(keys, values, self.stored, strict=True):
            ops.append_kv(key, value, tensor, rows)

    def clear(self, parts: Tensor, part_len: int) -> None:
        """Set the parts at ``parts`` of the pool seen as ``[num_parts, part_len, ...]`` to zero."""
        for tensor in self.stored:
            _in_parts(tensor, part_len).index_fill_(0, parts, 0)

    def gather(self, parts: Tensor, part_len: int, dtype: torch.dtype) -> Tensor:
        """``[len(parts), part_len, num_kv_heads, dim]`` in ``dtype``. ``parts``: as in ``clear``, those of the first
        plane and then as many of the second.
        """
        tensors = [_in_parts(tensor, part_len) for tensor in self.stored]
        out = torch.empty(len(parts), *tensors[0].shape[1:], dtype=dtype, device=parts.device)
        per_plane = len(parts) // self.num_planes
        step = max(1, _DECODED_AT_ONCE // tensors[0][0].numel()) if parts.device.type == "cpu" else per_plane
        for plane in range(self.num_planes):
            stop = (plane + 1) * per_plane
            for start in range(stop - per_plane, stop, step):
                some = slice(start, min(start + step, stop))
                self.decode(tuple(tensor.index_select(0, parts[some]) for tensor in tensors), plane, out[some])
        return out


@dataclass(frozen=True)
class PlainKv(PagedKv):
    """Numbers as they are, or rounded to a floating point type of fewer bits; beyond its range the largest."""

    @property
    def _dtype(self) -> torch.dtype:
        return self.stored[0].dtype

    def is_exact(self, dtype: torch.dtype) -> bool:
        return torch.promote_types(dtype, self._dtype) == self._dtype

    def encode(self, x: Tensor, plane: int) -> Codes:
        return (x if x.dtype == self._dtype else _saturate(x, self._dtype).to(self._dtype),)

    def decode(self, codes: Codes, plane: int, out: Tensor) -> None:
        out.copy_(codes[0])

    def gather(self, parts: Tensor, part_len: int, dtype: torch.dtype) -> Tensor:
        if dtype != self._dtype:
            return super().gather(parts, part_len, dtype)
        return _in_parts(self.stored[0], part_len).index_select(0, parts)


@dataclass(frozen=True)
class Fp8Kv(PagedKv):
    """``stored``: bytes (uint8), each a number of ``dtype``."""

    dtype: torch.dtype
    scales: KvScales = _NO_SCALES

    def is_exact(self, dtype: torch.dtype) -> bool:
        return False

    def encode(self, x: Tensor, plane: int) -> Codes:
        scale = self.scales[plane]
        # Divided in float32: in 16 bits the quotient would be rounded twice.
        scaled = x if scale == 1.0 else x.to(torch.float32) / scale
        return (_saturate(scaled, self.dtype).to(self.dtype).view(torch.uint8),)

    def decode(self, codes: Codes, plane: int, out: Tensor) -> None:
        values, factor = _read_fp8(codes[0], self.dtype)
        _multiply(values, self.scales[plane] * factor, out)


@dataclass(frozen=True)
class Int8Kv(PagedKv):
    """``stored``: codes (int8) and scales (float32, width 1)."""

    def is_exact(self, dtype: torch.dtype) -> bool:
        return False

    def encode(self, x: Tensor, plane: int) -> Codes:
        x = x.to(torch.float32)
        scales = (x.abs().amax(-1, keepdim=True) / _INT8_MAX).clamp_(*_INT8_SCALES)
        return (x / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scales

    def decode(self, codes: Codes, plane: int, out: Tensor) -> None:
        _multiply(codes[0], codes[1], out)


def paged_kv(layer: Tensor | Codes, scales: KvScales = _NO_SCALES) -> PagedKv:
    """``layer``: a tensor of ``KVPool.layers``, or its int8 codes ``[num_blocks, num_planes, tokens_per_block,
    num_kv_heads, dim]`` and scales of these axes without the last. ``scales``: from the checkpoint, count where the
    cache is fp8.
    """
    if isinstance(layer, tuple):
        codes, token_scales = layer
        return Int8Kv((codes, token_scales.unsqueeze(-1)))
    if layer.dtype not in _FP8_TYPES:
        return PlainKv((layer,))
    assert all(0 < scale < math.inf for scale in scales), f"scales {scales} of an fp8 cache"
    return Fp8Kv((layer.view(torch.uint8),), layer.dtype, scales)


def _in_parts(tensor: Tensor, part_len: int) -> Tensor:
    """A tensor of the pool as ``[num_parts, part_len, num_kv_heads, width]``."""
    return tensor.view(-1, part_len, *tensor.shape[3:])


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` without numbers that ``dtype`` cannot hold: its largest in their place. NaN stays."""
    largest = torch.finfo(dtype).max
    # bfloat16 reaches as far as float32: what rounds to its infinity is one to anybody.
    return x.clamp(-largest, largest) if dtype != torch.bfloat16 and largest < torch.finfo(x.dtype).max else x


def _multiply(values: Tensor, factor: Tensor | float, out: Tensor) -> None:
    """``out = values * factor``, the product in float32."""
    product = out.copy_(values) if out.dtype == torch.float32 else values.to(torch.float32)
    if isinstance(factor, Tensor) or factor != 1.0:
        product.mul_(factor)
    if product is not out:
        out.copy_(product)


def _read_fp8(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Bytes -> numbers of a wider type, and what they still have to be multiplied with.

    Torch takes 6 to 12 ns a number to convert E4M3 on a CPU. Moved to their places in a float16, the bits of E5M2 are
    the same number, and those of E4M3 are, but for the bias of the exponent, 1/256 of it (exactly, down to the
    subnormal ones). Only its NaN would become a number.
    """
    if codes.device.type != "cpu":
        return codes.view(dtype), 1.0
    if dtype == torch.float8_e5m2:
        return codes.to(torch.int16).bitwise_left_shift_(8).view(torch.float16), 1.0
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    magnitudes = codes.bitwise_and(0x7F)
    if codes.numel() and int(magnitudes.amax()) == 0x7F:
        bits.masked_fill_(magnitudes == 0x7F, 0x7E00)
    return bits.view(torch.float16), _E4M3_FROM_FLOAT16
