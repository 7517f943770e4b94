"""``WeightFiles``: writes safetensors files of a Hugging Face folder, tensor by tensor, of which it keeps none.

For whoever writes checkpoints. A file's header comes before its data but is known last, so that data waits in hidden
files beside it, one for each size of element: every tensor then lies where its elements may. Names no tensor itself.
"""

import json
import shutil
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from backend_engine.checkpoint.torch_file import DTYPE_NAMES

MAX_FILE_BYTES = 2_000_000_000
_COPY_BYTES = 8 << 20
_ALIGNMENT = 8  # of the data; the largest element
_SIZES = (8, 4, 2, 1)


class WeightFiles:
    """``add`` tensors, then ``close`` once. Files of at most ``max_bytes`` of data, but for a tensor that is larger.

    A single file is called ``model.safetensors``, several are numbered and have an index.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._streams: dict[int, IO[bytes]] = {}
        # Of the file being written: tensors by the size of their elements, each with dtype, shape and bytes.
        self._tensors: dict[int, dict[str, tuple[str, list[int], int]]] = {}
        self._num_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write ``tensor`` (any device); names are not used twice."""
        assert name not in self._names, f"{name} is written twice"
        size = tensor.element_size()
        assert tensor.dtype in DTYPE_NAMES and size in _SIZES, f"{name} has dtype {tensor.dtype}"
        if self._num_bytes and self._num_bytes + tensor.nbytes > self._max_bytes:
            self._finish_file()
        if size not in self._streams:
            self._streams[size] = (self._folder / f".data{size}").open("w+b")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._streams[size].write(flat.numpy().data)
        self._tensors.setdefault(size, {})[name] = DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes
        self._names.add(name)
        self._num_bytes += tensor.nbytes

    def close(self) -> None:
        """Finish the last file, name all of them and write the index."""
        self._finish_file()
        total = len(self._files)
        if total == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        places = {}
        for number, (path, names) in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{total:05d}.safetensors"
            path.rename(self._folder / file)
            places.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _finish_file(self) -> None:
        """Put the header and the data behind one another."""
        path = self._folder / f".model{len(self._files)}"
        with path.open("wb") as file:
            header = self._header()
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for size in _SIZES:
                if size in self._streams:
                    with self._streams.pop(size) as stream:
                        stream.seek(0)
                        shutil.copyfileobj(stream, file, _COPY_BYTES)
                    (self._folder / f".data{size}").unlink()
        self._files.append((path, [name for size in _SIZES for name in self._tensors.get(size, ())]))
        self._tensors.clear()
        self._total_bytes += self._num_bytes
        self._num_bytes = 0

    def _header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for size in _SIZES:
            for name, (dtype, shape, num_bytes) in self._tensors.get(size, {}).items():
                entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + num_bytes]}
                start += num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % _ALIGNMENT)
