"""``merge_ranks``: the tensors of a checkpoint that each rank wrote its part of, put together.

Used for Megatron-LM's mp_rank folders and NeMo's tp_rank ones. Source: how Megatron-core's ColumnParallelLinear,
RowParallelLinear and pipeline stages divide a model. Only counts; nothing is read.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from backend_engine.checkpoint.megatron_chunks import ChunkedTensor, joined
from backend_engine.checkpoint.megatron_model import MegatronModel
from backend_engine.checkpoint.megatron_names import core_name, shared_by, split_layer
from backend_engine.errors import ModelLoadError

VERSIONS = (0, 1, 2, 3)


class Stage(NamedTuple):
    """One pipeline stage: for each rank of its tensor-parallel group, the tensors by the names they are stored under,
    layers counted from 0 within the stage. ``where``: for messages.
    """

    where: str
    ranks: Sequence[Mapping[str, ChunkedTensor]]


def merge_ranks(stages: Sequence[Stage], model: MegatronModel, version: float = 3) -> dict[str, ChunkedTensor]:
    """All tensors by Megatron-core's names, layers counted through the stages in their order, whole: queries, keys and
    values by groups, gates above what they gate. ``version``: checkpoint_version, which tells the order of queries,
    keys and values. Raises ``ModelLoadError``.
    """
    merged: dict[str, ChunkedTensor] = {}
    num_layers = 0
    for stage in stages:
        layers_here = 0
        found = _with_joined_gates(_by_name(stage), stage.where)
        for name, parts in found.items():
            layer = split_layer(name)
            full = name
            if layer is not None:
                layers_here = max(layers_here, layer[0] + 1)
                full = f"decoder.layers.{num_layers + layer[0]}.{layer[1]}"
            if full in merged:
                raise ModelLoadError(f"{stage.where}: tensor {full} is in two stages")
            merged[full] = _merge(name, parts, model, version, stage.where)
        num_layers += layers_here
    return merged


def _by_name(stage: Stage) -> dict[str, list[ChunkedTensor]]:
    """The parts of each tensor, one of each rank."""
    found: dict[str, list[ChunkedTensor]] = {}
    for rank, tensors in enumerate(stage.ranks):
        for name, tensor in tensors.items():
            core = core_name(name)
            if core is not None:
                parts = found.setdefault(core, [])
                if len(parts) != rank:
                    raise ModelLoadError(
                        f"{stage.where}: tensor {name} of rank {rank} is there twice or not in all ranks"
                    )
                parts.append(tensor)
    for name, parts in found.items():
        if len(parts) != len(stage.ranks):
            raise ModelLoadError(f"{stage.where}: tensor {name} is in {len(parts)} of {len(stage.ranks)} ranks")
    return found


def _merge(
    name: str, parts: Sequence[ChunkedTensor], model: MegatronModel, version: float, where: str
) -> ChunkedTensor:
    first = parts[0]
    for part in parts:
        if part.shape != first.shape or part.dtype != first.dtype or not first.shape:
            raise ModelLoadError(
                f"{where}: tensor {name} is {list(first.shape)} {first.info.dtype} in one rank and {list(part.shape)} "
                f"{part.info.dtype} in another"
            )
    kind = shared_by(name)
    if kind == "columns" and len(first.shape) != 2:
        raise ModelLoadError(f"{where}: tensor {name} is {list(first.shape)}; expected two dimensions")
    if ".linear_qkv." in name and version < 2:
        parts = [_by_groups(part, model, version, f"{where}: tensor {name}") for part in parts]
    if model.is_gated and ".linear_fc1." in name:
        return _gate_and_up(parts, f"{where}: tensor {name}")
    if kind is None:
        return first
    return joined(parts, 0 if kind == "rows" else 1)


def _with_joined_gates(found: dict[str, list[ChunkedTensor]], where: str) -> dict[str, list[ChunkedTensor]]:
    """Where gate and up are two tensors, each rank's one below the other, as Megatron-core has them."""
    joint = dict(found)
    for name in found:
        if ".linear_fc1_up." in name:
            gates, ups = found.get(name.replace("linear_fc1_up", "linear_fc1"), []), joint.pop(name)
            if [(gate.shape, gate.dtype) for gate in gates] != [(up.shape, up.dtype) for up in ups]:
                raise ModelLoadError(f"{where}: tensor {name} is not of the shape and dtype of its gate")
            pairs = zip(gates, ups, strict=True)
            joint[name.replace("linear_fc1_up", "linear_fc1")] = [joined(pair) for pair in pairs]
    return joint


def _gate_and_up(parts: Sequence[ChunkedTensor], where: str) -> ChunkedTensor:
    """Each rank has its rows of the gate and below them its rows of what it gates."""
    rows = parts[0].shape[0]
    if rows % 2:
        raise ModelLoadError(f"{where} has {rows} rows; expected an even number, gate and up")
    halves = [[part.part(0, start, rows // 2) for part in parts] for start in (0, rows // 2)]
    return joined([*halves[0], *halves[1]])


def _by_groups(part: ChunkedTensor, model: MegatronModel, version: float, where: str) -> ChunkedTensor:
    """The order of checkpoint_version 0, [3, heads, head_dim], or 1, [heads, head_dim, 3], as [heads, 3, head_dim]."""
    size, rows = model.head_dim, part.shape[0]
    if model.num_groups != model.num_heads or rows % (3 * size):
        raise ModelLoadError(
            f"{where} has {rows} rows; expected, at checkpoint_version {version}, 3 times {size} for every head"
        )
    num_heads = rows // (3 * size)
    pieces = []
    for head in range(num_heads):
        for kind in range(3):
            if version < 1:
                pieces.append(part.part(0, (kind * num_heads + head) * size, size))
            else:
                pieces.append(part.part(0, head * 3 * size, 3 * size).every(kind, 3))
    return joined(pieces)
