"""Reads a model's config parameters into typed results, or one error with all problems.

Called once, by an adapter's ``initialize``, with the model config that Triton Server hands over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend_engine.config.engine_config import KvCacheConfig, SchedulerConfig
from backend_engine.plugins.discovery import plugin_names
from backend_engine.triton_io.engine_request import RequestDefaults
from backend_engine.triton_io.parameter_reader import ParameterReader
from backend_engine.triton_io.tensor_rows import BLS, ENGINE, FP32, POSTPROCESSING, PREPROCESSING
from backend_engine.triton_io.word_lists import WordLimits


@dataclass(frozen=True)
class EngineParameters:
    """Parameters of the engine model. ``llm_arguments`` are the keyword arguments of ``LLM``."""

    model_dir: str
    tokenizer_dir: str | None
    llm_arguments: dict[str, Any]
    defaults: RequestDefaults
    reject_unknown_parameters: bool
    cancellation_check_period_ms: int
    stats_check_period_ms: int


@dataclass(frozen=True)
class PreprocessingParameters:
    """Parameters of preprocessing. ``model_dir``: where config.json and generation_config.json lie, if set."""

    tokenizer_dir: str
    model_dir: str | None
    trust_remote_code: bool
    add_special_tokens: bool
    reject_unknown_parameters: bool
    max_text_bytes: int
    max_messages: int
    max_sequences: int
    word_limits: WordLimits


@dataclass(frozen=True)
class PostprocessingParameters:
    """Parameters of postprocessing."""

    tokenizer_dir: str
    trust_remote_code: bool
    skip_special_tokens: bool


@dataclass(frozen=True)
class BlsParameters:
    """Parameters of the BLS."""

    engine_model: str
    accumulate_tokens: bool
    max_concurrency: int
    reject_unknown_parameters: bool
    cancellation_check_period_ms: int


def read_engine(model_config: Mapping[str, Any]) -> EngineParameters:
    """Parameters of ``tensorrt_llm``. ``ConfigError`` names all problems."""
    reader = ParameterReader(ENGINE, model_config)
    model_dir = reader.require("gpt_model_path")
    reader.check()
    usual = RequestDefaults()
    defaults = RequestDefaults(
        exclude_input_in_output=reader.get("exclude_input_in_output", False),
        include_stop_words_in_output=reader.get("include_stop_words_in_output", True),
        deadline_ms=reader.get("default_deadline_ms", 600_000) or None,
        queue_timeout_ms=reader.get("default_queue_timeout_ms", 0) or None,
        skip_special_tokens=reader.get("skip_special_tokens", True),
        max_beam_width=reader.get("max_beam_width", usual.max_beam_width),
        max_sequences=reader.get("max_sequences", usual.max_sequences),
        max_logits_bytes=reader.get("max_logits_bytes", usual.max_logits_bytes),
        logits_dtype=_logits_dtype(model_config),
        word_limits=_word_limits(reader),
    )
    return EngineParameters(
        model_dir=model_dir,
        tokenizer_dir=reader.get("tokenizer_dir"),
        llm_arguments=_llm_arguments(reader),
        defaults=defaults,
        reject_unknown_parameters=reader.get("reject_unknown_parameters", False),
        cancellation_check_period_ms=reader.get("cancellation_check_period_ms", 100),
        stats_check_period_ms=reader.get("stats_check_period_ms", 100),
    )


def _llm_arguments(reader: ParameterReader) -> dict[str, Any]:
    kv_defaults, scheduler_defaults = KvCacheConfig(), SchedulerConfig()
    kv_cache = KvCacheConfig(
        tokens_per_block=reader.get("tokens_per_block"),
        max_tokens=reader.get("max_tokens_in_paged_kv_cache"),
        free_gpu_memory_fraction=reader.get("kv_cache_free_gpu_mem_fraction", kv_defaults.free_gpu_memory_fraction),
        enable_block_reuse=reader.get("enable_kv_cache_reuse", kv_defaults.enable_block_reuse),
        layout=reader.get("kv_cache_layout", kv_defaults.layout),
        max_attention_window=reader.get("max_attention_window_size"),
        dtype=reader.get("kv_cache_dtype", kv_defaults.dtype),
    )
    is_static = reader.get("gpt_model_type") == "v1"
    policy = reader.get("batch_scheduler_policy", scheduler_defaults.capacity_policy)
    scheduler = SchedulerConfig(
        max_queue_size=reader.get("max_queue_size", scheduler_defaults.max_queue_size),
        capacity_policy="static_batch" if is_static else policy,
        waiting_queue_policy=reader.get("waiting_queue_policy", scheduler_defaults.waiting_queue_policy),
        enable_chunked_context=reader.get("enable_chunked_context", scheduler_defaults.enable_chunked_context),
        chunk_unit_size=reader.get("chunk_unit_size", scheduler_defaults.chunk_unit_size),
        context_chunking_policy=reader.get("context_chunking_policy", scheduler_defaults.context_chunking_policy),
        context_cost_tokens=reader.get("context_cost_tokens"),
    )
    step_timeout_ms = reader.get("step_timeout_ms", 0)
    return {
        "kv_cache_config": kv_cache,
        "scheduler_config": scheduler,
        "max_batch_size": reader.get("max_batch_size"),
        "max_num_tokens": reader.get("max_num_tokens"),
        "max_seq_len": reader.get("max_seq_len"),
        "dtype": reader.get("dtype", "auto"),
        "device": reader.get("device", "auto"),
        "attention_backend": reader.get("attention_backend", "auto"),
        "operators": reader.get("operators", "auto"),
        "weight_only_precision": reader.get("weight_only_precision", "auto"),
        "batch_invariant": reader.get("batch_invariant"),
        "record_layers": reader.get("record_layers", True),
        "plugins": plugin_names(reader.get("plugins", "")),
        "model_backend": reader.get("model_backend", "auto"),
        "generation_config": reader.get("generation_config", "ignore"),
        "num_threads": reader.get("num_threads", 0),
        "trust_remote_code": reader.get("trust_remote_code", False),
        "step_timeout_s": step_timeout_ms / 1000 if step_timeout_ms else None,
        "iter_stats_max_iterations": reader.get("iter_stats_max_iterations", 1000),
        "debug_hang_on_tokens": reader.get("debug_hang_on_tokens", ()),
        "debug_step_delay_ms": reader.get("debug_step_delay_ms", 0.0),
        "debug_fail_on_tokens": reader.get("debug_fail_on_tokens", ()),
    }


def _logits_dtype(model_config: Mapping[str, Any]) -> str:
    """Data type of the logits outputs as the config declares them; ``TYPE_FP32`` when it does not."""
    for output in model_config.get("output") or []:
        if output.get("name") == "generation_logits":
            return str(output.get("data_type", FP32))
    return FP32


def read_preprocessing(model_config: Mapping[str, Any]) -> PreprocessingParameters:
    """Parameters of ``preprocessing``."""
    reader = ParameterReader(PREPROCESSING, model_config)
    tokenizer_dir = reader.require("tokenizer_dir")
    reader.check()
    return PreprocessingParameters(
        tokenizer_dir=tokenizer_dir,
        model_dir=reader.get("gpt_model_path"),
        trust_remote_code=reader.get("trust_remote_code", False),
        add_special_tokens=reader.get("add_special_tokens", True),
        reject_unknown_parameters=reader.get("reject_unknown_parameters", False),
        max_text_bytes=reader.get("max_text_bytes", 1 << 20),
        max_messages=reader.get("max_messages", 1024),
        max_sequences=reader.get("max_sequences", 64),
        word_limits=_word_limits(reader),
    )


def read_postprocessing(model_config: Mapping[str, Any]) -> PostprocessingParameters:
    """Parameters of ``postprocessing``; several instances are refused when they could reorder a stream."""
    reader = ParameterReader(POSTPROCESSING, model_config)
    tokenizer_dir = reader.require("tokenizer_dir")
    count = sum(max(1, int(group.get("count", 1))) for group in model_config.get("instance_group") or [])
    if count > 1 and reader.get("decoupled_mode", True):
        reader.refuse(
            f"postprocessing_instance_count {count} would deliver streamed pieces out of order; set it to 1, "
            "or set decoupled_mode to false"
        )
    reader.check()
    return PostprocessingParameters(
        tokenizer_dir=tokenizer_dir,
        trust_remote_code=reader.get("trust_remote_code", False),
        skip_special_tokens=reader.get("skip_special_tokens", True),
    )


def read_bls(model_config: Mapping[str, Any]) -> BlsParameters:
    """Parameters of ``tensorrt_llm_bls``."""
    reader = ParameterReader(BLS, model_config)
    reader.check()
    return BlsParameters(
        engine_model=reader.get("tensorrt_llm_model_name", ENGINE),
        accumulate_tokens=reader.get("accumulate_tokens", False),
        max_concurrency=reader.get("bls_max_concurrency", 128),
        reject_unknown_parameters=reader.get("reject_unknown_parameters", False),
        cancellation_check_period_ms=reader.get("cancellation_check_period_ms", 100),
    )


def _word_limits(reader: ParameterReader) -> WordLimits:
    defaults = WordLimits()
    return WordLimits(
        reader.get("max_words", defaults.max_words), reader.get("max_word_bytes", defaults.max_word_bytes)
    )
