"""``open_nemo``: a .nemo archive, or a folder of NeMo 1.x or 2.x, as a ``Checkpoint``.

Used by ``open_checkpoint.py``. 1.x: model_config.yaml with model_weights.ckpt, one for each rank, or a distributed
checkpoint; 2.x: context/model.yaml with weights/. Nothing is unpacked beside the archive. Reads headers only; every
fault is a one-line ``ModelLoadError``.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from backend_engine.checkpoint.archive import FileTree, is_tar, open_files
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.megatron_chunks import ChunkedTensor
from backend_engine.checkpoint.megatron_files import (
    STAND_INS,
    RankFile,
    distributed_tensors,
    rank_grid,
    rank_tensors,
)
from backend_engine.checkpoint.megatron_model import MegatronModel
from backend_engine.checkpoint.megatron_ranks import Stage, merge_ranks
from backend_engine.checkpoint.megatron_translate import dtype_name, translate, vocabulary_rows
from backend_engine.checkpoint.nemo_config import read_nemo1, read_nemo2, read_yaml
from backend_engine.checkpoint.torch_distributed import is_distributed
from backend_engine.checkpoint.torch_file import TorchFile
from backend_engine.errors import ModelLoadError, shown

CONFIG_1 = "model_config.yaml"
CONFIG_2 = "context/model.yaml"
_WEIGHTS_1 = "model_weights.ckpt"
_DISTRIBUTED_1 = "model_weights/"
_DISTRIBUTED_2 = "weights/"
_TOKENIZER_2 = "context/nemo_tokenizer/"
_RANK = re.compile(r"(?:mp|tp)_rank_(\d+)(?:_pp_rank_(\d+))?/model_weights\.ckpt")
_MAX_CONFIG = 1 << 17
_MAX_TOKENIZER = 1 << 28
# Keys of tokenizer in model_config.yaml that name a file of the archive, and what such a file is usually called.
_TOKENIZER_1 = {"model": "tokenizer.model", "vocab_file": "vocab.json", "merge_file": "merges.txt"}


def looks_like_nemo(path: Path) -> bool:
    """Whether a file is a tar archive, or is called .nemo, or a folder has the configuration of NeMo."""
    if path.is_dir():
        return any((path / name).is_file() for name in (CONFIG_1, CONFIG_2, "context/io.json"))
    return path.is_file() and (path.suffix == ".nemo" or (is_tar(path) and ".tar" in path.suffixes))


def open_nemo(path: Path) -> Checkpoint:
    """The checkpoint in a .nemo archive or a folder. Raises ``ModelLoadError``."""
    files = open_files(path)
    if CONFIG_1 in files.names():
        name = CONFIG_1
        values = read_yaml(files.read(name, _MAX_CONFIG), files.window(name).label)
        model = read_nemo1(values, name)
        tensors = _tensors_1(files, model, values)
    elif CONFIG_2 in files.names():
        name = CONFIG_2
        model = read_nemo2(read_yaml(files.read(name, _MAX_CONFIG), files.window(name).label), name)
        if not is_distributed(files, _DISTRIBUTED_2):
            raise ModelLoadError(f"{path}: {_DISTRIBUTED_2}.metadata does not exist; expected a distributed checkpoint")
        tensors = distributed_tensors(files, _DISTRIBUTED_2, model)
    else:
        raise ModelLoadError(f"{path} has neither {CONFIG_1} nor {CONFIG_2}; expected a model of NeMo")
    config = model.hf_config(vocabulary_rows(path, model, tensors), dtype_name(tensors))
    return Checkpoint(path, "nemo", config, lambda: [translate(path, model, tensors)], origin=name)


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The files of the tokenizer that the checkpoint holds, by their usual names; none where it only names one."""
    files = open_files(path)
    if CONFIG_1 not in files.names():
        found = [name for name in files.names() if name.startswith(_TOKENIZER_2)]
        return {PurePosixPath(name).name: files.read(name, _MAX_TOKENIZER) for name in found}
    tokenizer = read_yaml(files.read(CONFIG_1, _MAX_CONFIG), files.window(CONFIG_1).label).get("tokenizer")
    stated = tokenizer if isinstance(tokenizer, dict) else {}
    result = {}
    for key, usual in _TOKENIZER_1.items():
        value = stated.get(key)
        name = value.removeprefix("nemo:") if isinstance(value, str) else ""
        if name in files.names():
            result[usual] = files.read(name, _MAX_TOKENIZER)
    return result


def _tensors_1(files: FileTree, model: MegatronModel, values: Mapping[str, Any]) -> dict[str, ChunkedTensor]:
    if is_distributed(files, _DISTRIBUTED_1):
        return distributed_tensors(files, _DISTRIBUTED_1, model)
    ranks = ((_RANK.fullmatch(name), name) for name in files.names())
    found = [RankFile(int(match[1]), int(match[2] or 0), name) for match, name in ranks if match]
    if _WEIGHTS_1 in files.names():
        found = [RankFile(0, 0, _WEIGHTS_1)]
    if not found:
        raise ModelLoadError(f"{files.path} has no {_WEIGHTS_1}, of a rank or whole, and no {_DISTRIBUTED_1}.metadata")
    if values.get("virtual_pipeline_model_parallel_size") not in (None, 1):
        value = values["virtual_pipeline_model_parallel_size"]
        raise ModelLoadError(f"{CONFIG_1}: virtual_pipeline_model_parallel_size is {shown(value)}; expected 1")
    stages = []
    for i, stage in enumerate(rank_grid(found, str(files.path))):
        opened = [TorchFile(files.window(file.name), STAND_INS) for file in stage]
        stages.append(Stage(f"{files.path}, stage {i}", [rank_tensors(file, file.root) for file in opened]))
    return merge_ranks(stages, model)
