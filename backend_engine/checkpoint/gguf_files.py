"""``GgufFiles``: the GGUF file of a model, or all parts of one that is split, as one collection of tensors.

Names, shapes and types are the files' own. Made by ``gguf_checkpoint.py``.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from backend_engine.checkpoint.gguf_reader import GgufFile
from backend_engine.config.gguf_metadata import GgufHeader, split_files
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError


class GgufFiles:
    """``header``: the metadata, which the first part has. ``tensors``: of all parts, in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = [GgufFile(part) for part in split_files(path)]
        self.header: GgufHeader = parts[0].header
        self._file_of: dict[str, GgufFile] = {}
        for number, part in enumerate(parts):
            _check_part(part.header, number, len(parts))
            for name in part.tensors:
                if name in self._file_of:
                    raise ModelLoadError(
                        f"tensor {name} is in two files, {self._file_of[name].path.name} and {part.path.name}"
                    )
                self._file_of[name] = part
        self.tensors: Mapping[str, TensorInfo] = {name: part.tensors[name] for name, part in self._file_of.items()}
        if len(parts) > 1 and self.header.count("split.tensors.count", len(self.tensors)) != len(self.tensors):
            raise self.header.refuse("split.tensors.count", f"{len(self.tensors)}, as many as the parts hold")

    def read(self, name: str, entry: int | None = None) -> Tensor:
        """The tensor, or one entry of it, as ``GgufFile.read`` gives it."""
        return self._file_of[name].read(name, entry)

    def decode(self, name: str) -> Tensor:
        """The tensor as float32 numbers."""
        return self._file_of[name].decode(name)


def _check_part(header: GgufHeader, number: int, num_parts: int) -> None:
    if header.count("split.count", 1) not in ((num_parts,) if num_parts > 1 else (0, 1)):
        raise header.refuse("split.count", f"{num_parts}, as many as the files' names say")
    if num_parts > 1 and header.count("split.no") != number:
        raise header.refuse("split.no", f"{number}, as the file's name says")
