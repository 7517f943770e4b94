"""What the keys of config.json that a family does not read may mean: nothing, or another model.

Used by ``Family`` for the rest of a config. Data, and the check of it.
"""

from collections.abc import Collection
from typing import Any

from backend_engine.config.hf_config import HfConfig

# Keys that change the maths, each with the values with which they do not. A family that builds them reads them.
NEUTRAL: dict[str, Collection[Any]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "cross_attention_freq": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (0,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "layer_types": (),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "n_group": (1,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "q_lora_rank": (),
    "qk_norm": (False,),
    "residual_multiplier": (1,),
    "rms_norm": (True,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "routed_scaling_factor": (1,),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
    "topk_group": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
# Keys without a say in what the model computes: names, training, generation, other uses of the same weights; and how
# weights are packed, which is the loader's affair.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_model_name_or_path",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "cache_implementation",
        "chunk_size",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "ep_size",
        "hidden_dropout",
        "id2label",
        "initial_context_length",
        "init_method",
        "initializer_range",
        "label2id",
        "mamba_chunk_size",
        "max_window_layers",
        "model_type",
        "n_ctx",
        "mtp_transformer_layers",
        "norm_before_gate",
        "num_mtp_modules",
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "qk_head_dim",
        "rescale_prenorm_residual",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "residual_in_fp32",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_aux",
        "sliding_window_pattern",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "time_step_scale",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_flash_attn",
        "use_mamba_kernels",
        "use_mtp",
    }
)


def check_rest(config: HfConfig) -> None:
    """Refuse keys that nobody read and that mean another model than the one that was built."""
    config.require_neutral({key: values for key, values in NEUTRAL.items() if key in config.unread()})


def unknown_keys(config: HfConfig) -> list[str]:
    """Keys that nobody read and that are not known to have no effect, sorted."""
    return sorted(key for key in config.unread() if key not in NEUTRAL and key not in HARMLESS)
