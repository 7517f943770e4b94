"""``WeightFormat``: how a checkpoint stores a weight, and how that becomes a ``WeightScheme``'s components.

``Quantization`` says which format each weight of a checkpoint has. One kind of checkpoint a file, in ``formats``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from backend_engine.core.tensor_info import TensorInfo
from backend_engine.quantization.weight_scheme import WeightScheme

FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")


class Leaf(NamedTuple):
    """A tensor of a packed weight as the checkpoint has to hold it: shape, allowed dtypes, whether it may be absent."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


class WeightFormat(ABC):
    """Frozen data, compared by value."""

    @property
    @abstractmethod
    def scheme(self) -> WeightScheme:
        """The form that the weight takes in memory."""

    @abstractmethod
    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        """What the checkpoint holds for a weight of ``shape`` ``[..., out_features, in_features]``: by the ending that
        is put behind the weight's module (``.qweight``, ``_blocks``). The first one's presence tells that it is packed.

        Raises ``ValueError`` (a phrase without the weight's name) for a shape that the format cannot have.
        """

    @abstractmethod
    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Components of ``scheme``: ``[..., out_features, *component.shape]``, or ``component.shape`` for one that is
        not per row. ``leaves`` have been checked. What it needs in between is bounded by some 64 MiB, whatever the
        weight's size. Raises ``ValueError`` (a phrase) for values that make no sense.
        """


class Quantization(ABC):
    """What a checkpoint's quantization config says, weight by weight."""

    @abstractmethod
    def format_of(self, module: str) -> WeightFormat | None:
        """The format of the weight of ``module`` (``model.layers.0.mlp.down_proj``), ``None`` for a plain one."""

    @property
    def kv_cache_dtype(self) -> str | None:
        """``fp8`` or ``int8`` where the checkpoint was made for such a KV cache."""
        return None


class NoQuantization(Quantization):
    """A checkpoint with plain weights only."""

    def format_of(self, module: str) -> WeightFormat | None:
        return None


class StoredTensors(NamedTuple):
    """What a reader of quantization configs may look at: the checkpoint's tensors by name, and where they are from, for
    messages.
    """

    tensors: Mapping[str, TensorInfo]
    where: str

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self.tensors
