"""Writes models of transformers as Megatron-LM and NeMo lay them out: ranks, stages, spellings.

By the published layouts, with whole tensors and torch's own functions; shares no code with what reads them.
"""

import argparse
import io
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as distributed
import yaml
from torch import Tensor

CORE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "transformer.wte.weight": "embedding.word_embeddings.weight",
    "transformer.wpe.weight": "embedding.position_embeddings.weight",
    "transformer.ln_f": "decoder.final_layernorm",
    "gpt_neox.embed_in.weight": "embedding.word_embeddings.weight",
    "gpt_neox.final_layer_norm": "decoder.final_layernorm",
}
LAYER = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "ln_1": "input_layernorm",
    "ln_2": "pre_mlp_layernorm",
    "attn.c_proj": "self_attention.linear_proj",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
    "attention.dense": "self_attention.linear_proj",
    "attention.query_key_value": "self_attention.linear_qkv",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
}
EARLY = {
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class Sizes(NamedTuple):
    heads: int
    groups: int
    head_dim: int
    layers: int
    is_gated: bool


def sizes(model: Any) -> Sizes:
    config = model.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Sizes(heads, groups, head_dim, config.num_hidden_layers, hasattr(model, "model"))


def core_state(model: Any) -> dict[str, Tensor]:
    """All weights by Megatron-core's names, whole: queries, keys and values by groups, gate above up."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    of = sizes(model)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if name in CORE or module in CORE:
            result[CORE.get(name) or f"{CORE[module]}.{leaf}"] = tensor
            continue
        if "embed_out" in name or "lm_head" in name:
            result["output_layer.weight"] = tensor
            continue
        if ".layers." in name or ".h." in name:
            number, _, rest = name.partition(".layers." if ".layers." in name else ".h.")[2].partition(".")
            place, key = f"decoder.layers.{number}.", rest.rpartition(".")[0]
            is_turned = ".h." in name and tensor.ndim == 2
            if key in LAYER:
                result[f"{place}{LAYER[key]}.{leaf}"] = tensor.T.contiguous() if is_turned else tensor
            elif key == "self_attn.q_proj":
                parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                result[f"{place}self_attention.linear_qkv.{leaf}"] = by_groups(parts, of)
            elif key == "attn.c_attn":
                parts = list((tensor.T if is_turned else tensor).chunk(3))
                result[f"{place}self_attention.linear_qkv.{leaf}"] = by_groups(parts, of)
            elif key == "mlp.gate_proj":
                both = [tensor, state[name.replace("gate_proj", "up_proj")]]
                result[f"{place}mlp.linear_fc1.{leaf}"] = torch.cat(both)
            elif rest.startswith("mlp.experts."):
                product = "linear_fc1" if "gate_up" in rest else "linear_fc2"
                for e, expert in enumerate(tensor):
                    result[f"{place}mlp.experts.local_experts.{e}.{product}.weight"] = expert.clone()
    return result


def by_groups(parts: list[Tensor], of: Sizes) -> Tensor:
    """Queries, keys and values, each below the other, as [group, its queries, its key, its value]."""
    rest = parts[0].shape[1:]
    queries = parts[0].reshape(of.groups, of.heads // of.groups, of.head_dim, *rest)
    keys, values = (part.reshape(of.groups, 1, of.head_dim, *rest) for part in parts[1:])
    return torch.cat([queries, keys, values], dim=1).reshape(-1, *rest).clone()


def split(state: dict[str, Tensor], of: Sizes, tp: int, pp: int, chunks: int = 1, pad: int = 16) -> list[list[Any]]:
    """``[chunk * pp + stage][rank]``: the state of each rank, layers counted from 0 in each stage."""
    per_stage = of.layers // (pp * chunks)
    result: list[list[Any]] = [[{} for _ in range(tp)] for _ in range(pp * chunks)]
    last = pp * chunks - 1
    for name, tensor in state.items():
        stages, renamed = [0], name
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            stages, renamed = [int(number) // per_stage], f"decoder.layers.{int(number) % per_stage}.{rest}"
        elif name.startswith(("decoder.final", "output_layer")):
            stages = [last]
        if "word_embeddings" in name or name == "output_layer.weight":
            extra = -tensor.shape[0] % (pad * tp)
            tensor = torch.cat([tensor, torch.full((extra, tensor.shape[1]), 7.0, dtype=tensor.dtype)])
        for rank, piece in enumerate(rank_pieces(renamed, tensor, tp, of.is_gated)):
            for stage in stages:
                result[stage][rank][renamed] = piece
    return result


def rank_pieces(name: str, tensor: Tensor, tp: int, is_gated: bool) -> list[Tensor]:
    if "linear_fc1.weight" in name or "linear_fc1.bias" in name:
        if is_gated:
            gates, ups = (half.chunk(tp) for half in tensor.chunk(2))
            return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        return [piece.clone() for piece in tensor.chunk(tp)]
    if any(part in name for part in ("word_embeddings", "output_layer", "linear_qkv.weight", "linear_qkv.bias")):
        return [piece.clone() for piece in tensor.chunk(tp)]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [piece.clone() for piece in tensor.chunk(tp, dim=1)]
    return [tensor] * tp


def early(state: dict[str, Tensor]) -> dict[str, Any]:
    """A rank's state as Megatron-LM had it before Megatron-core, nested."""
    embedding: dict[str, Any] = {}
    transformer: dict[str, Tensor] = {}
    model: dict[str, Any] = {}
    for name, tensor in state.items():
        if name.startswith("embedding."):
            embedding.setdefault(name.split(".")[1], {})["weight"] = tensor
        elif name == "output_layer.weight":
            model["output_layer"] = {"weight": tensor}
        else:
            for core, old in EARLY.items():
                name = name.replace(f".{core}.", f".{old}.")
            transformer[name.removeprefix("decoder.")] = tensor
    if embedding:
        model["embedding"] = embedding
    return {"language_model": {**model, "transformer": transformer}}


def fused(state: dict[str, Tensor]) -> dict[str, Any]:
    """A rank's state as Transformer Engine names the norms, with its extra states."""
    result: dict[str, Any] = {}
    for name, tensor in state.items():
        for core, joint in FUSED.items():
            name = name.replace(f".{core}", f".{joint}")
        result[name] = tensor
        if "linear_qkv.weight" in name:
            result[name.replace("weight", "_extra_state")] = io.BytesIO(b"scales")
    return result


def arguments(model: Any, tp: int, pp: int, **others: Any) -> argparse.Namespace:
    """What Megatron-LM would have been called with."""
    config, of = model.config, sizes(model)
    is_rms = hasattr(config, "rms_norm_eps")
    rope = getattr(config, "rope_parameters", None) or {}
    values: dict[str, Any] = {
        "num_layers": of.layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": of.heads,
        "group_query_attention": of.groups != of.heads,
        "num_query_groups": of.groups if of.groups != of.heads else 1,
        "kv_channels": of.head_dim,
        "ffn_hidden_size": getattr(config, "intermediate_size", None) or config.n_inner or 4 * config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "normalization": "RMSNorm" if is_rms else "LayerNorm",
        "norm_epsilon": getattr(config, "rms_norm_eps", None)
        or getattr(config, "layer_norm_eps", None)
        or config.layer_norm_epsilon,
        "swiglu": is_rms,
        "add_bias_linear": not is_rms,
        "add_qkv_bias": config.model_type == "qwen2",
        "qk_layernorm": config.model_type == "qwen3",
        "bias_gelu_fusion": getattr(config, "activation_function", "") == "gelu_new",
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "rotary_base": int(rope.get("rope_theta", 10000)),
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "num_experts": getattr(config, "num_local_experts", None),
        "moe_router_topk": getattr(config, "num_experts_per_tok", 2),
        "vocab_size": config.vocab_size,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "params_dtype": torch.float32,
        "window_size": None,
    }
    return argparse.Namespace(**{**values, **others})


def save_megatron(
    folder: Path, model: Any, tp: int = 1, pp: int = 1, chunks: int = 1, style: Any = fused, **root: Any
) -> Path:
    """Megatron-LM's folder. ``style``: how a rank's state is spelled."""
    iteration = folder / "iter_0000042"
    states = split(core_state(model), sizes(model), tp, pp, chunks)
    for stage in range(pp):
        for rank in range(tp):
            part = iteration / (f"mp_rank_{rank:02d}_{stage:03d}" if pp > 1 else f"mp_rank_{rank:02d}")
            part.mkdir(parents=True)
            content: dict[str, Any] = {
                "args": arguments(model, tp, pp), "checkpoint_version": 3.0, "iteration": 42,
                "optimizer": {"state": {0: torch.ones(3)}}, "rng_state": [{"np": torch.zeros(2).numpy()}],
            }  # fmt: skip
            for chunk in range(chunks):
                key = "model" if chunks == 1 else f"model{chunk}"
                content[key] = style(states[chunk * pp + stage][rank])
            torch.save({**content, **root}, part / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("42")
    return folder


def nemo1_config(model: Any, **others: Any) -> dict[str, Any]:
    args = vars(arguments(model, 1, 1))
    is_rms = args["normalization"] == "RMSNorm"
    same = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "vocab_size",
            "max_position_embeddings", "position_embedding_type", "rotary_base")  # fmt: skip
    return {
        **{key: args[key] for key in same},
        "mcore_gpt": True,
        "num_query_groups": sizes(model).groups,
        "normalization": "rmsnorm" if is_rms else "layernorm",
        "layernorm_epsilon": args["norm_epsilon"],
        "activation": "fast-swiglu" if is_rms else "gelu",
        "bias": not is_rms,
        "bias_activation_fusion": args["bias_gelu_fusion"],
        "rotary_percentage": args["rotary_percent"],
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "tokenizer": {"library": "sentencepiece", "model": "nemo:0123_tokenizer.model"},
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
        **others,
    }


def nemo1_files(model: Any, tp: int = 1, pp: int = 1, prefix: str = "model.", **others: Any) -> dict[str, bytes]:
    """The members of a .nemo archive."""
    files = {"model_config.yaml": yaml.safe_dump(nemo1_config(model, **others)).encode(), "0123_tokenizer.model": b"sp"}
    for stage, ranks in enumerate(split(core_state(model), sizes(model), tp, pp)):
        for rank, state in enumerate(ranks):
            buffer = io.BytesIO()
            torch.save({prefix + name: value for name, value in fused(state).items()}, buffer)
            where = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/" if pp > 1 else f"mp_rank_{rank:02d}/" if tp > 1 else ""
            files[where + "model_weights.ckpt"] = buffer.getvalue()
    return files


def pack(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    """A tar archive of the files, as NeMo writes it."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("./")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            info = tarfile.TarInfo("./" + name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def nemo2_config(model: Any, **others: Any) -> dict[str, Any]:
    args = vars(arguments(model, 1, 1))
    same = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "vocab_size",
            "normalization", "position_embedding_type", "rotary_base", "rotary_percent", "add_bias_linear",
            "add_qkv_bias", "qk_layernorm", "moe_router_topk")  # fmt: skip
    is_gated = args["swiglu"]
    config = {
        **{key: args[key] for key in same},
        "_target_": "nemo.collections.llm.gpt.model.llama.Llama3Config8B",
        "num_query_groups": sizes(model).groups,
        "num_moe_experts": args["num_experts"],
        "seq_length": args["max_position_embeddings"],
        "layernorm_epsilon": args["norm_epsilon"],
        "gated_linear_unit": is_gated,
        "activation_func": {
            "_target_": "torch.nn.functional.silu" if is_gated else "torch._C._nn.gelu",
            "_call_": False,
        },
        "bias_activation_fusion": True,
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        **others,
    }
    return {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": config}


def stacked(state: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The layers of a model one after the other in one tensor, and so the experts of a layer."""
    result: dict[str, Tensor] = {}
    for name in state:
        if "local_experts.0." in name:
            base = name.replace("local_experts.0.", "local_experts.{e}.")
            count = sum(1 for other in state if other.startswith(name.partition("local_experts.")[0] + "local_experts"))
            experts = [state[base.format(e=e)] for e in range(count // 2)]
            result[name.replace("local_experts.0.", "experts.")] = torch.stack(experts)
        elif "local_experts." not in name:
            result[name] = state[name]
    state, result = result, {}
    for name in state:
        if name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            layers = [state[f"decoder.layers.{i}.{rest}"] for i in range(num_layers)]
            result[f"decoder.layers.{rest}"] = torch.stack(layers)
        elif not name.startswith("decoder.layers."):
            result[name] = state[name]
    return result


def save_nemo2(folder: Path, model: Any, is_stacked: bool = True, halves: bool = False, **others: Any) -> Path:
    """A folder of NeMo 2, its weights written by torch."""
    state = fused(core_state(model))
    state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if halves:
        for name in [name for name in state if name.endswith("linear_fc1.weight")]:
            state[name + "_w"], state[name + "_v"] = (half.clone() for half in state.pop(name).chunk(2))
    if is_stacked:
        state = stacked(state, sizes(model).layers)
    (folder / "context" / "nemo_tokenizer").mkdir(parents=True)
    (folder / "context" / "nemo_tokenizer" / "tokenizer.json").write_bytes(b"{}")
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump(nemo2_config(model, **others)))
    save_distributed(folder / "weights", {"module." + name: tensor for name, tensor in state.items()})
    return folder


def save_distributed(folder: Path, state: dict[str, Any]) -> None:
    distributed.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
