"""What GGUF's converter changed about a tensor, undone: the tensors that Hugging Face has, made when they are read.

Used by ``gguf_names.py``. Packed rows are moved as a whole; nothing else is done to packed numbers, but where keys and
values of latent attention have to be transposed.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend_engine.checkpoint.gguf_files import GgufFiles
from backend_engine.checkpoint.tensor_reader import MadeTensor
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.weight_format import FLOAT_DTYPES

_MAX_EXPERTS = 1 << 14


class Stored(NamedTuple):
    """A tensor of the file, and the config of its model."""

    files: GgufFiles
    name: str
    config: Mapping[str, Any]

    @property
    def info(self) -> TensorInfo:
        return self.files.tensors[self.name]

    def read(self) -> Tensor:
        return self.files.read(self.name)


Made = Iterable[tuple[str, MadeTensor]]
Change = Callable[[Stored, str], Made]


def same(stored: Stored, target: str) -> Made:
    yield target, MadeTensor(stored.info, stored.read)


def less_one(stored: Stored, target: str) -> Made:
    """Gemma's norms, whose weights are distances to 1."""
    info = stored.info._replace(dtype="F32")
    yield target, MadeTensor(info, lambda: stored.files.decode(stored.name) - 1)


def one_row(stored: Stored, target: str) -> Made:
    """A vector that is a matrix of one row."""
    info = stored.info._replace(shape=(1, *stored.info.shape))
    yield target, MadeTensor(info, lambda: stored.read().unsqueeze(0))


def transposed(stored: Stored, target: str) -> Made:
    """Plain matrices are stored as ``[in, out]``; packed ones never are."""
    if stored.info.dtype in FLOAT_DTYPES and len(stored.info.shape) == 2:
        info = stored.info._replace(shape=stored.info.shape[::-1])
        yield target, MadeTensor(info, lambda: stored.read().T)
    else:
        yield from same(stored, target)


def _moved(stored: Stored, target: str, shape: tuple[int, ...], swapped: tuple[int, int]) -> Made:
    """The rows, seen as ``shape`` (of which one size is -1), with two of its dimensions swapped."""

    def make() -> Tensor:
        tensor = stored.read()
        if tensor.shape[0] % -math.prod(shape):
            rows = f"{tensor.shape[0]} rows; expected a multiple of {-math.prod(shape)}"
            raise ModelLoadError(f"{stored.files.path}: tensor {stored.name} has {rows}")
        rows_in_order = torch.arange(tensor.shape[0]).view(shape).transpose(*swapped).flatten()
        return tensor.index_select(0, rows_in_order)

    yield target, MadeTensor(stored.info, make)


def rotated_halves(key: str) -> Change:
    """Queries or keys whose rotated elements lie side by side, where Hugging Face has two halves; ``key``: of heads."""

    def change(stored: Stored, target: str) -> Made:
        return _moved(stored, target, (stored.config[key], -1, 2), (1, 2))

    return change


def by_head(stored: Stored, target: str) -> Made:
    """Queries, keys and values one below the other, where GPT-NeoX has them head by head."""
    return _moved(stored, target, (3, stored.config["num_attention_heads"], -1), (0, 1))


def each_expert(stored: Stored, target: str) -> Made:
    """A stack of all experts' weights; ``target`` has a place for the number."""
    shape = stored.info.shape
    counts = (stored.config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    wanted = next((count for count in counts if count is not None), 0)
    if len(shape) < 2 or shape[0] != wanted or wanted > _MAX_EXPERTS:
        raise ModelLoadError(
            f"{stored.files.path}: tensor {stored.name} has shape {list(shape)}; expected one entry for each of "
            f"expert_count, {wanted}, of at most {_MAX_EXPERTS}"
        )
    for e in range(wanted):
        info = stored.info._replace(shape=shape[1:])
        yield target.replace("{e}", str(e)), MadeTensor(info, functools.partial(stored.files.read, stored.name, e))


def whole_latents(files: GgufFiles, config: Mapping[str, Any], names: list[str]) -> Made:
    """What makes keys and values of DeepSeek's latent ones, from its two halves, of which that of the keys is stored
    transposed, head by head: ``[heads, kv_rank, key]`` and ``[heads, value, kv_rank]``.
    """
    for name in names:
        layer, _, half = name.removeprefix("blk.").partition(".")
        halves = [f"blk.{layer}.attn_{part}_b.weight" for part in "kv"]
        if half.startswith("attn_v") and halves[0] in names:
            continue
        absent = [other for other in halves if other not in files.tensors]
        if absent:
            raise ModelLoadError(f"{files.path} does not hold tensor {absent[0]}, which {name} needs")
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        sizes = (config["qk_nope_head_dim"], config["v_head_dim"])
        info = TensorInfo((heads * sum(sizes), rank), "F32")
        make = functools.partial(_joined_latents, files, halves, heads, rank, sizes)
        yield f"model.layers.{layer}.self_attn.kv_b_proj.weight", MadeTensor(info, make)


def _joined_latents(files: GgufFiles, halves: list[str], heads: int, rank: int, sizes: tuple[int, int]) -> Tensor:
    keys, values = (files.decode(name) for name in halves)
    if tuple(keys.shape) != (heads, rank, sizes[0]) or tuple(values.shape) != (heads, sizes[1], rank):
        raise ModelLoadError(
            f"{files.path}: tensors {' and '.join(halves)} have shapes {list(keys.shape)} and {list(values.shape)}; "
            f"expected {[heads, rank, sizes[0]]} and {[heads, sizes[1], rank]}"
        )
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
