"""``translate``: tensors by Megatron-core's names, as the tensors that Hugging Face's model has.

Used by ``open_nemo`` and ``open_megatron``. Tensors are cut and put together when somebody reads them. A tensor that
the translation does not know is handed on under its own name, for the loader to refuse.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backend_engine.checkpoint.archive import MappedFile
from backend_engine.checkpoint.megatron_chunks import ChunkedTensor, joined
from backend_engine.checkpoint.megatron_model import MegatronModel
from backend_engine.checkpoint.megatron_names import split_layer
from backend_engine.checkpoint.tensor_reader import MadeTensor, MadeTensors
from backend_engine.checkpoint.torch_file import DTYPE_NAMES
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError

EMBEDDING = "embedding.word_embeddings.weight"
_VOCABULARY = (EMBEDDING, "output_layer.weight")
_ENDS = {
    "llama": {
        EMBEDDING: "model.embed_tokens.weight",
        "decoder.final_layernorm": "model.norm",
        "output_layer.weight": "lm_head.weight",
    },
    "gpt2": {
        EMBEDDING: "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer.weight": "lm_head.weight",
    },
    "gpt_neox": {
        EMBEDDING: "gpt_neox.embed_in.weight",
        "decoder.final_layernorm": "gpt_neox.final_layer_norm",
        "output_layer.weight": "lm_head.weight",
    },
}
_LAYERS = {
    "llama": {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "mlp.linear_fc2": "mlp.down_proj",
        "mlp.router": "block_sparse_moe.gate",
    },
    "gpt2": {
        "input_layernorm": "ln_1",
        "pre_mlp_layernorm": "ln_2",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
    "gpt_neox": {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    },
}
_PREFIXES = {"llama": "model.layers", "gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}


class SplitTensors(MadeTensors):
    """The translated tensors; mapped memory is given back whenever a tensor is not needed any more."""

    def __init__(self, path: Path, tensors: Mapping[str, MadeTensor], files: Sequence[MappedFile]) -> None:
        super().__init__(path, tensors)
        self._files = tuple(files)

    def release(self, tensor: Tensor) -> None:
        """Gives all of it back: what is touched again is mapped again."""
        for file in self._files:
            file.forget(0, file.size)


def translate(path: Path, model: MegatronModel, tensors: Mapping[str, ChunkedTensor]) -> SplitTensors:
    """``tensors``: whole, by Megatron-core's names with numbered layers. Raises ``ModelLoadError``."""
    kind = {"GPT2LMHeadModel": "gpt2", "GPTNeoXForCausalLM": "gpt_neox"}.get(model.architecture, "llama")
    rows = vocabulary_rows(path, model, tensors)
    made: dict[str, MadeTensor] = {}
    for name, tensor in tensors.items():
        for target, part in _targets(name, tensor, model, kind, (rows, f"{path}: tensor {name}")):
            if target in made:
                raise ModelLoadError(f"{path}: tensor {name} is there in two spellings")
            is_shifted = model.adds_one and name.endswith("norm.weight")
            made[target] = _shifted(part) if is_shifted else MadeTensor(part.info, part.read)
    files = {id(file): file for tensor in tensors.values() for file in _files(tensor)}
    return SplitTensors(path, made, list(files.values()))


def vocabulary_rows(path: Path, model: MegatronModel, tensors: Mapping[str, ChunkedTensor]) -> int:
    """How many tokens there are: as stated, else as many as the embedding has rows."""
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{path} does not hold tensor {EMBEDDING}, of two dimensions")
    if model.vocab_size is not None and model.vocab_size > embedding.shape[0]:
        raise ModelLoadError(
            f"{model.where}: vocab_size is {model.vocab_size}; expected at most the rows of {EMBEDDING}, "
            f"{embedding.shape[0]}"
        )
    return model.vocab_size or embedding.shape[0]


def dtype_name(tensors: Mapping[str, ChunkedTensor]) -> str:
    """The dtype of the embedding as torch calls it, such as ``bfloat16``."""
    return str(tensors[EMBEDDING].dtype).removeprefix("torch.")


def _files(tensor: ChunkedTensor) -> Iterator[MappedFile]:
    return (chunk.tensor.window.file for chunk in tensor.chunks)


def _shifted(tensor: ChunkedTensor) -> MadeTensor:
    """The tensor plus 1, in float32: 1 plus a small number has more digits than half precision."""
    return MadeTensor(TensorInfo(tensor.shape, DTYPE_NAMES[torch.float32]), lambda: tensor.read().float() + 1.0)


def _targets(
    name: str, tensor: ChunkedTensor, model: MegatronModel, kind: str, about: tuple[int, str]
) -> Iterator[tuple[str, ChunkedTensor]]:
    """What a tensor becomes. ``about``: the size of the vocabulary, and the beginning of messages."""
    rows, where = about
    layer = split_layer(name)
    if not tensor.shape:
        yield name, tensor
        return
    if layer is None:
        if name in _VOCABULARY:
            if len(tensor.shape) != 2 or tensor.shape[0] < rows:
                raise ModelLoadError(f"{where} is {list(tensor.shape)}; expected {rows} rows")
            tensor = tensor.part(0, 0, rows)
        module, _, leaf = name.rpartition(".")
        ends = _ENDS[kind]
        yield ends.get(name) or (f"{ends[module]}.{leaf}" if module in ends else name), tensor
        return
    module, _, leaf = layer[1].rpartition(".")
    prefix = f"{_PREFIXES[kind]}.{layer[0]}."
    if module == "self_attention.linear_qkv" and kind != "gpt_neox":
        parts = _queries_keys_values(tensor, model, where)
        if kind == "gpt2":
            whole = joined(parts)
            yield (
                f"{prefix}attn.c_attn.{leaf}",
                whole.transposed() if leaf == "weight" and len(whole.shape) == 2 else whole,
            )
        else:
            yield from zip((f"{prefix}self_attn.{part}_proj.{leaf}" for part in "qkv"), parts, strict=True)
    elif module.startswith("mlp.experts.local_experts."):
        expert, _, product = module.removeprefix("mlp.experts.local_experts.").partition(".")
        yield from _expert(f"{prefix}block_sparse_moe.experts.{expert}.", product, leaf, tensor, where)
    elif kind == "llama" and module == "mlp.linear_fc1":
        yield from zip(
            (f"{prefix}mlp.{part}_proj.{leaf}" for part in ("gate", "up")), _halves(tensor, where), strict=True
        )
    elif module in _LAYERS[kind]:
        is_turned = kind == "gpt2" and leaf == "weight" and len(tensor.shape) == 2
        yield f"{prefix}{_LAYERS[kind][module]}.{leaf}", tensor.transposed() if is_turned else tensor
    else:
        yield name, tensor


def _halves(tensor: ChunkedTensor, where: str) -> tuple[ChunkedTensor, ChunkedTensor]:
    half, rest = divmod(tensor.shape[0], 2)
    if rest:
        raise ModelLoadError(f"{where} has {tensor.shape[0]} rows; expected an even number, gate and up")
    return tensor.part(0, 0, half), tensor.part(0, half, half)


def _expert(
    prefix: str, product: str, leaf: str, tensor: ChunkedTensor, where: str
) -> Iterator[tuple[str, ChunkedTensor]]:
    if product == "linear_fc1":
        yield from zip((f"{prefix}w1.{leaf}", f"{prefix}w3.{leaf}"), _halves(tensor, where), strict=True)
    else:
        yield f"{prefix}w2.{leaf}" if product == "linear_fc2" else f"{prefix}{product}.{leaf}", tensor


def _queries_keys_values(tensor: ChunkedTensor, model: MegatronModel, where: str) -> list[ChunkedTensor]:
    """Rows by groups, each [its query heads, key head, value head] -> the three, one below the other."""
    size, per_group = model.head_dim, model.num_heads // model.num_groups
    rows = (model.num_heads + 2 * model.num_groups) * size
    if tensor.shape[0] != rows:
        raise ModelLoadError(
            f"{where} has {tensor.shape[0]} rows; expected {rows}, for {model.num_heads} heads of {size} in "
            f"{model.num_groups} groups"
        )
    group_rows = (per_group + 2) * size
    parts = []
    for start, count in ((0, per_group), (per_group, 1), (per_group + 1, 1)):
        pieces = (tensor.part(0, group * group_rows + start * size, count * size) for group in range(model.num_groups))
        parts.append(joined(list(pieces)))
    return parts
