"""``RankWriter``: the safetensors files of one rank of an engine folder. ``stored_of``: what it stores of a parameter.

Used by ``engine_builder.py``; ``model_engine/engine_weights.py`` reads the same names.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend_engine.checkpoint.hf_folder import CONFIG_FILE
from backend_engine.model_engine.engine_weights import Piece, packed_pieces, parts_of, plain_piece
from backend_engine.model_engine.rank_shards import Shard
from backend_engine.models.weight_rules import LoadTarget

LARGEST_FILE = 1 << 30
"""Bytes after which a new file is begun."""


class RankWriter:
    """Keeps what it is given until a file is full. The folder has a config.json, whose mode the files get."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._tensors: dict[str, Tensor] = {}
        self._num_files = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors that nobody changes afterwards, by name."""
        self._tensors.update(tensors)
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= LARGEST_FILE:
            self.flush()

    def flush(self) -> None:
        """Write what is kept, if anything is."""
        if self._tensors:
            self._num_files += 1
            path = self._folder / f"rank{self._rank}-{self._num_files:05d}.safetensors"
            save_file(self._tensors, path)
            # The library writes files that only their owner can read.
            shutil.copymode(self._folder / CONFIG_FILE, path)
        self._tensors = {}


def stored_of(name: str, target: LoadTarget, shard: Shard) -> dict[str, Tensor]:
    """What a rank stores of a filled parameter, by the names of ``engine_weights``."""
    parts = parts_of(target)
    if not parts:
        tensor = target.tensor if target.layer is None else target.layer.weight
        assert tensor is not None, name
        piece = plain_piece(name, target.shape, shard)
        return {piece.name: _rows(tensor if piece.columns is None else tensor[:, piece.columns], piece)}
    found = {}
    for index, part in enumerate(parts):
        held = part.tensors if shard.columns is None else part.scheme.columns(part.tensors, *shard.columns)
        for key, piece in packed_pieces(name, index, part, target.shape[1], shard).items():
            found[piece.name] = _rows(held[key], piece)
    return found


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    if piece.rows is None or tuple(tensor.shape) == piece.shape:
        return tensor.contiguous()
    return torch.cat([tensor[place] for place, _ in piece.rows])
