"""``open_megatron``: a folder that Megatron-LM saved its training in, as a ``Checkpoint``.

Used by ``open_checkpoint.py``. Either a file of torch for each rank (``iter_0000100/mp_rank_00_000/...``) or a
distributed checkpoint (``iter_0000100/.metadata``). Reads headers only; every fault is a one-line ``ModelLoadError``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend_engine.checkpoint.archive import FolderTree, open_window
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.megatron_args import read_args
from backend_engine.checkpoint.megatron_chunks import ChunkedTensor
from backend_engine.checkpoint.megatron_files import (
    STAND_INS,
    RankFile,
    distributed_tensors,
    rank_grid,
    rank_tensors,
)
from backend_engine.checkpoint.megatron_model import MegatronModel
from backend_engine.checkpoint.megatron_ranks import VERSIONS, Stage, merge_ranks
from backend_engine.checkpoint.megatron_translate import dtype_name, translate, vocabulary_rows
from backend_engine.checkpoint.torch_distributed import is_distributed
from backend_engine.checkpoint.torch_file import TorchFile
from backend_engine.checkpoint.torch_pickle import StandIn
from backend_engine.config.regular_files import read_regular
from backend_engine.errors import ModelLoadError, shown

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_MAX_TRACKER = 1 << 10
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_SIZES = ("tensor_model_parallel_size", "model_parallel_size")


def looks_like_megatron(path: Path) -> bool:
    """Whether a folder has Megatron-LM's list of the last iteration, or is one of its iterations."""
    if not path.is_dir():
        return False
    return (path / TRACKER).is_file() or any(path.glob("mp_rank_0*/model*_rng.pt")) or (path / _COMMON).is_file()


def open_megatron(path: Path) -> Checkpoint:
    """The checkpoint of the last iteration in ``path``, or of ``path`` itself. Raises ``ModelLoadError``."""
    folder = _iteration(path)
    files = FolderTree(folder)
    if is_distributed(files, ""):
        model, tensors = _open_distributed(files)
    else:
        model, tensors = _open_ranks(folder)
    config = model.hf_config(vocabulary_rows(folder, model, tensors), dtype_name(tensors))
    return Checkpoint(
        path, "megatron", config, lambda: [translate(folder, model, tensors)], origin=f"{folder.name}: args"
    )


def _iteration(path: Path) -> Path:
    """The folder of the iteration that the tracker names; ``path`` where there is no tracker."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    try:
        text = read_regular(tracker, _MAX_TRACKER).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ModelLoadError(f"{tracker} cannot be read; expected the number of an iteration, or release") from None
    if text != "release" and not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ModelLoadError(f"{tracker} says {text[:40]!r}; expected the number of an iteration, or release")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} does not exist, but {TRACKER} names it")
    return folder


def _open_ranks(folder: Path) -> tuple[MegatronModel, dict[str, ChunkedTensor]]:
    found = []
    for part in sorted(folder.iterdir()):
        match = _RANK.fullmatch(part.name)
        if match and part.is_dir():
            file = next((name for name in _FILES if (part / name).is_file()), None)
            if file is None:
                raise ModelLoadError(f"{part} has no {' or '.join(_FILES)}")
            found.append(RankFile(int(match[1]), int(match[2] or 0), f"{part.name}/{file}"))
    if not found:
        raise ModelLoadError(f"{folder} has no folder of a rank (mp_rank_00) and no .metadata")
    grid = [[(folder / file.name, file) for file in stage] for stage in rank_grid(found, str(folder))]
    opened = [[TorchFile(open_window(path), STAND_INS) for path, _ in stage] for stage in grid]
    first = opened[0][0]
    args = _args(first)
    model = read_args(args, f"{first.label}: args")
    _check_sizes(args, len(opened), len(opened[0]), first.label)
    version = _root(first).get("checkpoint_version", 0)
    if type(version) not in (int, float) or version not in VERSIONS:
        raise ModelLoadError(f"{first.label}: checkpoint_version is {shown(version)}; expected one of {VERSIONS}")
    stages = []
    for key in _model_keys(first):
        for i, stage in enumerate(opened):
            stages.append(Stage(f"{folder}, stage {i}", [rank_tensors(file, _part(file, key)) for file in stage]))
    return model, merge_ranks(stages, model, version)


def _open_distributed(files: FolderTree) -> tuple[MegatronModel, dict[str, ChunkedTensor]]:
    if _COMMON not in files.names():
        raise ModelLoadError(f"{files.path / _COMMON} does not exist; expected the arguments of the training there")
    common = TorchFile(files.window(_COMMON), STAND_INS)
    model = read_args({**_args(common), "expert_model_parallel_size": 1}, f"{common.label}: args")
    return model, distributed_tensors(files, "", model)


def _root(file: TorchFile) -> Mapping[str, Any]:
    if not isinstance(file.root, dict):
        raise ModelLoadError(f"{file.label} holds a {type(file.root).__name__}; expected a dict with model and args")
    return file.root


def _part(file: TorchFile, key: str) -> Any:
    if key not in _root(file):
        raise ModelLoadError(f"{file.label} does not hold {key}, which the file of the first rank does")
    return _root(file)[key]


def _args(file: TorchFile) -> dict[str, Any]:
    args = _root(file).get("args")
    if isinstance(args, StandIn):
        args = args.attributes() or args.kwargs
    if not isinstance(args, dict) or not args or not all(isinstance(key, str) for key in args):
        raise ModelLoadError(f"{file.label} holds no args; expected the arguments of the training there")
    return args


def _model_keys(file: TorchFile) -> list[str]:
    """The model, or its parts where each rank has several stages, in their order."""
    root = _root(file)
    numbered = [f"model{i}" for i in range(len(root)) if f"model{i}" in root]
    if "model" not in root and not numbered:
        raise ModelLoadError(f"{file.label} holds neither model nor model0")
    return ["model"] if "model" in root else numbered


def _check_sizes(args: Mapping[str, Any], num_stages: int, num_ranks: int, label: str) -> None:
    """Compare the folders of ranks with the sizes that the arguments state."""
    stated = next((key for key in _SIZES if args.get(key) is not None), None)
    for key, size in ((stated, num_ranks), ("pipeline_model_parallel_size", num_stages)):
        if key is not None and args.get(key) is not None and args[key] != size:
            raise ModelLoadError(f"{label}: args: {key} is {shown(args[key])}, but there are folders for {size}")
