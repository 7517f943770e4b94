"""A repository as the tools of the earlier generation filled it, with our adapters in it.

Made from our own templates by taking away every tensor and parameter that is ours, and adding the keys and the
backend name that old fill lines have.
"""

from pathlib import Path

from google.protobuf import text_format
from render_repository import render_repository
from tritonclient.grpc import model_config_pb2

# What v0.19 of the contract does not know.
OURS = frozenset(
    {"min_p", "min_tokens", "seed", "return_kv_cache_reuse_stats", "include_stop_words_in_output",
     "return_finish_reason", "return_stop_reason", "return_num_input_tokens", "return_num_output_tokens", "priority",
     "queue_timeout_ms", "deadline_ms", "cache_salt", "return_errors_in_band", "piecewise", "next_piece",
     "piece_group", "pieces", "detokenize",
     "logits_processors",
     "stop_words_text", "stop_token_ids", "messages", "image_bytes_input", "image_url_input", "video_bytes_input",
     "finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens", "text_output", "error", "error_code",
     "more", "MESSAGES", "RETURN_ERRORS_IN_BAND", "IMAGES", "STOP_WORDS_TEXT", "STOP_TOKEN_IDS", "DETOKENIZE",
     "ERRORS_IN_BAND", "ERROR", "ERROR_CODE", "TEXT"}
)  # fmt: skip
OLD_PARAMETERS = {
    "tensorrt_llm": {
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no", "worker_path": "${worker_path}",
        "gpt_model_type": "inflight_fused_batching",
        "max_beam_width": "${max_beam_width}", "normalize_log_probs": "true", "kv_cache_host_memory_bytes": "45000000",
        "enable_trt_overlap": "False", "decoding_mode": "${decoding_mode}", "exclude_input_in_output": "True",
    },
    "preprocessing": {"tokenizer_type": "auto", "multimodal_model_path": "${multimodal_model_path}"},
    "postprocessing": {"tokenizer_type": "auto"},
    "tensorrt_llm_bls": {
        "accumulate_tokens": "false", "tensorrt_llm_draft_model_name": "${tensorrt_llm_draft_model_name}",
    },
}  # fmt: skip
OUR_PARAMETERS = frozenset(
    {"trust_remote_code", "max_text_bytes", "max_words", "max_word_bytes", "max_messages", "max_sequences", "dtype",
     "device", "include_stop_words_in_output", "reject_unknown_parameters", "decoupled_mode", "skip_special_tokens",
     "waiting_queue_policy", "context_chunking_policy", "context_cost_tokens", "kv_cache_layout", "max_logits_bytes",
     "step_timeout_ms", "default_deadline_ms", "default_queue_timeout_ms", "bls_max_concurrency", "tokens_per_block",
     "num_threads"}
)  # fmt: skip


def build_legacy_repository(target: Path, model_dir: Path) -> Path:
    """Write the five models into ``target`` and return it."""
    render_repository(target, {"triton_backend": "tensorrtllm"}, model_dir)
    for folder in sorted(path for path in target.iterdir() if path.is_dir()):
        path = folder / "config.pbtxt"
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        _take_away(config, keep={"text_output"} if folder.name in ("ensemble", "tensorrt_llm_bls") else set())
        for key in OUR_PARAMETERS & set(config.parameters):
            del config.parameters[key]
        for key, value in OLD_PARAMETERS.get(folder.name, {}).items():
            config.parameters[key].string_value = value
        path.write_text(text_format.MessageToString(config))
    return target


def _take_away(config: model_config_pb2.ModelConfig, keep: set[str]) -> None:
    for tensors in (config.input, config.output):
        for tensor in [tensor for tensor in tensors if tensor.name in OURS - keep]:
            tensors.remove(tensor)
    for step in config.ensemble_scheduling.step:
        for names in (step.input_map, step.output_map):
            for key in [key for key, value in names.items() if {key, value} & (OURS - {"text_output"}) or key in OURS]:
                del names[key]
