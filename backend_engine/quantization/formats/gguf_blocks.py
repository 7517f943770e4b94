"""How GGUF's block types become components: each a function from blocks to codes, scales and offsets, and its scheme.

Layouts as ggml documents them (ggml-quants.h). A row of a weight is a row of blocks, one after the other. Used by
``gguf.py``, for some rows at a time; what comes out decodes to what ``gguf.dequantize`` gives, bit for bit.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
from backend_engine.quantization.schemes.grouped import pack_nibbles
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.weight_scheme import WeightScheme

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MIDPOINT4, _MIDPOINT8 = 8, 128
_E4M3_BITS, _E4M3_NAN = 0x7F, 0x7F
_ONE_IN_HALF = (0x00, 0x3C)

Parts = dict[str, Tensor]


class BlockType(NamedTuple):
    """unpack: uint8 ``[num_blocks, num_bytes]`` to components of ``scheme`` for ``[num_blocks, num_columns]``."""

    num_columns: int
    num_bytes: int
    scheme: WeightScheme
    unpack: Callable[[Tensor], Parts]


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, ``[num_blocks, 1]``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _float(blocks: Tensor, start: int) -> Tensor:
    return _half(blocks, start).to(torch.float32)


def _nibbles(data: Tensor, width: int) -> Tensor:
    """Lower halves of ``width`` bytes, then their upper halves, then those of the next."""
    runs = data.reshape(data.shape[0], -1, 1, width)
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _bits(data: Tensor, width: int, num_bits: int) -> Tensor:
    """The lowest ``num_bits`` of ``width`` bytes, then their next ones, and so on, then those of the next bytes."""
    runs = data.reshape(data.shape[0], -1, 1, width)
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((runs >> shifts) & ((1 << num_bits) - 1)).flatten(1)


def _flag_bits(data: Tensor) -> Tensor:
    """Bits of a block's bytes in order, the lowest of each byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return {"codes": pack_nibbles(_nibbles(blocks[:, 2:], 16)), "scales": _half(blocks, 0)}


def _q4_1(blocks: Tensor) -> Parts:
    codes = pack_nibbles(_nibbles(blocks[:, 4:], 16))
    return {"codes": codes, "scales": _half(blocks, 0), "offsets": _float(blocks, 2)}


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 6:], 16) | (_flag_bits(blocks[:, 2:6]) << 4)
    return {"codes": codes + (_MIDPOINT8 - 16), "scales": _half(blocks, 0)}


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:], 16) | (_flag_bits(blocks[:, 4:8]) << 4)
    return {"codes": codes, "scales": _half(blocks, 0), "offsets": _float(blocks, 2)}


def _q8_0(blocks: Tensor) -> Parts:
    return {"codes": blocks[:, 2:] ^ 0x80, "scales": _half(blocks, 0)}


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    return {
        "codes": pack_nibbles(_bits(blocks[:, 16:80], 32, 2)),
        "scales": _float(blocks, 80) * (scales & 15),
        "offsets": -(_float(blocks, 82) * (scales >> 4)),
    }


def _q3_k(blocks: Tensor) -> Parts:
    codes = _bits(blocks[:, 32:96], 32, 2) | (_bits(blocks[:, :32], 32, 1) << 2)
    low, high = _nibbles(blocks[:, 96:104], 8), _bits(blocks[:, 104:108], 4, 2)
    scales = (low | (high << 4)).to(torch.float32) - 32
    return {"codes": pack_nibbles(codes + (_MIDPOINT4 - 4)), "scales": _float(blocks, 108) * scales}


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the eight groups of Q4_K and Q5_K, six bits each in twelve bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    mins = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1)
    return _float(blocks, 0) * scales, -(_float(blocks, 2) * mins)


def _q4_k(blocks: Tensor) -> Parts:
    scales, offsets = _k_scales(blocks)
    return {"codes": pack_nibbles(_nibbles(blocks[:, 16:], 32)), "scales": scales, "offsets": offsets}


def _q5_k(blocks: Tensor) -> Parts:
    scales, offsets = _k_scales(blocks)
    codes = _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 32, 1) << 4)
    return {"codes": codes, "scales": scales, "offsets": offsets}


def _q6_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, :128], 64) | (_bits(blocks[:, 128:192], 32, 2) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return {"codes": codes + (_MIDPOINT8 - 32), "scales": _float(blocks, 208) * scales}


def _iq4_nl(blocks: Tensor) -> Parts:
    return {"codes": pack_nibbles(_nibbles(blocks[:, 2:], 16)), "scales": _half(blocks, 0)}


def _iq4_xs(blocks: Tensor) -> Parts:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    scales = (low | (high << 4)).to(torch.float32) - 32
    return {"codes": pack_nibbles(_nibbles(blocks[:, 8:], 16)), "scales": _float(blocks, 0) * scales}


def _mxfp4(blocks: Tensor) -> Parts:
    return {"codes": pack_nibbles(_nibbles(blocks[:, 1:], 16)), "scales": blocks[:, :1]}


def _nvfp4(blocks: Tensor) -> Parts:
    bits = blocks[:, :4] & _E4M3_BITS
    scales = bits.masked_fill(bits == _E4M3_NAN, 0).view(torch.float8_e4m3fn)
    return {"codes": pack_nibbles(_nibbles(blocks[:, 4:], 8)), "scales": scales}


def _tq(kind: GGMLQuantizationType) -> Callable[[Tensor], Parts]:
    """Codes of three values, -1 to 1, which the library unpacks."""

    def unpack(blocks: Tensor) -> Parts:
        values = _decoded_at_one(blocks, kind, blocks.shape[1] - 2)
        return {
            "codes": pack_nibbles((values + _MIDPOINT4).to(torch.uint8)),
            "scales": _half(blocks, -2 % blocks.shape[1]),
        }

    return unpack


def _decoded_at_one(blocks: Tensor, kind: GGMLQuantizationType, scale_at: int) -> Tensor:
    """What the library makes of the blocks when the float16 at byte ``scale_at`` is 1."""
    blocks = blocks.clone()
    blocks[:, scale_at : scale_at + 2] = torch.tensor(_ONE_IN_HALF, dtype=torch.uint8)
    return _decoded(blocks, kind)


def _decoded(blocks: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """What the library makes of the blocks, ``[num_blocks, num_columns]``."""
    # As one long row: it takes rows by sixteen.
    row = dequantize(blocks.numpy().reshape(1, -1), kind)
    return torch.from_numpy(row).view(blocks.shape[0], -1)


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.contiguous().view(dtype).to(torch.int32)


def _iq_factors(scales: Tensor, factor: float) -> Tensor:
    return (0.5 + scales.to(torch.float32)) * factor


def _iq(
    kind: GGMLQuantizationType, group: int, factors: Callable[[Tensor], Tensor], steps: int = 1
) -> Callable[[Tensor], Parts]:
    """A type whose numbers are entries of a grid, which the library looks up, times a factor for each group of columns.

    factors: of the groups, at a scale of 1. steps: grid entries are multiples of one ``steps``-th.
    """

    def unpack(blocks: Tensor) -> Parts:
        of_groups = factors(blocks)
        entries = _decoded_at_one(blocks, kind, 0).view(blocks.shape[0], -1, group) / of_groups.unsqueeze(-1)
        codes = (entries * steps + _MIDPOINT8).to(torch.uint8)
        return {"codes": codes.flatten(1), "scales": _float(blocks, 0) * of_groups / steps}

    return unpack


def _nibbles_in_order(data: Tensor) -> Tensor:
    return torch.stack((data & 15, data >> 4), -1).flatten(1)


def _iq1_s_factors(blocks: Tensor) -> Tensor:
    return 2.0 * ((_words(blocks[:, 34:50], torch.int16) >> 12) & 7) + 1


def _iq1_m(blocks: Tensor) -> Parts:
    """The one type whose scale is spread: the upper four bits of four 16-bit words, which hold the groups' as well."""
    words = _words(blocks[:, 48:56], torch.int16) & 0xFFFF
    places = torch.tensor([0, 4, 8, 12])
    bits = ((words >> 12) << places).sum(1, keepdim=True)
    scale = bits.to(torch.uint16).view(torch.float16).to(torch.float32)
    factors = (2 * ((words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7) + 1).flatten(1).to(torch.float32)
    at_one = blocks.clone()
    at_one[:, 49:56:2] &= 15
    at_one[:, 53:56:2] |= torch.tensor([0xC0, 0x30], dtype=torch.uint8)
    entries = _decoded(at_one, GGMLQuantizationType.IQ1_M).view(blocks.shape[0], -1, 16) / factors.unsqueeze(-1)
    codes = (entries * 8 + _MIDPOINT8).to(torch.uint8)
    return {"codes": codes.flatten(1), "scales": scale * factors / 8}


_F32 = torch.float32
_OF_SIXTEEN = GroupwiseInt(8, 16, scale_dtype=_F32)
_OF_THIRTY_TWO = GroupwiseInt(8, 32, scale_dtype=_F32)
_IQ4 = tuple(float(value) for value in IQ4_VALUES)
_Q = GGMLQuantizationType

BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, GroupwiseInt(4, 32), _q4_0),
    "Q4_1": BlockType(32, 20, GroupwiseInt(4, 32, "offsets"), _q4_1),
    "Q5_0": BlockType(32, 22, GroupwiseInt(8, 32), _q5_0),
    "Q5_1": BlockType(32, 24, GroupwiseInt(8, 32, "offsets"), _q5_1),
    "Q8_0": BlockType(32, 34, GroupwiseInt(8, 32), _q8_0),
    "Q2_K": BlockType(256, 84, GroupwiseInt(4, 16, "offsets", _F32), _q2_k),
    "Q3_K": BlockType(256, 110, GroupwiseInt(4, 16, scale_dtype=_F32), _q3_k),
    "Q4_K": BlockType(256, 144, GroupwiseInt(4, 32, "offsets", _F32), _q4_k),
    "Q5_K": BlockType(256, 176, GroupwiseInt(8, 32, "offsets", _F32), _q5_k),
    "Q6_K": BlockType(256, 210, _OF_SIXTEEN, _q6_k),
    "IQ4_NL": BlockType(32, 18, Codebook4(_IQ4, 32, "float16"), _iq4_nl),
    "IQ4_XS": BlockType(256, 136, Codebook4(_IQ4, 32), _iq4_xs),
    "MXFP4": BlockType(32, 17, Codebook4(E2M1, 32, "e8m0"), _mxfp4),
    "NVFP4": BlockType(64, 36, Codebook4(E2M1, 16, "e4m3"), _nvfp4),
    "TQ1_0": BlockType(256, 54, GroupwiseInt(4, 256), _tq(_Q.TQ1_0)),
    "TQ2_0": BlockType(256, 66, GroupwiseInt(4, 256), _tq(_Q.TQ2_0)),
    "IQ2_XXS": BlockType(
        256,
        66,
        _OF_THIRTY_TWO,
        _iq(_Q.IQ2_XXS, 32, lambda b: _iq_factors((_words(b[:, 2:], torch.int32)[:, 1::2] >> 28) & 15, 0.25)),
    ),
    "IQ2_XS": BlockType(
        256, 74, _OF_SIXTEEN, _iq(_Q.IQ2_XS, 16, lambda b: _iq_factors(_nibbles_in_order(b[:, 66:]), 0.25))
    ),
    "IQ2_S": BlockType(
        256, 82, _OF_SIXTEEN, _iq(_Q.IQ2_S, 16, lambda b: _iq_factors(_nibbles_in_order(b[:, 74:]), 0.25))
    ),
    "IQ3_XXS": BlockType(
        256,
        98,
        _OF_THIRTY_TWO,
        _iq(_Q.IQ3_XXS, 32, lambda b: _iq_factors((_words(b[:, 66:], torch.int32) >> 28) & 15, 0.5)),
    ),
    "IQ3_S": BlockType(256, 110, _OF_THIRTY_TWO, _iq(_Q.IQ3_S, 32, lambda b: 1 + 2.0 * _nibbles_in_order(b[:, 106:]))),
    "IQ1_S": BlockType(256, 50, _OF_THIRTY_TWO, _iq(_Q.IQ1_S, 32, _iq1_s_factors, steps=8)),
    "IQ1_M": BlockType(256, 56, _OF_SIXTEEN, _iq1_m),
}
"""By the type's name; every type that the library can decode."""
