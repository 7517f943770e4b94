"""``rank_shards``: which rows and columns of a model's parameters each rank of an engine folder holds.

Called where such folders are written and read. Follows from the whole model and from ``rank_of`` it, both without
memory: what is smaller on a rank is divided. Touches no weight.
"""

from typing import NamedTuple

import torch

from backend_engine.errors import ConfigError
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.layers.moe import MoeDecl
from backend_engine.model_engine.memory_plan import MemoryPlan, outline, stages_of
from backend_engine.model_engine.rank_spec import per_rank, rank_of
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.weight_rules import LoadTarget

_TP, _PP = "tensor_parallel_size", "pipeline_parallel_size"
_EMBEDDINGS = "embed_tokens.weight"


class Shard(NamedTuple):
    """What a rank holds of a parameter. rows: ranges of the whole parameter's rows, in the order in which the rank has
    them, one for each fused part where it is divided. columns: their range, ``None`` = all.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None


def rank_shards(spec: ArchSpec, tp: int, pp: int) -> list[dict[str, Shard]]:
    """For each rank, ``stage * tp + tensor-parallel rank`` as in TensorRT-LLM's ``Mapping``, what it holds, by the
    names of ``CausalLM.load_targets()``. A parameter of which a rank holds nothing is absent there.

    Heads of keys and values that are fewer than the ranks are on several of them, one after the other. Shares of inner
    widths, of the vocabulary and of experts are rounded up, so that the last ranks may hold less than the first. A bias
    behind a product whose columns are divided is whole on every rank. The table of a tied head is on the last stage
    too. Raises ``ConfigError`` for sizes that the model cannot be divided into.
    """
    _check(spec, tp, pp)
    stages = MemoryPlan((), spec).stages(pp, _PP)
    # Their dtype does not matter.
    whole = outline(spec, torch.float32).load_targets()
    rank = whole if tp == 1 else outline(rank_of(spec, tp, _TP), torch.float32).load_targets()
    assert whole.keys() == rank.keys(), whole.keys() ^ rank.keys()
    found: list[dict[str, Shard]] = [{} for _ in range(tp * pp)]
    for name, target in whole.items():
        holders = [*stages_of(name, stages)]
        if name == _EMBEDDINGS and spec.tie_embeddings and pp > 1:
            holders.append(pp - 1)
        for tp_rank in range(tp):
            shard = _shard(name, target, rank[name], spec, (tp_rank, tp))
            if shard is not None:
                for stage in holders:
                    found[stage * tp + tp_rank][name] = shard
    return found


def _check(spec: ArchSpec, tp: int, pp: int) -> None:
    for setting, size in ((_TP, tp), (_PP, pp)):
        if size < 1:
            raise ConfigError(f"{setting} {size} is not allowed; use a whole number of 1 or more")
    if tp > 1 and any(isinstance(layer.mixer, Mamba2Decl) for layer in spec.layers):
        raise ConfigError(f"{_TP} {tp}: recurrent layers are not divided; use 1")


def _shard(name: str, whole: LoadTarget, rank: LoadTarget, spec: ArchSpec, place: tuple[int, int]) -> Shard | None:
    """``place``: number of the tensor-parallel rank, and how many there are. ``None`` = it holds nothing."""
    tp_rank, tp = place
    num_rows = whole.shape[0]
    if not _holds(name, spec, tp_rank, tp):
        return None
    if whole.shape[1:] != rank.shape[1:]:
        assert whole.shape[0] == rank.shape[0] and len(whole.shape) == 2, (name, whole.shape, rank.shape)
        columns = _share(whole.shape[1], rank.shape[1], tp_rank)
        return None if columns is None else Shard(((0, num_rows),), columns)
    if whole.part_sizes == rank.part_sizes:
        return Shard(((0, num_rows),))
    rows, start = [], 0
    for size, rank_size in zip(whole.part_sizes, rank.part_sizes, strict=True):
        share = _share(size, rank_size, _row_share(name, size, rank_size, place))
        if share is not None:
            rows.append((start + share[0], start + share[1]))
        start += size
    return Shard(tuple(rows)) if rows else None


def _holds(name: str, spec: ArchSpec, tp_rank: int, tp: int) -> bool:
    """Whether a parameter is on the rank at all; experts are there whole or not."""
    _, is_expert, rest = name.partition(".mlp.experts.")
    if not is_expert:
        return True
    mlp = spec.layers[int(name.split(".")[1])].mlp
    assert isinstance(mlp, MoeDecl), name
    return int(rest.split(".")[0]) // per_rank(mlp.routing.num_experts, tp) == tp_rank


def _row_share(name: str, size: int, rank_size: int, place: tuple[int, int]) -> int:
    """Which share of a part's rows the rank holds. Heads that are fewer than the ranks are on several neighbours."""
    tp_rank, tp = place
    if not _is_in_mixer(name):
        return tp_rank
    num_shares = size // rank_size
    assert size == num_shares * rank_size and tp % num_shares == 0, (name, size, rank_size, tp)
    return tp_rank * num_shares // tp


def _is_in_mixer(name: str) -> bool:
    return name.startswith("layers.") and name.split(".")[2] == "mixer"


def _share(size: int, rank_size: int, index: int) -> tuple[int, int] | None:
    """Range of share ``index`` of ``size`` rows or columns; ``None`` = it is empty."""
    start = index * rank_size
    return (start, min(start + rank_size, size)) if start < size else None
