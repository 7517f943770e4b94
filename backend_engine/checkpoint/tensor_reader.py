"""``TensorReader``: tensors by name, whatever file they lie in. ``MadeTensors``: tensors made of others when read.

The loader reads through it; each kind of file is one reader. Names and shapes are known before anything is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backend_engine.core.tensor_info import TensorInfo

if TYPE_CHECKING:  # whoever only reads configurations does without torch
    from torch import Tensor


class TensorReader(ABC):
    """Opening it has checked the file; every fault is a one-line ``ModelLoadError`` that names file and tensor."""

    path: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Tensor names, in the order of the file."""

    @abstractmethod
    def describe(self, name: str) -> TensorInfo:
        """Shape and dtype, without reading the tensor."""

    @abstractmethod
    def read(self, name: str) -> "Tensor":
        """The tensor, on the CPU; its memory may be the mapped file's and is not to be written."""

    def release(self, tensor: "Tensor") -> None:
        """Told that a tensor of ``read`` is not needed any more, so that mapped memory can be given back."""
        return


class MadeTensor(NamedTuple):
    """A tensor that is made when it is read: shape and dtype as ``TensorInfo`` has them, and the making."""

    info: TensorInfo
    make: Callable[[], "Tensor"]


class MadeTensors(TensorReader):
    """Tensors that are cut out of, or put together from, those of a file."""

    def __init__(self, path: Path, tensors: Mapping[str, MadeTensor]) -> None:
        self.path = path
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> TensorInfo:
        return self._tensors[name].info

    def read(self, name: str) -> "Tensor":
        tensor = self._tensors[name].make()
        info = self._tensors[name].info
        assert tuple(tensor.shape) == info.shape, f"{self.path}: {name} was made as {tuple(tensor.shape)}, not {info}"
        return tensor
