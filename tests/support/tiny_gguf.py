"""Tiny checkpoints as GGUF files, written from Hugging Face folders as llama.cpp's converter writes them.

Names come from the ``gguf`` package, the reorderings from the converter; nothing here is shared with the reader.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from tests.support.tiny_models import TINY_MODELS, TinyModel, scramble

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
}
_ROTATED_SIDE_BY_SIDE = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "GraniteForCausalLM")
# Key of config.json -> what the writer calls its method.
_KEYS = {
    "vocab_size": "vocab_size", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv", "rms_norm_eps": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps", "layer_norm_epsilon": "layer_norm_eps", "n_embd": "embedding_length",
    "n_layer": "block_count", "n_head": "head_count", "n_positions": "context_length", "n_inner": "feed_forward_length",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_rope_head_dim": "rope_dimension_count",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count", "sliding_window": "sliding_window",
    "attention_multiplier": "attention_scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "parallel_residual", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}  # fmt: skip


def _row(model: str, values: Mapping[str, Any] | None = None) -> TinyModel:
    """A row of ``TINY_MODELS``, with other values where a GGUF cannot say what the row has."""
    row = TINY_MODELS[model]
    return TinyModel(row.architecture, row.about, {**row.values, **(values or {})})


_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
}  # fmt: skip


_EVERYWHERE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
TINY_GGUFS: dict[str, TinyModel] = {
    "llama": _row("llama_linear"),
    "llama_llama3": _row("llama_llama3", {"head_dim": 32}),
    "llama_yarn": _row("llama_yarn"),
    "llama_biased": _row("llama_linear", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": _row("mistral_full", {"head_dim": 32}),
    "mixtral": _row("mixtral"),
    "qwen2": _row("qwen2"),
    "qwen2_moe": _row("qwen2_moe", _EVERYWHERE),
    "qwen3": _row("qwen3"),
    "qwen3_moe": _row("qwen3_moe", _EVERYWHERE),
    "gemma": _row("gemma"),
    "gemma2": _row("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": _row("gemma3", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None}),
    "phi3": _row("phi3"),
    "phi3_long": _row("phi3_long"),
    "gpt2": _row("gpt2"),
    "gpt_neox": _row("gpt_neox"),
    "gpt_neox_serial": _row("gpt_neox_serial", {"hidden_act": "gelu", "attention_bias": True}),
    "granite": _row("granite"),
    "olmo2": _row("olmo2"),
    "deepseek_v2": _row(
        "deepseek_v2",
        {"attention_bias": False, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2_lite": _row("deepseek_v2_lite", {"attention_bias": False}),
    "deepseek_v3": _row("deepseek_v3"),
    "gpt_oss": _row(
        "gpt_oss",
        {"swiglu_limit": 7.0, "hidden_size": 64, "intermediate_size": 96, "layer_types": None, "head_dim": 32},
    ),
}


def build_tiny(name: str, folder: Path, rounded_to: Type | None = None) -> Any:
    """Write the checkpoint of row ``name`` into ``folder`` and return the model. rounded_to: all matrices have numbers
    that this type packs without loss.
    """
    row = TINY_GGUFS[name]
    torch.manual_seed(0)
    config = row.config()
    config._attn_implementation = "eager"
    model = getattr(transformers, row.architecture)(config).eval()
    scramble(model)
    if rounded_to is not None:
        for parameter_name, parameter in model.named_parameters():
            _round(parameter_name, parameter, row.architecture, rounded_to)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def _round(name: str, parameter: torch.Tensor, architecture: str, kind: Type) -> None:
    is_transposed = architecture == "GptOssForCausalLM" and name.endswith(("gate_up_proj", "down_proj"))
    is_transposed = is_transposed or (architecture == "GPT2LMHeadModel" and ".c_" in name)
    if parameter.ndim < 2 or name.endswith("_bias"):
        return
    weight = parameter.transpose(-1, -2) if is_transposed else parameter
    if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        data = weight.contiguous().numpy()
        weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(data, kind), kind)))


Pick = Callable[[str, tuple[int, ...]], Type]


def plain(name: str, shape: tuple[int, ...]) -> Type:
    """Every tensor as float32."""
    return Type.F32


def packed_as(kind: Type) -> Pick:
    """Matrices whose rows allow it, but for routers and positions, in ``kind``."""

    def pick(name: str, shape: tuple[int, ...]) -> Type:
        left_alone = (".bias", "ffn_gate_inp", "position_embd", "attn_k_b", "attn_v_b")
        is_matrix = len(shape) > 1 and not any(part in name for part in left_alone)
        return kind if is_matrix and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Type.F32

    return pick


def write_gguf(folder: Path, path: Path, pick: Pick = plain, extra: Mapping[str, Any] | None = None) -> Path:
    """Write the checkpoint in ``folder`` as ``path``. ``extra``: metadata, whole keys."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, *value)
    for name, tensor in _tensors(load_file(folder / "model.safetensors"), config, arch):
        kind = pick(name, tuple(tensor.shape))
        data = tensor.to(torch.float32).contiguous().numpy()
        writer.add_tensor(name, gguf.quantize(data, kind) if kind != Type.F32 else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    name = config["architectures"][0]
    config = dict(config)
    if name == "GPT2LMHeadModel":
        config["n_inner"] = config["n_inner"] or 4 * config["n_embd"]
    if name.startswith("Deepseek"):
        _write_latent(writer, config)
    if name == "GptOssForCausalLM":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "Qwen" in name or name.startswith("Mi"):
        config["sliding_window"] = None
    if name == "Phi3ForCausalLM":
        config["sliding_window"] = config["sliding_window"] or 0
    for key, method in _KEYS.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{method}")(config[key])
    head_dim = config.get("head_dim")
    if head_dim is not None and not name.startswith(("Deepseek", "Granite")):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _write_rope(writer, config)


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    config["num_key_value_heads"] = 1
    key_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(key_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config["architectures"][0] == "DeepseekV3ForCausalLM":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    if not rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "qk_rope_head_dim" not in config:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if rope["rope_type"] in ("yarn", "longrope") or config["architectures"][0] == "Phi3ForCausalLM":
        writer.add_rope_scaling_orig_ctx_len(original)
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)


def _tensors(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], arch: gguf.MODEL_ARCH
) -> Iterator[tuple[str, torch.Tensor]]:
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, num_layers)
    changed = [pair for name, tensor in weights.items() for pair in _changed(name, tensor, config)]
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in changed:
        before, found, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if found and number.isdigit():
            if rest.startswith("w"):  # Mixtral
                before = before.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        else:
            yield _named(names, name), tensor
    for name, entries in stacks.items():
        yield _named(names, name), torch.stack([entries[i] for i in range(len(entries))])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _named(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith("e_score_correction_bias"):
        name = name.removesuffix("_bias") + ".bias"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _changed(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """What the converter makes of a tensor before it names it."""
    kind = config["architectures"][0]
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kind in _ROTATED_SIDE_BY_SIDE and ".q_proj." in name:
        yield name, _permute(tensor, heads)
    elif kind in _ROTATED_SIDE_BY_SIDE and ".k_proj." in name:
        yield name, _permute(tensor, kv_heads)
    elif kind.startswith("Gemma") and name.endswith("norm.weight"):
        yield name, tensor + 1
    elif kind == "GPT2LMHeadModel" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        yield name, tensor.T
    elif kind == "GPTNeoXForCausalLM" and ".query_key_value." in name:
        by_head = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
        yield name, torch.cat([by_head[:, part].flatten(0, 1) for part in range(3)])
    elif kind.startswith("Deepseek") and name.endswith("kv_b_proj.weight"):
        whole = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
        keys, values = whole.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    elif kind == "GptOssForCausalLM" and ".experts." in name:
        yield from _clamped_experts(name, tensor)
    elif name.endswith(".sinks"):
        yield name + ".weight", tensor
    elif name.endswith("shared_expert_gate.weight"):
        yield name, tensor.squeeze(0)
    else:
        yield name, tensor


def _clamped_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    leaf = ".bias" if name.endswith("_bias") else ".weight"
    name = name.removesuffix("_bias")
    tensor = tensor if leaf == ".bias" else tensor.transpose(1, 2)
    if name.endswith("down_proj"):
        yield name + leaf, tensor
    else:
        yield name.replace("gate_up_proj", "gate_proj") + leaf, tensor[:, ::2]
        yield name.replace("gate_up_proj", "up_proj") + leaf, tensor[:, 1::2]


def _permute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def _llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> torch.Tensor:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for freq in 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)):
        wavelength = 2 * math.pi / freq
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def split_parts(path: Path, num_parts: int) -> list[Path]:
    """Write the tensors of the GGUF at ``path`` as parts, as gguf-split does."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"{path.stem}-{i + 1:05}-of-{num_parts:05}.gguf") for i in range(num_parts)]
    for i, part in enumerate(names):
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        if i == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in np.array_split(np.arange(len(reader.tensors)), num_parts)[i]:
            found = reader.tensors[tensor]
            writer.add_tensor(found.name, found.data, raw_dtype=found.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names
