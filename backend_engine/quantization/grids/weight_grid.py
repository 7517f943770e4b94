"""``WeightGrid``: the numbers that a quantized weight can be, and how a checkpoint stores them. One kind a file.

What post-training quantization rounds to; the way back, from a checkpoint's tensors, is ``WeightFormat``. A grid is
frozen data and holds no tensors.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor


class Scales(NamedTuple):
    """scale: float32 ``[rows, num_groups]``, above 0, exactly as it is stored. zero: the code that stands for 0, whole
    numbers in float32 of the same shape, ``None`` = symmetric. tensor_scale: float32 ``[1]``, the number that NVFP4 has
    for the whole weight and that ``scale`` contains.
    """

    scale: Tensor
    zero: Tensor | None = None
    tensor_scale: Tensor | None = None


class WeightGrid(ABC):
    """A weight is ``[rows, in_features]``; rows are rounded independently of each other, given ``tensor_scale``."""

    @property
    @abstractmethod
    def group_size(self) -> int | None:
        """Columns that share a scale, neighbours; ``None`` = the row."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """Stored bits of a weight, scales not counted."""

    @abstractmethod
    def problem_with(self, in_features: int) -> str | None:
        """Why rows of this length cannot have the grid (a phrase), ``None`` when they can."""

    @abstractmethod
    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Scales:
        """The scales with which the rounded weight is nearest to ``weight`` (float32): a search over clipped ranges,
        errors of a column counted ``importance [in_features]`` times (``None`` = alike).
        """

    @abstractmethod
    def round(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest numbers of the grid, float32: ``weight`` of any shape, ``scale`` and ``zero`` broadcast to it."""

    @abstractmethod
    def leaves(self, rounded: Tensor, scales: Scales) -> dict[str, Tensor]:
        """``rounded [rows, in_features]``, numbers of the grid, as compressed-tensors stores them: by the ending behind
        the module's name (``.weight_packed``, ``.weight_scale``).
        """

    @abstractmethod
    def weights_config(self) -> dict[str, Any]:
        """The ``weights`` of a group of compressed-tensors' quantization config."""

    @property
    @abstractmethod
    def packing(self) -> str:
        """The ``format`` of compressed-tensors' quantization config, such as ``pack-quantized``."""


def per_group(scales: Tensor, group_size: int | None, in_features: int) -> Tensor:
    """``[rows, num_groups]`` repeated for every column: ``[rows, in_features]``."""
    return scales.expand(-1, in_features) if group_size is None else scales.repeat_interleave(group_size, 1)
