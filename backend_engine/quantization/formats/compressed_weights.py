"""The forms in which compressed-tensors stores integers, packed or not, and what it holds for the input of a layer.

Made by ``compressed_tensors.py`` from the quantization config; floats are in forms that others have too. Pure data and
arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.formats.packed_ints import num_words, pack_codes, row_chunks, unpack_int32
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.schemes.inputs import ReorderedInput, RoundedInput
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

_ZERO_DTYPES = ("I8", "U8", "I32", "I64", "F8_E4M3")


@dataclass(frozen=True)
class SharedScales:
    """rows, columns: of a block that has one scale; ``None`` = all of them. is_whole: columns must divide a row.
    number_shape: of a tensor that holds the one scale of all rows and columns.
    """

    rows: int | None = None
    columns: int | None = None
    is_whole: bool = False
    number_shape: tuple[int, ...] = (1,)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor with a number for each block of a weight of ``shape``. Raises ``ValueError``."""
        if self.rows is None:
            return self.number_shape
        *around, num_rows, num_columns = shape
        if self.is_whole and self.columns is not None and num_columns % self.columns:
            raise ValueError(f"groups of {self.columns} columns do not divide its {num_columns}")
        return (*around, -(-num_rows // self.rows), 1 if self.columns is None else -(-num_columns // self.columns))

    def by_row(self, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``numbers``, one for each block, for every row: ``[..., out_features, num_groups]``."""
        if self.rows is None:
            return numbers.reshape(1).expand(*shape[:-1], 1)
        return numbers if self.rows == 1 else numbers.repeat_interleave(self.rows, -2)[..., : shape[-2], :]


@dataclass(frozen=True)
class CompressedInt(WeightFormat):
    """``(weight - zero point) * scale``. bits: of the signed integers. is_packed: they lie in int32 words, with
    ``2 ** (bits - 1)`` added; otherwise one by one in int8. has_packed_zeros: so do the zero points, along the rows.
    has_order: ``weight_g_idx`` tells the group of each column.
    """

    bits: int
    scales: SharedScales
    scale_dtype: torch.dtype
    is_packed: bool
    is_symmetric: bool = True
    has_packed_zeros: bool = False
    has_order: bool = False

    @property
    def _code_bits(self) -> int:
        return 4 if self.bits <= 4 else 8

    @property
    def scheme(self) -> WeightScheme:
        zero = "midpoint" if self.is_symmetric else "codes"
        weight = GroupwiseInt(self._code_bits, self.scales.columns, zero, self.scale_dtype)
        return ReorderedInput(weight) if self.has_order else weight

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        num_columns = shape[-1]
        if self._code_bits == 4 and num_columns % 2:
            raise ValueError(f"{self.bits} bits need an even number of columns, not {num_columns}")
        groups = self.scales.shape(shape)
        found = {".weight": Leaf(shape, ("I8",))}
        if self.is_packed:
            words = (*shape[:-1], num_words(num_columns, self.bits))
            sizes = Leaf((len(shape),), ("I64", "I32"), is_optional=True)
            found = {".weight_packed": Leaf(words, ("I32",)), ".weight_shape": sizes}
        found[".weight_scale"] = Leaf(groups, FLOAT_DTYPES)
        if self.has_packed_zeros:
            packed = (*groups[:-2], num_words(groups[-2], self.bits), groups[-1])
            found[".weight_zero_point"] = Leaf(packed, ("I32",))
        elif not self.is_symmetric:
            found[".weight_zero_point"] = Leaf(groups, ("I8",))
        if self.has_order:
            found[".weight_g_idx"] = Leaf((num_columns,), ("I32", "I64"))
        return found

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        sizes = leaves.get(".weight_shape")
        if sizes is not None and tuple(sizes.tolist()) != shape:
            raise ValueError(f"weight_shape is {sizes.tolist()}; config.json asks for {list(shape)}")
        found = {"scales": self.scales.by_row(leaves[".weight_scale"], shape).to(self.scale_dtype)}
        if self.has_order:
            found["order"] = self._order(leaves[".weight_g_idx"], shape[-1])
        found["codes"] = self._codes(leaves, shape, found.get("order"))
        if not self.is_symmetric:
            found["zeros"] = self._zeros(leaves[".weight_zero_point"], shape)
        return found

    def _order(self, groups: Tensor, num_columns: int) -> Tensor:
        """The columns in the order of their groups, each of which has as many as any other."""
        if bool((groups < 0).any()):
            return torch.arange(num_columns)
        size = self.scales.columns or num_columns
        if not torch.equal(groups.sort().values, torch.arange(num_columns).div(size, rounding_mode="floor").to(groups)):
            raise ValueError(f"weight_g_idx does not put {size} columns into each group")
        return groups.argsort(stable=True)

    def _codes(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...], order: Tensor | None) -> Tensor:
        if self.is_packed and self.bits == self._code_bits and order is None:
            # The bytes of the words are the codes already.
            return leaves[".weight_packed"].contiguous().view(torch.uint8)[..., : shape[-1] * self.bits // 8]
        stored = leaves[".weight_packed" if self.is_packed else ".weight"].flatten(0, -2)
        out = torch.empty(stored.shape[0], shape[-1] * self._code_bits // 8, dtype=torch.uint8)
        for chunk in row_chunks(stored.shape[0], shape[-1]):
            codes = self._unsigned(stored[chunk], shape[-1])
            out[chunk] = pack_codes(codes if order is None else codes.index_select(1, order), self._code_bits)
        return out.view(*shape[:-1], -1)

    def _zeros(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.has_packed_zeros:
            return self._unsigned(stored.mT.contiguous(), shape[-2]).mT
        return self.scales.by_row(self._unsigned(stored, stored.shape[-1]), shape)

    def _unsigned(self, stored: Tensor, num_values: int) -> Tensor:
        """Signed integers, as they are or packed, as the codes of ``GroupwiseInt``: from its midpoint on."""
        midpoint = 1 << (self._code_bits - 1)
        if stored.dtype == torch.int32:
            return unpack_int32(stored, self.bits, num_values) + (midpoint - (1 << (self.bits - 1)))
        codes = stored.view(torch.uint8) + midpoint
        if self._code_bits == 4 and bool((codes > 15).any()):
            raise ValueError(f"integers between {int(stored.min())} and {int(stored.max())} do not fit into 4 bits")
        return codes


@dataclass(frozen=True)
class RoundedLayer(WeightFormat):
    """``weight`` in a layer that rounds its input first, see ``RoundedInput``. number, zero: ending and shape of the
    tensors with what is static about it. zeros: endings and shapes of zero points that are stored though they are 0.
    """

    weight: WeightFormat
    kind: str | None = None
    group_size: int | None = None
    is_symmetric: bool = True
    number: tuple[str, tuple[int, ...]] | None = None
    zero: tuple[str, tuple[int, ...]] | None = None
    zeros: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def scheme(self) -> WeightScheme:
        if self.kind is None:
            return self.weight.scheme
        return RoundedInput(self.weight.scheme, self.kind, self.number is not None, self.group_size, self.is_symmetric)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        found = self.weight.leaves(shape)
        if self.number is not None:
            found[self.number[0]] = Leaf(self.number[1], FLOAT_DTYPES)
        if self.zero is not None:
            found[self.zero[0]] = Leaf(self.zero[1], ("I8",))
        return found | {ending: Leaf(size, (*FLOAT_DTYPES, *_ZERO_DTYPES), True) for ending, size in self.zeros}

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        for ending, _ in self.zeros:
            if ending in leaves and bool(leaves[ending].to(torch.float32).any()):
                raise ValueError(f"{ending.removeprefix('.')} is not 0, but config.json says that it is symmetric")
        found = self.weight.unpack(leaves, shape)
        if self.number is not None:
            found["input_scale"] = _positive(self.number[0], leaves[self.number[0]])
        if self.zero is not None:
            found["input_zero"] = leaves[self.zero[0]].to(torch.float32).reshape(1)
        return found


def _positive(ending: str, number: Tensor) -> Tensor:
    value = number.to(torch.float32).reshape(1)
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{ending.removeprefix('.')} is {float(value)}; expected a number above 0")
    return value
