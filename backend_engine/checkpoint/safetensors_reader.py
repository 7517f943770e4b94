"""``SafetensorsReader``: one safetensors file, read lazily: shapes from its header, tensors by name.

Used by ``checkpoint/loader.py``. The file is mapped, and what was read is given back to the system by ``release``, so
that loading takes no more memory than what is kept.
"""

import ctypes
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.config.regular_files import open_regular
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError

T = TypeVar("T")


class SafetensorsReader(TensorReader):
    """Opens the file at once; a damaged or truncated one is a ``ModelLoadError`` that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            open_regular(path).close()
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
        self._file: Any = self._guard(lambda: safe_open(str(path), framework="pt"))
        self._release = _page_releaser()

    def _guard(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (SafetensorError, OSError, MemoryError) as error:
            reason = " ".join(str(error).split())
            raise ModelLoadError(f"{self.path} is not a whole safetensors file ({reason})") from None

    def names(self) -> list[str]:
        return list(self._file.keys())

    def describe(self, name: str) -> TensorInfo:
        piece = self._guard(lambda: self._file.get_slice(name))
        return TensorInfo(tuple(piece.get_shape()), str(piece.get_dtype()))

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._guard(lambda: self._file.get_tensor(name))
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Let go of the mapped pages that lie wholly inside the tensor; who reads them again reads the file again."""
        start = math.ceil(tensor.data_ptr() / mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._release is not None and end > start:
            self._release(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_DONTNEED))


def _page_releaser() -> Any:
    """The C library's ``madvise``; ``None`` on systems that have none."""
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None
