"""AWQ checkpoints (Lin et al., 2023) as AutoAWQ, GPTQModel and llm-awq write them: ``quant_method`` ``awq``.

Four bits, in one of three layouts, which the config's ``version`` names. Whether a weight is packed at all, the stored
tensors tell, hence the config's list of modules left alone is not needed. Multiplies nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.gptq import SCALE_DTYPES, read_group_size, stored_scale_dtype
from backend_engine.quantization.formats.packed_ints import pack_codes, repack_int32, row_chunks, unpack_int32
from backend_engine.quantization.schemes.grouped import unpack_nibbles
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.weight_format import Leaf, Quantization, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

BITS = 4
_PER_WORD = 8
# Where the eight integers of a word are, the first column's first.
_GEMM_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_LOWER_HALVES = 0x0F0F0F0F
_ENDINGS = (".qweight", ".qzeros", ".scales", ".scaled_zeros")

# The layout of each version. ``exllama`` and ``ipex`` are names of kernels that read ``gemm``.
LAYOUTS = {
    "gemm": "gemm",
    "exllama": "gemm",
    "ipex": "gemm",
    "gemv": "gemv",
    "gemv_fast": "gemv_fast",
    "llm-awq": "gemv_fast",
}


@dataclass(frozen=True)
class AwqGemm(WeightFormat):
    """``qweight [in, out / 8]`` and ``qzeros [groups, out / 8]`` along the rows, ``scales [groups, out]``.

    group_size: ``None`` = the row. has_zeros: without stored zero points they are 8.
    """

    group_size: int | None
    has_zeros: bool = True
    scale_dtype: torch.dtype = torch.float16

    @property
    def scheme(self) -> WeightScheme:
        return GroupwiseInt(BITS, self.group_size, "codes" if self.has_zeros else "midpoint", self.scale_dtype)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        groups = _check_shape(shape, self.group_size, num_rows=_PER_WORD)
        found = {
            ".qweight": Leaf((shape[1], shape[0] // _PER_WORD), ("I32",)),
            ".scales": Leaf((groups, shape[0]), tuple(SCALE_DTYPES)),
        }
        return {**found, ".qzeros": Leaf((groups, shape[0] // _PER_WORD), ("I32",))} if self.has_zeros else found

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        words = leaves[".qweight"]
        codes = torch.empty(shape[0] // _PER_WORD, _PER_WORD, shape[1] // 2, dtype=torch.uint8, device=words.device)
        for chunk in row_chunks(words.shape[1], shape[1] * _PER_WORD):
            # A word has a column of eight rows; two columns are put together, for all eight rows at once.
            columns = words[:, chunk].t().contiguous()
            first, second = columns[:, ::2], columns[:, 1::2]
            lower = (first & _LOWER_HALVES) | ((second & _LOWER_HALVES) << 4)
            upper = ((first >> 4) & _LOWER_HALVES) | (second & ~_LOWER_HALVES)
            for row, place in enumerate(_GEMM_ORDER):
                halves = upper if place % 2 else lower
                codes[chunk, row] = halves.view(torch.uint8)[:, place // 2 :: 4]
        codes = codes.flatten(0, 1)
        found = {"codes": codes, "scales": leaves[".scales"].t()}
        if self.has_zeros:
            found["zeros"] = unpack_int32(leaves[".qzeros"], BITS, shape[0], _GEMM_ORDER).t()
        return found


@dataclass(frozen=True)
class AwqGemv(WeightFormat):
    """Along the columns, in their order: ``qweight [out, in / 8]``, ``qzeros [out, words]``, ``scales [out, 8 *
    words]``, where the groups come first and zeros follow. See ``AwqGemm`` for the fields.
    """

    group_size: int | None
    has_zeros: bool = True
    scale_dtype: torch.dtype = torch.float16

    @property
    def scheme(self) -> WeightScheme:
        return GroupwiseInt(BITS, self.group_size, "codes" if self.has_zeros else "midpoint", self.scale_dtype)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        groups = _check_shape(shape, self.group_size, num_columns=_PER_WORD)
        words = _padded_words(groups, shape[1] // groups)
        found = {
            ".qweight": Leaf((shape[0], shape[1] // _PER_WORD), ("I32",)),
            ".scales": Leaf((shape[0], words * _PER_WORD), tuple(SCALE_DTYPES)),
        }
        return {**found, ".qzeros": Leaf((shape[0], words), ("I32",))} if self.has_zeros else found

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        groups = shape[1] // (self.group_size or shape[1])
        found = {
            "codes": repack_int32(leaves[".qweight"], BITS, shape[1], BITS),
            "scales": leaves[".scales"][:, :groups],
        }
        if self.has_zeros:
            words = leaves[".qzeros"]
            found["zeros"] = unpack_int32(words, BITS, words.shape[1] * _PER_WORD)[:, :groups]
        return found


@dataclass(frozen=True)
class AwqGemvFast(WeightFormat):
    """``qweight [out / 4, in]`` in int16, four rows of 64 columns after one another; ``scales`` and ``zeros [8 * words,
    out]`` padded as in ``AwqGemv``, the latter minus scale times zero point.

    zeros: the ending of their name, ``.qzeros`` (AutoAWQ) or ``.scaled_zeros`` (llm-awq).
    """

    group_size: int | None
    zeros: str = ".qzeros"
    scale_dtype: torch.dtype = torch.float16

    @property
    def scheme(self) -> WeightScheme:
        return GroupwiseInt(BITS, self.group_size, "offsets", self.scale_dtype)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        groups = _check_shape(shape, self.group_size, num_rows=4, num_columns=64)
        padded = _padded_words(groups, shape[1] // groups) * _PER_WORD
        return {
            ".qweight": Leaf((shape[0] // 4, shape[1]), ("I16",)),
            ".scales": Leaf((padded, shape[0]), tuple(SCALE_DTYPES)),
            self.zeros: Leaf((padded, shape[0]), tuple(SCALE_DTYPES)),
        }

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        words = leaves[".qweight"]
        groups = shape[1] // (self.group_size or shape[1])
        codes = torch.empty(shape[0] // 4, 4, shape[1] // 2, dtype=torch.uint8, device=words.device)
        for chunk in row_chunks(words.shape[0], 4 * shape[1]):
            values = unpack_nibbles(words[chunk].contiguous().view(torch.uint8))
            # [rows / 4, columns / 64, row, half of the 64 columns, column within the half]
            values = values.view(values.shape[0], -1, 4, 2, 4, 2, 4)
            # Column 8 * a + 2 * b + c of the half is stored in place [b, c, a].
            values = values.permute(0, 2, 1, 3, 6, 4, 5).flatten(2)
            codes[chunk] = pack_codes(values, BITS)
        return {
            "codes": codes.flatten(0, 1),
            "scales": leaves[".scales"][:groups].t(),
            "offsets": leaves[self.zeros][:groups].t().to(torch.float32),
        }


def _check_shape(shape: tuple[int, ...], group_size: int | None, num_rows: int = 1, num_columns: int = 2) -> int:
    """Number of groups of a row."""
    if len(shape) != 2 or shape[0] % num_rows or shape[1] % num_columns:
        raise ValueError(
            f"this version of AWQ needs rows in multiples of {num_rows} and columns in multiples of {num_columns}, "
            f"not shape {list(shape)}"
        )
    if shape[1] % (group_size or shape[1]):
        raise ValueError(f"AWQ needs whole groups of {group_size} columns, not {shape[1]} columns")
    return shape[1] // (group_size or shape[1])


def _padded_words(groups: int, group_size: int) -> int:
    """Words for the zero points of a row in the ``gemv`` versions."""
    if group_size not in (32, 64) and group_size < 128:
        raise ValueError(f"this version of AWQ has groups of 32, 64, 128 or more columns, not {group_size}")
    multiple = {32: 4, 64: 2}.get(group_size, 1)
    words = -(-groups // _PER_WORD)
    return -(-words // multiple) * multiple


@dataclass(frozen=True)
class Awq(Quantization):
    """layout: a value of ``LAYOUTS``. has_zero_point: of the config; without it, zero points that are stored count."""

    layout: str
    group_size: int | None
    has_zero_point: bool
    stored: StoredTensors

    def format_of(self, module: str) -> WeightFormat | None:
        if not any(self.stored.has(module + ending) for ending in _ENDINGS):
            return None
        scale_dtype = stored_scale_dtype(self.stored, f"{module}.scales")
        if self.layout == "gemv_fast":
            zeros = ".scaled_zeros" if self.stored.has(f"{module}.scaled_zeros") else ".qzeros"
            return AwqGemvFast(self.group_size, zeros, scale_dtype)
        has_zeros = self.has_zero_point or self.stored.has(f"{module}.qzeros")
        kind = AwqGemm if self.layout == "gemm" else AwqGemv
        return kind(self.group_size, has_zeros, scale_dtype)


def read(config: HfConfig, stored: StoredTensors) -> Awq:
    """What a quantization config of ``quant_method`` ``awq`` says. Raises ``ModelLoadError``."""
    bits_key, size_key = _first(config, "bits", "w_bit"), _first(config, "group_size", "q_group_size")
    if config.get(bits_key) != BITS:
        raise config.refuse(bits_key, "4")
    group_size = read_group_size(config, size_key)
    return Awq(_read_layout(config), group_size, config.flag("zero_point", True), stored)


def _first(config: HfConfig, *keys: str) -> str:
    """The first key that has a value, else the first one."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def _read_layout(config: HfConfig) -> str:
    key = _first(config, "version", "checkpoint_format", "format")
    version = config.get(key)
    if config.get("backend") == "llm-awq":
        version = "llm-awq"
    if version is None:
        return "gemm"
    if not isinstance(version, str) or version.lower() not in LAYOUTS:
        raise config.refuse(key, f"one of {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[version.lower()]
