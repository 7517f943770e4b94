"""The files of Megatron and NeMo checkpoints: one of torch for each rank, or a distributed checkpoint, as tensors by
Megatron-core's names.

Used by ``megatron_checkpoint.py`` and ``nemo_checkpoint.py``. Reads headers only.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from backend_engine.checkpoint.archive import FileTree
from backend_engine.checkpoint.megatron_chunks import ChunkedTensor, joined, whole
from backend_engine.checkpoint.megatron_model import MegatronModel
from backend_engine.checkpoint.megatron_names import core_name, split_layer
from backend_engine.checkpoint.torch_distributed import read_distributed
from backend_engine.checkpoint.torch_file import TorchFile
from backend_engine.checkpoint.torch_pickle import TensorRef
from backend_engine.errors import ModelLoadError, shown

MAX_TENSORS = 200_000
_MAX_DEPTH = 8
_NUMPY = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric", "numpy.core.numeric")
_ENUMS = (
    "ModelType",
    "AttnMaskType",
    "AttnType",
    "LayerType",
    "AttnBackend",
    "CudaGraphScope",
    "PositionEmbeddingType",
)
_ENUM_ROOMS = ("megatron.core.enums", "megatron.core.transformer.enums", "megatron.model.enums", "megatron.enums",
               "megatron.legacy.model.enums")  # fmt: skip
# Classes of arguments, random states and the like, which are kept as they are stored and never made.
STAND_INS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    "_io.BytesIO",
    *(f"{room}.{name}" for room in _NUMPY for name in ("_reconstruct", "scalar", "ndarray", "dtype", "_frombuffer")),
    *(f"{room}.{name}" for room in _ENUM_ROOMS for name in _ENUMS),
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
)
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight(?:_[wv])?)")


class RankFile(NamedTuple):
    """The file that the rank ``tensor`` of the pipeline stage ``stage`` wrote: ``name`` of the tree."""

    tensor: int
    stage: int
    name: str


def rank_grid(found: Sequence[RankFile], where: str) -> list[list[RankFile]]:
    """The files by stage, then by rank. Raises ``ModelLoadError`` when one is missing."""
    by_place = {(file.stage, file.tensor): file for file in found}
    num_stages = 1 + max(file.stage for file in found)
    num_ranks = 1 + max(file.tensor for file in found)
    for stage in range(num_stages):
        for rank in range(num_ranks):
            if (stage, rank) not in by_place:
                raise ModelLoadError(
                    f"{where} has no file of tensor-parallel rank {rank} in pipeline stage {stage}; expected "
                    f"{num_ranks} ranks in each of {num_stages} stages, as the names of its folders say"
                )
    if len(by_place) != len(found):
        raise ModelLoadError(f"{where} has two files of one rank")
    return [[by_place[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)]


def rank_tensors(file: TorchFile, root: Any) -> dict[str, ChunkedTensor]:
    """The tensors of a nested dict of ``file``, names joined by dots, without what an answer does not need."""
    found: dict[str, ChunkedTensor] = {}
    for count, (name, value) in enumerate(_walk(root, "", file.label, _MAX_DEPTH)):
        if count > MAX_TENSORS:
            raise ModelLoadError(f"{file.label} holds more than {MAX_TENSORS} tensors and dicts")
        if isinstance(value, dict) or core_name(name) is None:
            continue
        if not isinstance(value, TensorRef):
            raise ModelLoadError(f"{file.label} holds a {type(value).__name__} under {name}; expected tensors")
        found[name] = whole(file.tensor(value, name))
    return found


def _walk(value: Any, name: str, label: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Names and values of nested dicts, these themselves included: without a tensor they would be walked for ever."""
    yield name, value
    if not isinstance(value, dict):
        return
    if not depth:
        raise ModelLoadError(f"{label} holds dicts more than {_MAX_DEPTH} deep under {name}; expected tensors")
    for key, inner in value.items():
        if not isinstance(key, str) or not key.isprintable():
            raise ModelLoadError(f"{label} holds the key {shown(key)} under {name or 'its root'}; expected names")
        yield from _walk(inner, f"{name}.{key}" if name else key, label, depth - 1)


def distributed_tensors(files: FileTree, folder: str, model: MegatronModel) -> dict[str, ChunkedTensor]:
    """The tensors of a distributed checkpoint, where those of all layers, and of all experts, may lie in one."""
    where = f"{files.path}: {folder}" if folder else str(files.path)
    stored = read_distributed(files, folder, lambda name: core_name(name) is not None)
    entries: dict[str, ChunkedTensor] = {}
    for name, tensor in stored.items():
        for core, entry in _unstacked(core_name(name) or name, tensor, model, where):
            if core in entries:
                raise ModelLoadError(f"{where}: tensor {core} is there in two spellings")
            entries[core] = entry
    return _with_joined_halves(entries, where)


def _unstacked(
    name: str, tensor: ChunkedTensor, model: MegatronModel, where: str
) -> Iterator[tuple[str, ChunkedTensor]]:
    if name.startswith("decoder.layers.") and split_layer(name) is None:
        for i in range(_count(name, tensor, model.num_layers, "layers", where)):
            numbered = f"decoder.layers.{i}.{name.removeprefix('decoder.layers.')}"
            yield from _unstacked(numbered, tensor.first(i), model, where)
        return
    match = _EXPERTS.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    for i in range(_count(name, tensor, model.num_experts, "experts", where)):
        yield f"{match[1]}.local_experts.{i}.{match[2]}.{match[3]}", tensor.first(i)


def _count(name: str, tensor: ChunkedTensor, expected: int, what: str, where: str) -> int:
    if not tensor.shape or tensor.shape[0] != expected:
        raise ModelLoadError(f"{where}: tensor {name} is {list(tensor.shape)}; expected {expected} {what} first")
    return expected


def _with_joined_halves(entries: Mapping[str, ChunkedTensor], where: str) -> dict[str, ChunkedTensor]:
    """Where gate and up are two tensors, called ``_w`` and ``_v``, the two as one."""
    result = dict(entries)
    for name in entries:
        if name.endswith(("linear_fc1.weight_w", "linear_fc1.bias_w")):
            gate, up = result.pop(name), result.pop(name[:-1] + "v", None)
            if up is None or up.shape != gate.shape or up.dtype != gate.dtype:
                raise ModelLoadError(f"{where}: tensor {name[:-1]}v is not stored, or not of the shape of {name}")
            result[name.removesuffix("_w")] = joined((gate, up))
    return result
