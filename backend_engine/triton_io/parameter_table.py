"""The one list of model parameters: config key, template placeholder, models, kind, default and what it does.

``parameters.py`` reads values by it, ``docs/parameters.md`` and the templates are checked against it. Data only.
"""

from enum import StrEnum
from typing import NamedTuple

from backend_engine.triton_io.tensor_table import BLS, ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING

Value = bool | int | float | str | None
ALL = (PREPROCESSING, ENGINE, POSTPROCESSING, BLS, ENSEMBLE)
SHAPE = "(config)"


class Status(StrEnum):
    """What a value does: ``built`` = it counts, ``no effect`` and ``not built yet`` = accepted, with one log line."""

    BUILT = "built"
    NO_EFFECT = "no effect"
    NOT_BUILT = "not built yet"


class Parameter(NamedTuple):
    """One parameter. ``key`` is ``SHAPE`` for placeholders that stand in the config's own fields.

    ``placeholder`` is empty for keys that old configs hold and our templates do not.
    ``kind``: path, text, int, float, bool, ids or a tuple of allowed words. ``low`` and ``high`` bound numbers.
    ``default`` is text for the documentation; the readers own the values.
    """

    key: str
    placeholder: str
    models: tuple[str, ...]
    kind: str | tuple[str, ...]
    default: str
    help: str
    status: Status = Status.BUILT
    low: float | None = None
    high: float | None = None

    def doc_row(self) -> str:
        """The parameter's line in docs/parameters.md."""
        kind = " / ".join(self.kind) if isinstance(self.kind, tuple) else self.kind
        if self.high is not None:
            kind += f", {self.low:g} to {self.high:g}"
        elif self.low is not None:
            kind += f", {self.low:g} or more"
        key = "field" if self.key == SHAPE else f"`{self.key}`"
        placeholder = f"`{self.placeholder}`" if self.placeholder else "none"
        models = "all" if self.models == ALL else ", ".join(self.models)
        return f"| {placeholder} | {key} | {models} | {kind} | {self.default} | {self.status} | {self.help} |"


def _engine(
    key: str,
    kind: str | tuple[str, ...],
    default: str,
    help: str,
    *,
    placeholder: str = "",
    low: float | None = None,
    high: float | None = None,
) -> Parameter:
    return Parameter(key, placeholder or key, (ENGINE,), kind, default, help, Status.BUILT, low, high)


def _other(
    key: str, help: str, status: Status, models: tuple[str, ...] = (ENGINE,), placeholder: str = ""
) -> Parameter:
    return Parameter(key, placeholder or key, models, "text", "unset", help, status)


def _old(key: str, help: str, models: tuple[str, ...] = (ENGINE,)) -> Parameter:
    return Parameter(key, "", models, "text", "unset", help, Status.NO_EFFECT)


PARAMETERS: tuple[Parameter, ...] = (
    # The shape of the models: fields of config.pbtxt and not parameters.
    Parameter(SHAPE, "triton_max_batch_size", ALL, "int", "required", "Triton Server's max_batch_size.", low=1),
    Parameter(SHAPE, "decoupled_mode", (ENGINE, BLS), "bool", "required", "Streaming needs true."),
    Parameter(
        SHAPE, "max_queue_delay_microseconds", (PREPROCESSING, ENGINE), "int", "0", "Dynamic batcher's delay.", low=0
    ),
    Parameter(SHAPE, "max_queue_size", (PREPROCESSING,), "int", "0", "Dynamic batcher's queue; 0 = no limit.", low=0),
    Parameter(SHAPE, "preprocessing_instance_count", (PREPROCESSING,), "int", "required", "Processes.", low=1),
    Parameter(
        SHAPE, "postprocessing_instance_count", (POSTPROCESSING,), "int", "required",
        "Processes; more than 1 is refused with decoupled_mode, because they would reorder a stream.", low=1,
    ),
    Parameter(SHAPE, "bls_instance_count", (BLS,), "int", "required", "Processes; one serves many requests.", low=1),
    Parameter(
        "decoupled_mode", "decoupled_mode", (POSTPROCESSING,), "bool", "true",
        "Whether the engine is decoupled; false allows several postprocessing instances.",
    ),
    Parameter(SHAPE, "triton_backend", (ENGINE,), ("python", "tensorrtllm"), "required", "Name of the backend."),
    # Where things are.
    _engine("gpt_model_path", "path", "required", "Hugging Face folder of the model.", placeholder="engine_dir"),
    Parameter(
        "gpt_model_path", "engine_dir", (PREPROCESSING,), "path", "tokenizer_dir",
        "Folder whose config.json gives the vocabulary size and whose generation_config.json gives the end ids.",
    ),
    Parameter("tokenizer_dir", "tokenizer_dir", (PREPROCESSING, POSTPROCESSING), "path", "required", "Its folder."),
    _engine("tokenizer_dir", "path", "engine_dir", "Tokenizer folder, for stop words and text output."),
    Parameter(
        "trust_remote_code", "trust_remote_code", (PREPROCESSING, ENGINE, POSTPROCESSING), "bool", "false",
        "Run Python code that lies beside the tokenizer.",
    ),
    # Text.
    Parameter(
        "add_special_tokens", "add_special_tokens", (PREPROCESSING,), "bool", "true",
        "Let the tokenizer add its beginning-of-text tokens to prompts.",
    ),
    Parameter(
        "skip_special_tokens", "skip_special_tokens", (POSTPROCESSING, ENGINE), "bool", "true",
        "Leave special tokens out of texts.",
    ),
    Parameter(
        "max_text_bytes", "max_text_bytes", (PREPROCESSING,), "int", "1048576", "Most bytes of a prompt's text.", low=1
    ),
    Parameter(
        "max_words", "max_words", (PREPROCESSING, ENGINE), "int", "128",
        "Most stop words, bad words or bias words of a request.", low=0,
    ),
    Parameter(
        "max_word_bytes", "max_word_bytes", (PREPROCESSING, ENGINE), "int", "1024",
        "Most bytes of one such word, or of a cache_salt.", low=1,
    ),
    _engine("exclude_input_in_output", "bool", "false", "Leave the prompt out of non-streamed answers."),
    _engine(
        "include_stop_words_in_output", "bool", "true", "Text ends right after a stop word (true) or right before it."
    ),
    # The engine.
    _engine(
        "gpt_model_type", ("inflight_fused_batching", "inflight_batching", "V1", "v1"), "inflight_fused_batching",
        "Both in-flight words mean the same; V1 (static batching) is refused, not built yet.",
        placeholder="batching_strategy",
    ),
    _engine(
        "batch_scheduler_policy", ("guaranteed_no_evict", "max_utilization"), "guaranteed_no_evict",
        "Who may hold KV cache: only requests that can finish, or as many as fit now (some are paused later).",
    ),
    _engine("waiting_queue_policy", ("fcfs", "shortest_first"), "fcfs", "Order of waiting requests."),
    _engine("max_batch_size", "int", "32", "Most requests in a step; may exceed triton_max_batch_size.", low=1),
    _engine("max_num_tokens", "int", "chosen", "Most tokens in a step.", low=1),
    _engine("max_seq_len", "int", "the model's", "Most tokens of a request, prompt and output together.", low=2),
    _engine("max_queue_size", "int", "0", "Most waiting requests; 0 = no limit.", low=0),
    _engine("enable_chunked_context", "bool", "true", "Split long prompts over several steps."),
    _engine("chunk_unit_size", "int", "1", "Chunks are multiples of this many tokens.", low=1),
    _engine("tokens_per_block", "int", "32", "Tokens a block of the KV cache holds.", low=1),
    _engine("max_tokens_in_paged_kv_cache", "int", "from memory", "Size of the KV cache in tokens.", low=1),
    _engine(
        "kv_cache_free_gpu_mem_fraction", "float", "0.9", "Share of free GPU memory for the KV cache.", low=0, high=1
    ),
    _engine("enable_kv_cache_reuse", "bool", "true", "Reuse the KV cache for prompts with the same beginning."),
    _engine("dtype", ("auto", "float32", "bfloat16", "float16"), "auto", "Number format of weights and KV cache."),
    _engine("device", ("auto", "cpu", "cuda"), "auto", "Where the model runs."),
    _engine("attention_backend", "text", "auto", "Which attention implementation."),
    _engine("num_threads", "int", "0", "CPU threads of the engine; 0 = one a usable core.", low=0),
    # Limits and periods.
    _engine("default_deadline_ms", "int", "600000", "Longest time of a request that names none; 0 = no limit.", low=0),
    _engine("default_queue_timeout_ms", "int", "0", "Longest wait before a request runs; 0 = no limit.", low=0),
    Parameter(
        "reject_unknown_parameters", "reject_unknown_parameters", (PREPROCESSING, ENGINE, BLS), "bool", "false",
        "Refuse request parameters that are not known instead of ignoring them.",
    ),
    Parameter(
        "cancellation_check_period_ms", "cancellation_check_period_ms", (ENGINE, BLS), "int", "100",
        "How often clients are asked whether they are still there.", low=1,
    ),
    _engine("stats_check_period_ms", "int", "100", "How often the metrics are refreshed.", low=1),
    _engine("debug_step_delay_ms", "float", "0", "For tests: every step takes at least this long.", low=0),
    _engine("debug_fail_on_tokens", "ids", "unset", "For tests: a step with exactly these tokens fails."),
    # The BLS.
    Parameter("accumulate_tokens", "accumulate_tokens", (BLS,), "bool", "false", "Stream the whole text each time."),
    Parameter(
        "tensorrt_llm_model_name", "tensorrt_llm_model_name", (BLS,), "text", "tensorrt_llm", "The engine model."
    ),
    Parameter(
        "bls_max_concurrency", "bls_max_concurrency", (BLS,), "int", "128",
        "Requests a BLS process works on at once; as many again may wait, more are refused.", low=1,
    ),
    # Accepted without effect.
    _old("executor_worker_path", "There is no worker executable."),
    _old("worker_path", "Old spelling of executor_worker_path."),
    _old("FORCE_CPU_ONLY_INPUT_TENSORS", "Inputs are read on the CPU in any case."),
    _old("tokenizer_type", "The tokenizer's folder says what it is.", (PREPROCESSING, POSTPROCESSING)),
    _other("multi_block_mode", "A choice of the attention kernel.", Status.NO_EFFECT),
    _other("enable_context_fmha_fp32_acc", "Sums are in float32 in any case.", Status.NO_EFFECT),
    _other("enable_trt_overlap", "Belongs to another runtime.", Status.NO_EFFECT),
    _other("gpu_weights_percent", "Weights are not streamed.", Status.NO_EFFECT),
    _other("xgrammar_tokenizer_info_path", "The tokenizer itself suffices.", Status.NO_EFFECT),
    _other("recv_poll_period_ms", "There is no process to poll.", Status.NO_EFFECT),
    _other("iter_stats_max_iterations", "The last 1000 iterations are kept.", Status.NO_EFFECT),
    _other("request_stats_max_iterations", "Statistics are kept per iteration.", Status.NO_EFFECT),
    _other("kv_cache_onboard_blocks", "There is no host tier.", Status.NO_EFFECT),
    _other("normalize_log_probs", "Applies to beam widths over 1 only.", Status.NO_EFFECT),
    _other("lora_cache_optimal_adapter_size", "Page sizes of another runtime.", Status.NO_EFFECT),
    _other("lora_cache_max_adapter_size", "Page sizes of another runtime.", Status.NO_EFFECT),
    _other("logits_datatype", "No logits are returned yet.", Status.NO_EFFECT, (ENGINE, BLS, ENSEMBLE)),
    _other("encoder_input_features_data_type", "There are no encoders yet.", Status.NO_EFFECT),
    _other(
        "prompt_embedding_table_data_type", "No embedding tables yet.", Status.NO_EFFECT, (ENGINE, BLS, ENSEMBLE)
    ),
    # Accepted and told: the feature comes later.
    _other("max_beam_width", "Beam search; requests above 1 are refused.", Status.NOT_BUILT),
    _other("decoding_mode", "Only plain sampling.", Status.NOT_BUILT),
    _other("max_attention_window_size", "A window of attention.", Status.NOT_BUILT),
    _other("sink_token_length", "Attention sinks.", Status.NOT_BUILT),
    _other("cross_kv_cache_fraction", "Encoder-decoder models.", Status.NOT_BUILT),
    _other("encoder_model_path", "Encoder-decoder models.", Status.NOT_BUILT, placeholder="encoder_engine_dir"),
    _other("kv_cache_host_memory_bytes", "KV cache in host memory.", Status.NOT_BUILT),
    _other("gpu_device_ids", "Several GPUs.", Status.NOT_BUILT),
    _other("participant_ids", "Several processes.", Status.NOT_BUILT),
    _other("num_nodes", "Several machines.", Status.NOT_BUILT),
    _other("cuda_graph_mode", "CUDA graphs.", Status.NOT_BUILT),
    _other("cuda_graph_cache_size", "CUDA graphs.", Status.NOT_BUILT),
    _other("lora_cache_gpu_memory_fraction", "LoRA adapters.", Status.NOT_BUILT),
    _other("lora_cache_host_memory_bytes", "LoRA adapters.", Status.NOT_BUILT),
    _other("lora_prefetch_dir", "LoRA adapters.", Status.NOT_BUILT),
    _other("lookahead_window_size", "Lookahead decoding.", Status.NOT_BUILT),
    _other("lookahead_ngram_size", "Lookahead decoding.", Status.NOT_BUILT),
    _other("lookahead_verification_set_size", "Lookahead decoding.", Status.NOT_BUILT),
    _other("medusa_choices", "Medusa decoding.", Status.NOT_BUILT),
    _other("eagle_choices", "EAGLE decoding.", Status.NOT_BUILT),
    _other("speculative_decoding_fast_logits", "Speculative decoding.", Status.NOT_BUILT),
    _other("guided_decoding_backend", "Guided decoding.", Status.NOT_BUILT),
    _other("multimodal_model_path", "Images and video.", Status.NOT_BUILT, (PREPROCESSING,)),
    _other("hf_model_path", "Images and video.", Status.NOT_BUILT, (PREPROCESSING,)),
    _other("max_num_images", "Images and video.", Status.NOT_BUILT, (PREPROCESSING,)),
    _other("tensorrt_llm_draft_model_name", "Speculative decoding.", Status.NOT_BUILT, (BLS,)),
    _other("multimodal_encoders_name", "Images and video.", Status.NOT_BUILT, (BLS,)),
)  # fmt: skip


def parameters_of(model: str) -> tuple[Parameter, ...]:
    """The parameters that a model's config may hold, placeholders of its own fields left out."""
    return tuple(p for p in PARAMETERS if model in p.models and p.key != SHAPE)
