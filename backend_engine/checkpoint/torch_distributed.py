"""``read_distributed``: the tensors of a checkpoint that torch.distributed.checkpoint wrote: ``.metadata`` and files of
pieces (``__0_0.distcp``).

Used for NeMo and Megatron checkpoints. ``.metadata`` is a pickle; of its classes only the format's own are known, and
none of them is made. Every fault is a one-line ``ModelLoadError`` that names file and tensor.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from backend_engine.checkpoint.archive import FileTree, Window
from backend_engine.checkpoint.megatron_chunks import Chunk, ChunkedTensor, check_cover
from backend_engine.checkpoint.torch_file import MAX_DIMS, TorchFile, is_size
from backend_engine.checkpoint.torch_pickle import MAX_PICKLE, StandIn, TensorRef, read_pickle
from backend_engine.errors import ModelLoadError, shown

METADATA = ".metadata"
BACKEND = "metadata.json"
_ROOM = "torch.distributed.checkpoint."
_CLASSES = (
    *(
        f"{_ROOM}metadata.{name}"
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    *(f"{_ROOM}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix", "StorageMeta")),
    *(f"{_ROOM}planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)  # fmt: skip


class _Place(NamedTuple):
    """Where a piece lies: ``length`` bytes of ``file`` from ``start`` on."""

    file: str
    start: int
    length: int


def is_distributed(files: FileTree, folder: str) -> bool:
    """Whether ``folder`` (``""`` or with a slash at its end) holds such a checkpoint, or one of another backend."""
    return any(f"{folder}{name}" in files.names() for name in (METADATA, BACKEND))


def read_distributed(files: FileTree, folder: str, is_wanted: Callable[[str], bool]) -> dict[str, ChunkedTensor]:
    """The tensors of the checkpoint in ``folder`` whose names are wanted."""
    _check_backend(files, folder)
    where = files.window(folder + METADATA).label
    metadata = read_pickle(files.read(folder + METADATA, MAX_PICKLE), where, _CLASSES).root
    attributes = metadata.attributes() if isinstance(metadata, StandIn) else {}
    tensors, stored = attributes.get("state_dict_metadata"), attributes.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise ModelLoadError(f"{where} does not describe a checkpoint of torch.distributed.checkpoint")
    places = _places(stored, where)
    opened: dict[str, Window] = {}
    found = {}
    for name, about in tensors.items():
        values = about.attributes() if isinstance(about, StandIn) else {}
        if isinstance(name, str) and is_wanted(name) and "chunks" in values:
            if not name.isprintable():
                raise ModelLoadError(f"{where} has a tensor named {shown(name)}; expected printable characters")
            found[name] = _tensor(name, values, places, lambda file: _open(files, folder, file, opened), where)
    return found


def _check_backend(files: FileTree, folder: str) -> None:
    if folder + BACKEND in files.names():
        where = files.window(folder + BACKEND).label
        try:
            values = json.loads(files.read(folder + BACKEND, 1 << 20))
        except (ValueError, RecursionError):
            raise ModelLoadError(f"{where} is not valid JSON") from None
        backend = values.get("sharded_backend") if isinstance(values, dict) else None
        if backend != "torch_dist":
            raise ModelLoadError(f"{where}: sharded_backend is {shown(backend)}; expected 'torch_dist'")
    if folder + METADATA not in files.names():
        raise ModelLoadError(f"{files.path}: {folder}{METADATA} does not exist; expected a distributed checkpoint")


def _places(stored: Mapping[Any, Any], where: str) -> dict[tuple[str, tuple[int, ...]], _Place]:
    """Where each piece lies, by the name of its tensor and its offset."""
    places = {}
    for index, info in stored.items():
        key = index.attributes() if isinstance(index, StandIn) else {}
        values = info.attributes() if isinstance(info, StandIn) else {}
        name, offset = key.get("fqn"), key.get("offset")
        if values.get("transform_descriptors"):
            found = shown(values["transform_descriptors"])
            raise ModelLoadError(f"{where}: {shown(name)} is stored through {found}; expected none")
        place = _Place(values.get("relative_path", ""), values.get("offset", -1), values.get("length", -1))
        is_sound = isinstance(place.file, str) and place.file.isprintable() and all(map(is_size, place[1:]))
        if not isinstance(name, str) or not is_sound or "/" in place.file or place.file in ("", "..", "."):
            raise ModelLoadError(
                f"{where}: {shown(name)} lies at {shown(tuple(place))}; expected a file beside it and two counts"
            )
        if isinstance(offset, tuple):
            places[name, offset] = place
    return places


def _open(files: FileTree, folder: str, file: str, opened: dict[str, Window]) -> Window:
    if folder + file not in files.names():
        raise ModelLoadError(f"{files.path}: {folder}{file} does not exist, but {METADATA} lists it")
    if file not in opened:
        opened[file] = files.window(folder + file)
    return opened[file]


def _tensor(
    name: str,
    values: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...]], _Place],
    open_file: Callable[[str], Window],
    where: str,
) -> ChunkedTensor:
    shape: Any = values.get("size")
    chunks = []
    if not _is_sizes(shape) or not isinstance(values["chunks"], list):
        raise ModelLoadError(f"{where}: {name} has no size or no chunks")
    for about in values["chunks"]:
        chunk = about.attributes() if isinstance(about, StandIn) else {}
        offset: Any = chunk.get("offsets")
        place = places.get((name, offset)) if _is_sizes(offset) and len(offset) == len(shape) else None
        if place is None:
            raise ModelLoadError(f"{where}: the piece of {name} at {shown(offset)} is not stored")
        file = open_file(place.file)
        if place.start + place.length > file.size:
            raise ModelLoadError(
                f"{file.label}: the piece of {name} at {list(offset)} is beyond the end of the file ({file.size} bytes)"
            )
        piece = TorchFile(file.part(place.start, place.length, file.label))
        if not isinstance(piece.root, TensorRef):
            raise ModelLoadError(f"{file.label}: the piece of {name} at {list(offset)} is not a tensor")
        stored = piece.tensor(piece.root, name)
        if stored.shape != chunk.get("sizes"):
            raise ModelLoadError(f"{file.label}: the piece of {name} at {list(offset)} is {list(stored.shape)}")
        chunks.append(Chunk(offset, stored))
    return check_cover(ChunkedTensor(shape, tuple(chunks)), f"{where}: {name}")


def _is_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(map(is_size, value))
