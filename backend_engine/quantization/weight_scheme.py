"""``WeightScheme``: a form in which a weight stays in memory, and how it is multiplied. One scheme a file.

``packed.py`` creates, fills and multiplies with it; ``WeightFormat`` says how a checkpoint's tensors become one. A
scheme is frozen data and holds no tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A weight is decoded in parts of about so many numbers, which stay in a core's cache.
_CHUNK_NUMBERS = 1 << 19


class Component(NamedTuple):
    """One tensor of a packed weight: ``[out_features, *shape]``, or just ``shape`` when it is not ``per_row``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_row: bool = True


class WeightScheme(ABC):
    """Row-major: a row of the weight is decoded from the same row of every component and from those without rows.

    A scheme with a component that is not ``per_row`` (an order of columns, a scale of the input) keeps the parts of a
    fused layer apart, since each brings its own.
    """

    @abstractmethod
    def components(self, in_features: int) -> dict[str, Component]:
        """The tensors that a weight of ``in_features`` columns consists of, by name."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight that the components ``tensors`` stand for, float32 ``[..., in_features]``, columns in the order of
        the input. Leading dimensions of the components are those of the result.
        """

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        """Columns of the weight that the components ``tensors`` stand for; needed by ``columns`` alone."""
        raise ValueError(f"{type(self).__name__} does not say how it is cut by columns")

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        """The components, not yet prepared, of columns ``start`` to ``stop`` of the weight: those of a weight of this
        scheme with ``stop - start`` columns. Views where possible, of which some have gaps.

        Raises ``ValueError`` (a phrase) where the form cannot be cut there without other numbers coming out.
        """
        raise ValueError(f"{type(self).__name__} does not say how it is cut by columns")

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What ``multiply`` is handed in place of the loaded components; called once. By default the same."""
        return dict(tensors)

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``x [num_tokens, in_features]`` times the weight, ``[num_tokens, out_features]`` in the dtype of ``x``.

        The reference, on any device: decode and multiply, some rows of the weight at a time.
        """
        by_row = {name for name, component in self.components(x.shape[1]).items() if component.per_row}
        num_rows = next(tensors[name].shape[0] for name in sorted(by_row))
        step = max(1, _CHUNK_NUMBERS // x.shape[1])
        if num_rows <= step:
            return F.linear(x, self.decode(tensors).to(x.dtype))
        out = x.new_empty(x.shape[0], num_rows)
        for start in range(0, num_rows, step):
            chunk = {name: t[start : start + step] if name in by_row else t for name, t in tensors.items()}
            out[:, start : start + step] = F.linear(x, self.decode(chunk).to(x.dtype))
        return out
