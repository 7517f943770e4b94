"""bitsandbytes checkpoints, NF4 and FP4 (Dettmers et al., 2023) and LLM.int8 (2022): ``quant_method`` ``bitsandbytes``.

Four-bit weights are blocks of the flattened weight, whatever its rows; ``FlatBlocks`` keeps them packed all the same.
Whether a weight is packed at all, the stored tensors tell, hence the config's list of modules left alone is not needed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import shown
from backend_engine.quantization.formats.packed_ints import row_chunks
from backend_engine.quantization.formats.stored_shape import stored_scalar
from backend_engine.quantization.schemes.flat_blocks import FlatBlocks
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, Quantization, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution; Dettmers et al., 2023, appendix E."""

_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * magnitude / 12.0 for sign in (1.0, -1.0) for magnitude in _FP4_MAGNITUDES)
"""Sign, two bits of exponent, one of mantissa, divided by the largest."""

CODEBOOKS = {"nf4": NF4, "fp4": FP4}
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 32, 16)
_NESTED_BLOCK = 256
_MAX_STATE = 1 << 16
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_STORAGE_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_COMPUTE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROW_FORMAT = 0
_STATE = ".weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Bnb4Bit(WeightFormat):
    """``weight [bytes, 1]``: two codes a byte, the first in the upper half, in any dtype of ``storage``; ``absmax`` and
    ``quant_map``, and the quantization state, JSON of ``state_length`` bytes.

    kind: key of ``CODEBOOKS``. is_nested: ``absmax`` are codes themselves (double quantization).
    """

    kind: str
    block_size: int
    is_nested: bool
    state_length: int
    storage: str = "U8"
    plain_dtype: torch.dtype = torch.float32

    @property
    def scheme(self) -> FlatBlocks:
        return FlatBlocks(CODEBOOKS[self.kind], self.block_size, self.plain_dtype)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        blocks = -(-math.prod(shape) // self.block_size)
        size, rest = divmod((math.prod(shape) + 1) // 2, _STORAGE_BYTES[self.storage])
        if rest:
            raise ValueError(f"a weight of shape {list(shape)} does not fill whole numbers of {self.storage}")
        found = {
            ".weight": Leaf((size, 1), (self.storage,)),
            ".weight.absmax": Leaf((blocks,), ("U8",) if self.is_nested else ("F32",)),
            ".weight.quant_map": Leaf((16,), ("F32",)),
            _STATE + self.kind: Leaf((self.state_length,), ("U8",)),
        }
        if self.is_nested:
            found[".weight.nested_absmax"] = Leaf((-(-blocks // _NESTED_BLOCK),), ("F32",))
            found[".weight.nested_quant_map"] = Leaf((256,), ("F32",))
        return found

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        offset = self._check_state(leaves, shape)
        scales = self._scales(leaves, offset)
        packed = leaves[".weight"].contiguous().flatten().view(torch.uint8)
        scheme = self.scheme.for_columns(shape[-1])
        if isinstance(scheme, Plain):
            return {"weight": self._decode(packed, scales, math.prod(shape)).view(shape)}
        codes = torch.empty_like(packed)
        for chunk in row_chunks(packed.shape[0], 1):
            codes[chunk] = (packed[chunk] >> 4) | (packed[chunk] << 4)
        groups = math.prod(shape) // scheme.group_size
        if scheme.group_size < self.block_size:
            scales = scales.repeat_interleave(self.block_size // scheme.group_size)[:groups]
        return {"codes": codes.view(*shape[:-1], -1), "scales": scales.view(*shape[:-1], -1)}

    def _check_state(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> float:
        """The offset of nested scales."""
        state = _parse(leaves[_STATE + self.kind])
        expected: dict[str, Any] = {"quant_type": self.kind, "shape": list(shape), "blocksize": self.block_size}
        if self.is_nested:
            expected["nested_blocksize"] = _NESTED_BLOCK
        if math.prod(shape) <= self.block_size:
            # All sizes of one block are as good.
            del expected["blocksize"]
        for key, value in expected.items():
            if state.get(key) != value:
                raise ValueError(f"quantization state has {key} {shown(state.get(key))}; its tensors fit {value!r}")
        codebook = torch.tensor(CODEBOOKS[self.kind], device=leaves[".weight.quant_map"].device)
        if not torch.allclose(leaves[".weight.quant_map"], codebook, rtol=0.0, atol=1e-6):
            raise ValueError(f"quant_map is not that of {self.kind}")
        offset = state.get("nested_offset") if self.is_nested else 0.0
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= _MAX_FLOAT32:
            raise ValueError(f"quantization state has nested_offset {shown(offset)}; expected a number")
        return float(offset)

    def _scales(self, leaves: Mapping[str, Tensor], offset: float) -> Tensor:
        """float32, one a block."""
        codes = leaves[".weight.absmax"]
        if not self.is_nested:
            return codes
        table = leaves[".weight.nested_quant_map"].unsqueeze(1)
        factors = leaves[".weight.nested_absmax"]
        scales = torch.empty(codes.shape[0], device=codes.device)
        for chunk in row_chunks(factors.shape[0], _NESTED_BLOCK):
            numbers = slice(chunk.start * _NESTED_BLOCK, chunk.stop * _NESTED_BLOCK)
            decoded = F.embedding(codes[numbers].to(torch.int32), table).flatten()
            by_number = factors[chunk].repeat_interleave(_NESTED_BLOCK)[: decoded.shape[0]]
            scales[numbers] = decoded.mul_(by_number).add_(offset)
        return scales

    def _decode(self, packed: Tensor, scales: Tensor, num_values: int) -> Tensor:
        """``[num_values]`` in ``plain_dtype``."""
        weight = torch.empty(num_values, dtype=self.plain_dtype, device=packed.device)
        table = torch.tensor(CODEBOOKS[self.kind], device=packed.device).unsqueeze(1)
        for chunk in row_chunks(scales.shape[0], self.block_size):
            numbers = slice(chunk.start * self.block_size, min(chunk.stop * self.block_size, num_values))
            pairs = packed[numbers.start // 2 : (numbers.stop + 1) // 2]
            codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten()[: numbers.stop - numbers.start]
            by_number = scales[chunk].repeat_interleave(self.block_size)[: codes.shape[0]]
            weight[numbers] = F.embedding(codes.to(torch.int32), table).flatten().mul_(by_number)
        return weight


@dataclass(frozen=True)
class BnbInt8(WeightFormat):
    """``weight [out, in]`` in int8 and ``SCB [out]``, the largest number of each row, which stands for 127.

    LLM.int8 multiplies columns with outliers in the input apart, so that rounding inputs to int8 does not hurt; with
    inputs that are not rounded, the product is what it approximates.
    """

    weight_format_shape: tuple[int, ...] = ()

    @property
    def scheme(self) -> WeightScheme:
        return GroupwiseInt(8, None, "midpoint", torch.float32)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        return {
            ".weight": Leaf(shape, ("I8",)),
            ".SCB": Leaf(shape[:-1], FLOAT_DTYPES),
            ".weight_format": Leaf(self.weight_format_shape, ("U8",), is_optional=True),
        }

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        layout = leaves.get(".weight_format")
        if layout is not None and int(layout) != _ROW_FORMAT:
            raise ValueError(f"weight_format is {int(layout)}; expected {_ROW_FORMAT}, rows one after another")
        # The upper bit flipped is 128 added.
        codes = leaves[".weight"].contiguous().view(torch.uint8) ^ 128
        return {"codes": codes, "scales": (leaves[".SCB"].to(torch.float32) / 127.0).unsqueeze(-1)}


def _parse(tensor: Tensor) -> dict[str, Any]:
    if tensor.numel() > _MAX_STATE:
        raise ValueError(f"quantization state has {tensor.numel()} bytes; expected at most {_MAX_STATE}")
    try:
        state = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError):
        raise ValueError("quantization state is not JSON") from None
    if not isinstance(state, dict):
        raise ValueError("quantization state is not a JSON object")
    return state


@dataclass(frozen=True)
class BitsAndBytes(Quantization):
    """bits: 4 or 8. kind: of weights that do not say whether they are NF4 or FP4."""

    bits: int
    kind: str
    plain_dtype: torch.dtype
    stored: StoredTensors

    def format_of(self, module: str) -> WeightFormat | None:
        weight = self.stored.tensors.get(f"{module}.weight")
        if self.bits == 8:
            is_packed = self.stored.has(f"{module}.SCB") or (weight is not None and weight.dtype == "I8")
            return BnbInt8(stored_scalar(self.stored, f"{module}.weight_format")) if is_packed else None
        kinds = [kind for kind in CODEBOOKS if self.stored.has(module + _STATE + kind)]
        is_packed = bool(kinds) or self.stored.has(f"{module}.weight.absmax")
        if not is_packed and (weight is None or weight.dtype != "U8"):
            return None
        return self._four_bits(module, kinds[0] if kinds else self.kind)

    def _four_bits(self, module: str, kind: str) -> Bnb4Bit:
        """From shapes alone: the size of blocks is what the number of scales comes from."""
        tensors = self.stored.tensors
        weight = tensors.get(f"{module}.weight")
        storage = weight.dtype if weight is not None and weight.dtype in _STORAGE_BYTES else "U8"
        absmax, state = tensors.get(f"{module}.weight.absmax"), tensors.get(module + _STATE + kind)
        block_size = BLOCK_SIZES[0]
        if weight is not None and absmax is not None:
            num_values = 2 * math.prod(weight.shape) * _STORAGE_BYTES[storage]
            num_blocks = math.prod(absmax.shape)
            fitting = (size for size in BLOCK_SIZES if -(-num_values // size) == num_blocks)
            block_size = next(fitting, block_size)
        return Bnb4Bit(
            kind,
            block_size,
            self.stored.has(f"{module}.weight.nested_absmax"),
            math.prod(state.shape) if state is not None else 0,
            storage,
            self.plain_dtype,
        )


def read(config: HfConfig, stored: StoredTensors) -> BitsAndBytes:
    """What a quantization config of ``quant_method`` ``bitsandbytes`` says. Raises ``ModelLoadError``."""
    in_four, in_eight = config.flag("load_in_4bit", False), config.flag("load_in_8bit", False)
    if in_four == in_eight:
        raise config.refuse("load_in_4bit", "true, or load_in_8bit true, not both")
    kind = config.choice("bnb_4bit_quant_type", tuple(CODEBOOKS), "fp4")
    dtype = config.choice("bnb_4bit_compute_dtype", tuple(_COMPUTE_DTYPES), "float32")
    return BitsAndBytes(4 if in_four else 8, kind, _COMPUTE_DTYPES[dtype], stored)
