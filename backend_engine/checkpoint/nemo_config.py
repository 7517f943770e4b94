"""``read_nemo1`` and ``read_nemo2``: NeMo's model_config.yaml and context/model.yaml, as a ``MegatronModel``.

Sources: NeMo's megatron_gpt_config.yaml and ``build_transformer_config`` (1.x), the dataclasses of
nemo.collections.llm (2.x). Keys that change what the model computes are read or refused, by name. Opens no file.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from backend_engine.checkpoint.hf_rope import llama3_scaling
from backend_engine.checkpoint.megatron_args import refuse_other_models
from backend_engine.checkpoint.megatron_model import MegatronModel, read_groups, read_share, read_sizes
from backend_engine.config.hf_config import MAX_LAYERS, HfConfig
from backend_engine.errors import ModelLoadError, one_line

_NEUTRAL_1: dict[str, Collection[Any]] = {
    "attention_type": ("multihead",),
    "megatron_legacy": (False,),
    "moe_frequency": (1,),
    "normalize_attention_scores": (True,),
    "peft": (),
    "rotary_interleaved": (False,),
    "sequence_parallel_world_size": (1,),
    "transformer_block_type": ("pre_ln",),
}
# Models that compute more than these keys say.
_OTHERS_1 = ("falcon", "gemma", "griffin", "mamba", "bert", "t5", "retro", "bart", "neva")
_NORMS_1 = {
    "layernorm": ("layernorm", False),
    "low_precision_layernorm": ("layernorm", False),
    "layernorm1p": ("layernorm", True),
    "rmsnorm": ("rmsnorm", False),
}
_ACTIVATIONS_1 = {
    "gelu": ("gelu", False),
    "approx-gelu": ("gelu_new", False),
    "relu": ("relu", False),
    "squared-relu": ("relu2", False),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
}
_FUNCTIONS_2 = {"silu": "silu", "gelu": "gelu", "relu": "relu", "squared_relu": "relu2", "openai_gelu": "gelu_new"}
# Other classes compute more than their fields say (Gemma scales its embeddings, Llama 4 attends in pieces).
_CLASSES_2 = re.compile(r"(GPT|Llama(2|3|31|32)?|CodeLlama|Qwen2|Qwen25|Qwen3|Mistral|Mixtral)Config\w*")
_POSITIONS = {"rope": "rope", "learned_absolute": "learned"}


_MAX_YAML_DEPTH = 50
# Besides its own, the parser raises what comes of values that are not what their tags say.
_YAML_ERRORS = (
    yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class _PlainLoader(yaml.SafeLoader):
    """Without merged mappings (``<<``), which a few lines make billions of entries of, and not nested without end."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= _MAX_YAML_DEPTH:
            raise yaml.scanner.ScannerError(None, None, f"more than {_MAX_YAML_DEPTH} brackets", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "a merged mapping (<<)", node.start_mark)


def read_yaml(data: bytes, where: str) -> dict[str, Any]:
    """The mapping that a YAML file holds, plain values only. Raises ``ModelLoadError``."""
    try:
        # Its size is bounded by the caller: the parser is slow.
        values = yaml.load(data, _PlainLoader)
    except _YAML_ERRORS as error:
        raise ModelLoadError(f"{where} is not valid YAML ({one_line(error)})") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where} holds a {type(values).__name__}; expected a mapping")
    return values


def read_nemo1(values: Mapping[str, Any], where: str) -> MegatronModel:
    """The model that a model_config.yaml describes. Raises ``ModelLoadError`` naming key and value."""
    config = HfConfig(values, where)
    refuse_other_models(config)
    config.require_neutral(_NEUTRAL_1)
    for key in ("target", "name"):
        value = str(config.get(key) or "gpt").lower()
        if any(word in value for word in _OTHERS_1):
            raise config.refuse(key, f"a decoder that is not one of {', '.join(_OTHERS_1)}")
    hidden_size, num_heads, head_dim = read_sizes(config)
    norm, adds_one = _NORMS_1[config.choice("normalization", _NORMS_1, "layernorm")]
    activation, is_gated = _ACTIVATIONS_1[config.choice("activation", _ACTIVATIONS_1, "gelu")]
    has_bias = config.flag("bias", True)
    is_fused = config.flag("bias_activation_fusion", config.flag("bias_gelu_fusion", True))
    has_tanh = config.flag("openai_gelu", False) or (is_fused and has_bias)
    num_experts = config.count("num_moe_experts", 0)
    ffn_size = config.integer("ffn_hidden_size", None if is_gated else 4 * hidden_size)
    positions = _POSITIONS[config.choice("position_embedding_type", _POSITIONS, "learned_absolute")]
    return MegatronModel(
        where=where,
        num_layers=config.integer("num_layers", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_groups=read_groups(config, num_heads, num_heads),
        head_dim=head_dim,
        ffn_size=config.integer("moe_ffn_hidden_size", ffn_size) if num_experts else ffn_size,
        max_positions=config.integer("max_position_embeddings", _length(config)),
        norm=norm,
        eps=config.number("layernorm_epsilon", 1e-5),
        adds_one=adds_one or config.flag("layernorm_zero_centered_gamma", False),
        activation="gelu_new" if activation == "gelu" and has_tanh else activation,
        is_gated=is_gated,
        has_bias=has_bias,
        qkv_bias=config.flag("qkv_bias", False) or has_bias,
        has_qk_norm=config.flag("qk_layernorm", False),
        positions=positions,
        rope_theta=config.number("rotary_base", 10000.0),
        rotary_percent=read_share(config, "rotary_percentage"),
        rope_scaling=llama3_scaling(8.0) if config.flag("scale_positional_embedding", False) else _linear(config),
        is_tied=config.flag("share_embeddings_and_output_weights", True),
        num_experts=num_experts,
        top_k=config.integer("moe_router_topk", 2),
        vocab_size=config.integer("vocab_size") if config.get("vocab_size") is not None else None,
    )


def read_nemo2(values: Mapping[str, Any], where: str) -> MegatronModel:
    """The model that a context/model.yaml describes. Raises ``ModelLoadError`` naming key and value."""
    found = HfConfig(values, where).section("config")
    if found is None:
        raise ModelLoadError(
            f"{where}: config is missing; expected the configuration of a model of nemo.collections.llm"
        )
    config = found
    target = config.get("_target_")
    if not isinstance(target, str) or not _CLASSES_2.fullmatch(target.rpartition(".")[2]):
        raise config.refuse("_target_", "the configuration class of a GPT, Llama, Qwen, Mistral or Mixtral model")
    refuse_other_models(config)
    hidden_size, num_heads, head_dim = read_sizes(config)
    has_bias, is_gated = config.flag("add_bias_linear", True), config.flag("gated_linear_unit", False)
    num_experts = config.count("num_moe_experts", 0)
    ffn_size = config.integer("ffn_hidden_size", None if is_gated else 4 * hidden_size)
    return MegatronModel(
        where=f"{where}: config",
        num_layers=config.integer("num_layers", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_groups=read_groups(config, num_heads, num_heads),
        head_dim=head_dim,
        ffn_size=config.integer("moe_ffn_hidden_size", ffn_size) if num_experts else ffn_size,
        max_positions=config.integer("seq_length"),
        norm=config.choice("normalization", ("LayerNorm", "RMSNorm")).lower(),
        eps=config.number("layernorm_epsilon"),
        adds_one=config.flag("layernorm_zero_centered_gamma", False),
        activation=_function(config, has_bias),
        is_gated=is_gated,
        has_bias=has_bias,
        qkv_bias=config.flag("add_qkv_bias", False) or has_bias,
        has_qk_norm=config.flag("qk_layernorm", False),
        positions=_POSITIONS[config.choice("position_embedding_type", _POSITIONS)],
        rope_theta=config.number("rotary_base"),
        rotary_percent=read_share(config, "rotary_percent"),
        rope_scaling=_scaling_2(config),
        is_tied=config.flag("share_embeddings_and_output_weights", True),
        num_experts=num_experts,
        top_k=config.integer("moe_router_topk", 2),
        vocab_size=config.integer("vocab_size") if config.get("vocab_size") is not None else None,
    )


def _length(config: HfConfig) -> int | None:
    return config.integer("encoder_seq_length") if config.get("encoder_seq_length") is not None else None


def _linear(config: HfConfig) -> dict[str, Any] | None:
    factor = config.get("seq_len_interpolation_factor")
    if factor is None or factor == 1:
        return None
    return {"rope_type": "linear", "factor": config.number("seq_len_interpolation_factor")}


def _scaling_2(config: HfConfig) -> dict[str, Any] | None:
    if config.get("scale_factor") is None:
        return _linear(config)
    config.require_neutral({"seq_len_interpolation_factor": (1,)})
    return llama3_scaling(
        config.number("scale_factor"),
        config.number("low_freq_factor", 1.0),
        config.number("high_freq_factor", 4.0),
        config.integer("old_context_len", 8192),
    )


def _function(config: HfConfig, has_bias: bool) -> str:
    """Hugging Face's name of the activation, which is a function named by its place."""
    value = config.get("activation_func")
    target = value.get("_target_") if isinstance(value, dict) else value
    name = target.rpartition(".")[2] if isinstance(target, str) else ""
    if name not in _FUNCTIONS_2:
        raise config.refuse("activation_func", f"a function called {', '.join(sorted(_FUNCTIONS_2))}")
    is_tanh = name == "gelu" and config.flag("bias_activation_fusion", False) and has_bias
    return "gelu_new" if is_tanh else _FUNCTIONS_2[name]
