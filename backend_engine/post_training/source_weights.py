"""``SourceWeights``: which rows of a checkpoint's tensors are which rows of our parameters, and the tensors' values.

``export.py`` goes the way of the loader back with it: from parameters to the names and the order of the checkpoint. It
knows no model by name: the family's weight rules are asked where they take each row from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import architecture, stated_dtype
from backend_engine.checkpoint.loader import check_weights
from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
from backend_engine.errors import ConfigError
from backend_engine.layers.embedding import Embedding
from backend_engine.model_engine.memory_plan import outline
from backend_engine.model_engine.model_loader import DTYPES
from backend_engine.model_engine.native_backend import family_of
from backend_engine.models.model_source import ModelSource
from backend_engine.models.weight_plan import Plan
from backend_engine.models.weight_rules import Copy, LoadTarget, Tie
from backend_engine.quantization.read_config import read_quantization


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """That the checkpoint states for its weights, float32 where it states none that models run in."""
    return DTYPES.get(stated_dtype(checkpoint.config) or "", torch.float32)


@dataclass(frozen=True)
class SourceWeights:
    """targets: our parameters. plan: which of the checkpoint's tensors fill them. heads: names that the head has in
    checkpoints of this kind. is_quantized: the checkpoint packs weights already.
    """

    stored: StoredWeights
    targets: Mapping[str, LoadTarget]
    plan: Plan
    heads: tuple[str, ...]
    dtype: torch.dtype
    is_quantized: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "SourceWeights":
        """Reads headers only. Raises ``ModelLoadError`` as ``load_model`` does, also for a model without a family file,
        and ``ConfigError`` for an engine folder, whose weights are not named as a checkpoint names them.
        """
        if checkpoint.engine is not None:
            raise ConfigError(f"{checkpoint.path} is an engine folder; name the checkpoint that it was built from")
        name = architecture(checkpoint.config, checkpoint.origin)
        source = ModelSource(checkpoint.path, checkpoint.config, name, origin=checkpoint.origin)
        family = family_of(source)
        files = TensorFiles(checkpoint.open_tensors())
        quantization = read_quantization(checkpoint.config, files.described(source.where))
        stored = StoredWeights(files, quantization, source.where, source.origin)
        targets = outline(family.from_hf(source.config, source.origin), torch.float32).load_targets()
        todo = check_weights(stored, targets, family.rules, str(checkpoint.path))
        heads = (rule.source for rule in family.rules if isinstance(rule, Tie))
        return cls(
            stored,
            targets,
            todo,
            tuple(dict.fromkeys(heads)),
            stored_dtype(checkpoint),
            bool(checkpoint.config.get("quantization_config")),
        )

    def is_product(self, copy: Copy) -> bool:
        """Whether the source of ``copy`` is a matrix that others take for a linear layer."""
        target = self.targets[copy.parameter]
        return len(target.shape) > 1 and not isinstance(target.layer, Embedding)

    def plain(self, name: str) -> Tensor:
        """The tensor ``name`` of the plan as a plain one: as it is stored, or where it is packed, decoded to the dtype
        that the checkpoint states for its weights, else float32. ``release`` it when it is not needed any more.
        """
        copies = self.plan.copies[name]
        packing = self.stored.format_of(name)
        if packing is None:
            return self.stored.files.read(name)
        source = copies[0].source
        tensors = self.stored.read(copies[0])
        decoded = packing.scheme.decode(self.stored.unpack(copies[0], tensors))
        found = torch.empty(math.prod(source.shape), dtype=self.dtype)
        for copy in copies:
            found[elements_of(copy).reshape(-1)] = copy.pick_packed(decoded).reshape(-1).to(self.dtype)
        for full_name, tensor in zip(self.stored.tensors_of(copies[0]), tensors.values(), strict=True):
            self.stored.files.release(full_name, tensor)
        return found.view(source.shape)

    def release(self, name: str, tensor: Tensor) -> None:
        """Told that a tensor of ``plain`` is not needed any more."""
        if self.stored.format_of(name) is None:
            self.stored.files.release(name, tensor)


def elements_of(copy: Copy) -> Tensor:
    """Where in the source, counted through all of its elements, those of the rows of ``copy`` are: int64, with the
    shape of the rows.
    """
    shape = copy.source.shape
    return copy.pick(torch.arange(math.prod(shape)).view(shape))


def rows_of(copy: Copy) -> Tensor:
    """Where in the source, counted through the rows of ``packed_shape`` ``[..., out_features, in_features]``, the rows
    of ``copy`` are: int64 ``[copy.rows]``.
    """
    leading = copy.packed_shape[:-1]
    return copy.pick_packed(torch.arange(math.prod(leading)).view(*leading, 1)).reshape(-1)


def check_whole(copies: Sequence[Copy]) -> None:
    """Assert that ``copies`` of a packed source are all of its rows, each once."""
    rows = torch.cat([rows_of(copy) for copy in copies])
    total = math.prod(copies[0].packed_shape[:-1])
    assert torch.equal(rows.sort().values, torch.arange(total)), f"{copies[0].source.name}: {rows} of {total} rows"
