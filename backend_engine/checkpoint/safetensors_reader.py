"""``SafetensorsReader``: one safetensors file, read lazily: shapes from its header, tensors by name.

Used by ``checkpoint/loader.py``. The file is mapped, so a tensor costs memory only once it is copied.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend_engine.errors import ModelLoadError

T = TypeVar("T")


class SafetensorsReader:
    """Opens the file at once; a damaged or truncated one is a ``ModelLoadError`` that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = self._guard(lambda: safe_open(str(path), framework="pt"))

    def _guard(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ModelLoadError(f"{self.path} is not a whole safetensors file ({reason})") from None

    def names(self) -> list[str]:
        """Tensor names, in the order of the file."""
        return list(self._file.keys())

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype (as safetensors spells it, such as ``BF16``) without reading the tensor."""
        piece = self._guard(lambda: self._file.get_slice(name))
        return tuple(piece.get_shape()), str(piece.get_dtype())

    def read(self, name: str) -> Tensor:
        """The tensor; its memory is the mapped file's."""
        tensor: Tensor = self._guard(lambda: self._file.get_tensor(name))
        return tensor
