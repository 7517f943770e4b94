"""GPTQ checkpoints (Frantar et al., 2022) as AutoGPTQ and GPTQModel write them: ``quant_method`` ``gptq``.

``read`` takes the config apart once; whether a weight is packed at all, the stored tensors tell. Weights of 2, 3 and 4
bits are kept in four, those of 8 in eight. Multiplies nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.name_expression import NameExpression
from backend_engine.quantization.formats.packed_ints import (
    WORD_BITS,
    repack_int32,
    row_chunks,
    unpack_int32,
    unpack_int32_down,
)
from backend_engine.quantization.schemes.grouped import num_groups
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.schemes.inputs import ReorderedInput
from backend_engine.quantization.weight_format import Leaf, Quantization, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

BITS = (2, 3, 4, 8)
_MAX_RULES = 1000
SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Dtypes of scales that stay as they are, by the name that safetensors has for them."""
_ENDINGS = (".qweight", ".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True)
class GptqWeight(WeightFormat):
    """Integers along the columns in int32 words, ``qweight [in * bits / 32, out]`` and, along the rows, ``qzeros
    [groups, out * bits / 32]``; ``scales [groups, out]``; ``g_idx [in]``, the group of each column.

    group_size: ``None`` = the row. is_reordered: groups may lie across the row (act-order). is_less_one: zero points
    are stored less one (checkpoint format ``gptq``; in ``gptq_v2`` they are not).
    """

    bits: int
    group_size: int | None
    is_reordered: bool = False
    is_less_one: bool = True
    scale_dtype: torch.dtype = torch.float16

    @property
    def scheme(self) -> WeightScheme:
        weight = GroupwiseInt(self._code_bits, self.group_size, "codes", self.scale_dtype)
        return ReorderedInput(weight) if self.is_reordered else weight

    @property
    def _code_bits(self) -> int:
        return 8 if self.bits == 8 else 4

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        unit = WORD_BITS // math.gcd(WORD_BITS, self.bits)
        if len(shape) != 2 or shape[0] % unit or shape[1] % unit:
            raise ValueError(
                f"GPTQ of {self.bits} bits needs rows and columns in multiples of {unit}, not shape {list(shape)}"
            )
        num_rows, num_columns = shape
        groups = num_groups(num_columns, self.group_size)
        return {
            ".qweight": Leaf((num_columns * self.bits // WORD_BITS, num_rows), ("I32",)),
            ".qzeros": Leaf((groups, num_rows * self.bits // WORD_BITS), ("I32",)),
            ".scales": Leaf((groups, num_rows), tuple(SCALE_DTYPES)),
            ".g_idx": Leaf((num_columns,), ("I32", "I64"), is_optional=not self.is_reordered),
        }

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        order = self._order(leaves.get(".g_idx"), shape[1])
        found = {
            "codes": self._codes(leaves[".qweight"], order, shape),
            "zeros": self._zeros(leaves[".qzeros"], shape[0]),
            "scales": leaves[".scales"].t(),
        }
        return found if order is None else {**found, "order": order}

    def _order(self, groups: Tensor | None, num_columns: int) -> Tensor | None:
        """int64 ``[in]``: columns of the input, group by group; ``None`` where they lie like that already."""
        if groups is None:
            return None
        in_order = torch.arange(num_columns, device=groups.device) // (self.group_size or num_columns)
        if not self.is_reordered:
            if not torch.equal(groups.to(torch.int64), in_order):
                raise ValueError("g_idx spreads groups over the row, which desc_act false rules out")
            return None
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order].to(torch.int64), in_order):
            raise ValueError(f"g_idx does not have groups of {self.group_size} columns, numbered from 0")
        return order

    def _codes(self, words: Tensor, order: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        num_rows, num_columns = shape
        codes = torch.empty(num_rows, num_columns * self._code_bits // 8, dtype=torch.uint8, device=words.device)
        for chunk in row_chunks(num_rows, num_columns):
            rows = words[:, chunk]
            if order is None and self.bits == self._code_bits:
                codes[chunk] = repack_int32(rows.t(), self.bits, num_columns, self._code_bits)
                continue
            # Column by column of the weight, which is how they come and go fastest.
            values = unpack_int32_down(rows, self.bits)
            if order is not None:
                values = values.index_select(0, order)
            codes[chunk] = (values if self.bits == 8 else values[::2] | (values[1::2] << 4)).t()
        return codes

    def _zeros(self, words: Tensor, num_rows: int) -> Tensor:
        """uint8 ``[out, groups]``."""
        if not self.is_less_one:
            return unpack_int32(words, self.bits, num_rows).t()
        if WORD_BITS % self.bits:
            return ((unpack_int32(words, self.bits, num_rows) + 1) & ((1 << self.bits) - 1)).t()
        # GPTQModel takes the ones off whole words, where a zero point of 0 borrows from the next: only the addition to
        # whole words undoes that.
        ones = sum(1 << place for place in range(0, WORD_BITS, self.bits))
        return unpack_int32(words + ones, self.bits, num_rows).t()


class _Settings(NamedTuple):
    bits: int
    group_size: int | None
    desc_act: bool


class _Rule(NamedTuple):
    """An entry of ``dynamic``; ``settings`` ``None``: the modules are left alone."""

    pattern: NameExpression
    settings: _Settings | None


@dataclass(frozen=True)
class Gptq(Quantization):
    """``dynamic`` of GPTQModel's configs: the first rule whose pattern fits the start of the module's name decides."""

    settings: _Settings
    rules: tuple[_Rule, ...]
    is_less_one: bool
    stored: StoredTensors

    def format_of(self, module: str) -> WeightFormat | None:
        if not any(self.stored.has(module + ending) for ending in _ENDINGS):
            return None
        settings = next((rule.settings for rule in self.rules if rule.pattern.match(module)), self.settings)
        if settings is None:
            return None
        # One group is the same in any order.
        is_reordered = settings.desc_act and settings.group_size is not None
        scale_dtype = stored_scale_dtype(self.stored, f"{module}.scales")
        return GptqWeight(settings.bits, settings.group_size, is_reordered, self.is_less_one, scale_dtype)


def stored_scale_dtype(stored: StoredTensors, name: str) -> torch.dtype:
    """The dtype in which scales stay in memory: that of tensor ``name``, float16 where it has none of ours."""
    info = stored.tensors.get(name)
    return SCALE_DTYPES.get(info.dtype, torch.float16) if info is not None else torch.float16


def read_group_size(config: HfConfig, key: str) -> int | None:
    """Columns that share a scale; -1 in the config stands for a row, ``None``. It must be there."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise config.refuse(key, "a number of columns, or -1 for a whole row")
    return None if value == -1 else value


def read(config: HfConfig, stored: StoredTensors) -> Gptq:
    """What a quantization config of ``quant_method`` ``gptq`` says. Raises ``ModelLoadError``.

    ``sym`` and ``lm_head`` need no regard: zero points are stored either way, and so is what became of the head.
    """
    format_key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    is_less_one = config.choice(format_key, ("gptq", "gptq_v2"), "gptq") == "gptq"
    config.require_neutral({"is_marlin_format": [False], "pack_dtype": ["int32"], "adapter": []})
    config.flag("sym", True)
    config.flag("lm_head", False)
    # Without the key act-order is assumed, which is right for columns in any order.
    settings = _Settings(_read_bits(config), read_group_size(config, "group_size"), config.flag("desc_act", True))
    return Gptq(settings, _read_rules(config, settings), is_less_one, stored)


def _read_bits(config: HfConfig) -> int:
    bits = config.get("bits")
    if not isinstance(bits, int) or bits not in BITS:
        raise config.refuse("bits", "2, 3, 4 or 8")
    return bits


def _read_rules(config: HfConfig, settings: _Settings) -> tuple[_Rule, ...]:
    section = config.section("dynamic")
    if section is None:
        return ()
    if len(config.get("dynamic")) > _MAX_RULES:
        raise config.refuse("dynamic", f"at most {_MAX_RULES} rules")
    return tuple(_read_rule(section, key, settings) for key in config.get("dynamic"))


def _read_rule(section: HfConfig, key: str, settings: _Settings) -> _Rule:
    """``key``: a regular expression, behind ``-:`` one of modules to leave alone, behind ``+:`` or nothing one of
    modules with settings of their own.
    """
    changes = section.section(key)
    try:
        pattern = NameExpression(key.removeprefix("-:").removeprefix("+:"))
    except ValueError as error:
        raise section.refuse(key, f"a regular expression as its name, perhaps behind '-:' or '+:' ({error})") from None
    if key.startswith("-:"):
        return _Rule(pattern, None)
    if changes is None:
        return _Rule(pattern, settings)
    bits = settings.bits if changes.get("bits") is None else _read_bits(changes)
    group_size = settings.group_size if changes.get("group_size") is None else read_group_size(changes, "group_size")
    return _Rule(pattern, _Settings(bits, group_size, changes.flag("desc_act", settings.desc_act)))
