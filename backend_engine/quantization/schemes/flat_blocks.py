"""``FlatBlocks``: four-bit indices with scales for blocks of the flattened weight, whatever its rows (bitsandbytes).

A choice between other schemes that depends on the number of columns; it computes nothing itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.schemes.codebook4 import Codebook4
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.weight_scheme import Component, WeightScheme


@dataclass(frozen=True)
class FlatBlocks(WeightScheme):
    """A four-bit codebook with a scale for each ``block_size`` numbers of the flattened weight.

    Rows of whole blocks are ``Codebook4``. In rows of other lengths, blocks are cut into groups that no border of a row
    and none of a block lies within. Where such groups were shorter than four numbers, which takes an odd number of
    columns or twice one, the weight is ``Plain`` in ``plain_dtype``.
    """

    values: tuple[float, ...]
    block_size: int
    plain_dtype: torch.dtype = torch.float32

    def for_columns(self, in_features: int) -> Codebook4 | Plain:
        """The scheme of a weight of so many columns."""
        group_size = math.gcd(in_features, self.block_size)
        return Codebook4(self.values, group_size) if group_size % 4 == 0 else Plain(self.plain_dtype)

    def components(self, in_features: int) -> dict[str, Component]:
        return self.for_columns(in_features).components(in_features)

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self._of(tensors).decode(tensors)

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return self._of(tensors).num_columns(tensors)

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        whole, part = self._of(tensors), self.for_columns(stop - start)
        if part != whole:
            raise ValueError(
                f"columns {start} to {stop} of {self.num_columns(tensors)} would have other groups of their blocks of "
                f"{self.block_size}"
            )
        return whole.columns(tensors, start, stop)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._of(tensors).prepare(tensors)

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.for_columns(x.shape[1]).multiply(tensors, x)

    def _of(self, tensors: Mapping[str, Tensor]) -> Codebook4 | Plain:
        packed = tensors.get("codes")
        return self.for_columns(tensors["weight"].shape[-1] if packed is None else 2 * packed.shape[-1])
