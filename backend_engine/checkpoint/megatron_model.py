"""``MegatronModel``: what NVIDIA's formats say of a model, and its config.json in Hugging Face's terms.

Filled by ``megatron_args.py`` (Megatron-LM) and ``nemo_config.py`` (NeMo). A mixture that no family computes is a
one-line ``ModelLoadError`` that names the format's own keys. Opens no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError


@dataclass(frozen=True)
class MegatronModel:
    """norm: ``layernorm`` or ``rmsnorm`` before each sublayer. adds_one: norm weights are stored as their distance
    from 1. activation: by Hugging Face's name. positions: ``rope`` or ``learned``. has_bias: of every product but
    those of queries, keys and values, which qkv_bias is about, and the head. rope_scaling: in Hugging Face's terms.
    num_experts: 0 without any. vocab_size: ``None`` when not known.
    """

    where: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn_size: int
    max_positions: int
    norm: str
    eps: float
    adds_one: bool
    activation: str
    is_gated: bool
    has_bias: bool
    qkv_bias: bool
    has_qk_norm: bool
    positions: str
    rope_theta: float
    rotary_percent: float
    rope_scaling: Mapping[str, Any] | None
    is_tied: bool
    num_experts: int
    top_k: int
    vocab_size: int | None

    @property
    def architecture(self) -> str:
        """The class of Hugging Face's that computes this. Raises ``ModelLoadError``."""
        is_llama = self.norm == "rmsnorm" and self.is_gated and self.activation == "silu" and self.positions == "rope"
        if is_llama and self.rotary_percent == 1:
            return self._llama()
        is_plain = self.norm == "layernorm" and not self.is_gated and not self.has_qk_norm and not self.num_experts
        is_square = self.num_groups == self.num_heads and self.num_heads * self.head_dim == self.hidden_size
        if is_plain and is_square and self.has_bias:
            return "GPT2LMHeadModel" if self.positions == "learned" else "GPTNeoXForCausalLM"
        raise ModelLoadError(
            f"{self.where}: {self._told()}; expected RMSNorm, a feed-forward layer gated by SiLU and whole heads "
            "rotated (Llama, Qwen2, Qwen3, Mixtral), or LayerNorm, a plain feed-forward layer, as many key heads as "
            "query heads and biases (GPT-2, GPT-NeoX)"
        )

    def _llama(self) -> str:
        kinds = {
            (False, False, False): "LlamaForCausalLM",
            (True, True, False): "LlamaForCausalLM",
            (False, True, False): "Qwen2ForCausalLM",
            (False, False, True): "Qwen3ForCausalLM",
        }
        kind = kinds.get((self.has_bias, self.qkv_bias, self.has_qk_norm))
        if kind == "LlamaForCausalLM" and self.num_experts and not self.has_bias:
            return "MixtralForCausalLM"
        if kind is None or self.num_experts:
            raise ModelLoadError(
                f"{self.where}: {self._told()}; expected biases on every product or on queries, keys and values only, "
                "or none and norms on queries and keys, or none and experts"
            )
        return kind

    def _told(self) -> str:
        return (
            f"{self.norm}, {'gated' if self.is_gated else 'plain'} {self.activation}, {self.positions} positions "
            f"({self.rotary_percent} of a head), {self.num_heads} heads of {self.head_dim} in {self.num_groups} "
            f"groups, "
            f"add_bias_linear {self.has_bias}, add_qkv_bias {self.qkv_bias}, qk_layernorm {self.has_qk_norm}, "
            f"{self.num_experts} experts"
        )

    def hf_config(self, vocab_size: int, dtype: str) -> dict[str, Any]:
        """config.json. ``vocab_size``: rows of the embedding; ``dtype``: of the weights, as torch calls it."""
        architecture = self.architecture
        common = {
            "architectures": [architecture],
            "vocab_size": vocab_size,
            "tie_word_embeddings": self.is_tied,
            "dtype": dtype,
        }
        if architecture == "GPT2LMHeadModel":
            return common | {
                "model_type": "gpt2",
                "n_embd": self.hidden_size,
                "n_head": self.num_heads,
                "n_layer": self.num_layers,
                "n_positions": self.max_positions,
                "n_inner": self.ffn_size,
                "activation_function": self.activation,
                "layer_norm_epsilon": self.eps,
            }
        common |= {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_positions,
            "hidden_act": self.activation,
        }
        rope: dict[str, Any] = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        if architecture == "GPTNeoXForCausalLM":
            rope["partial_rotary_factor"] = self.rotary_percent
            neox = {"layer_norm_eps": self.eps, "use_parallel_residual": False, "attention_bias": True}
            return common | neox | {"model_type": "gpt_neox", "rope_parameters": rope}
        common |= {
            "num_key_value_heads": self.num_groups,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "rope_parameters": rope,
        }
        own: dict[str, dict[str, Any]] = {
            "LlamaForCausalLM": {"model_type": "llama", "attention_bias": self.has_bias, "mlp_bias": self.has_bias},
            "Qwen2ForCausalLM": {"model_type": "qwen2", "use_sliding_window": False},
            "Qwen3ForCausalLM": {"model_type": "qwen3", "use_sliding_window": False, "attention_bias": False},
            "MixtralForCausalLM": {
                "model_type": "mixtral",
                "sliding_window": None,
                "num_local_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
            },
        }
        return common | own[architecture]


def read_sizes(config: HfConfig) -> tuple[int, int, int]:
    """Hidden size, heads, and elements of a head, which have the same keys in every format."""
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.get("kv_channels") is None and hidden_size % num_heads:
        raise config.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or kv_channels")
    head_dim = config.integer("kv_channels", hidden_size // num_heads or 1)
    return hidden_size, num_heads, head_dim


def read_groups(config: HfConfig, num_heads: int, default: int) -> int:
    """How many groups of query heads there are, each with one key head."""
    num_groups = config.integer("num_query_groups", default)
    if num_heads % num_groups:
        raise config.refuse("num_query_groups", f"a divisor of num_attention_heads, {num_heads}")
    return num_groups


def read_share(config: HfConfig, key: str) -> float:
    """Share of each head that is rotated."""
    share = config.number(key, 1.0)
    if share > 1:
        raise config.refuse(key, "a share from 0 to 1")
    return share
