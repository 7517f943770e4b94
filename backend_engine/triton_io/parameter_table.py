"""The one list of model parameters: config key, template placeholder, models, kind, default and what it does.

``parameters.py`` reads values by it, ``docs/parameters.md`` and the templates are checked against it. Data only.
"""

from enum import StrEnum
from typing import NamedTuple

from backend_engine.triton_io.tensor_rows import BLS, ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING

Value = bool | int | float | str | None
ALL = (PREPROCESSING, ENGINE, POSTPROCESSING, BLS, ENSEMBLE)
SHAPE = "(config)"


class Status(StrEnum):
    """What a value does.

    ``built`` = it counts. ``no effect`` = accepted and named once in the log, for the reason that ``help`` gives.
    ``not built yet`` = a value that asks for the feature fails the load; ``neutral`` ones do not.
    """

    BUILT = "built"
    NO_EFFECT = "no effect"
    NOT_BUILT = "not built yet"


class Parameter(NamedTuple):
    """One parameter. ``key`` is ``SHAPE`` for placeholders that stand in the config's own fields.

    ``placeholder`` is empty for keys of other generations of fill lines and configs, which our templates only name.
    ``kind``: path, text, int, ints, float, bool, ids or a tuple of allowed words. ``low`` and ``high`` bound numbers.
    ``default`` is text for the documentation; the readers own the values. ``neutral``: lower-case values of a feature
    that is not built which do not ask for it.
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
    neutral: tuple[str, ...] = ()

    @property
    def is_field(self) -> bool:
        """True for a placeholder of the config's own fields."""
        return self.key == SHAPE


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


def _unused(key: str, help: str, models: tuple[str, ...] = (ENGINE,)) -> Parameter:
    return Parameter(key, key, models, "text", "unset", help, Status.NO_EFFECT)


def _unbuilt(
    key: str, help: str, neutral: tuple[str, ...] = (), *, models: tuple[str, ...] = (ENGINE,), placeholder: str = ""
) -> Parameter:
    return Parameter(key, placeholder or key, models, "text", "unset", help, Status.NOT_BUILT, neutral=neutral)


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
    Parameter(
        SHAPE, "logits_datatype", (ENGINE, BLS, ENSEMBLE), ("TYPE_FP32", "TYPE_FP16"), "required", "Type of all logits."
    ),
    Parameter(
        SHAPE, "encoder_input_features_data_type", (ENGINE,), ("TYPE_FP16", "TYPE_BF16", "TYPE_FP32"), "required",
        "Type of encoder_input_features.",
    ),
    Parameter(SHAPE, "triton_backend", (ENGINE,), ("python", "tensorrtllm"), "required", "Name of the backend."),
    # Where things are.
    _engine(
        "gpt_model_path", "path", "required",
        "The model: a checkpoint in any format (checkpoints.md), or its id on the Hugging Face Hub.",
        placeholder="engine_dir",
    ),
    Parameter(
        "gpt_model_path", "engine_dir", (PREPROCESSING,), "path", "tokenizer_dir",
        "The model, whose configuration gives the vocabulary size and the end ids.",
    ),
    Parameter(
        "tokenizer_dir", "tokenizer_dir", (PREPROCESSING, POSTPROCESSING), "path", "required",
        "Its folder, or a GGUF file.",
    ),
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
    Parameter("max_messages", "max_messages", (PREPROCESSING,), "int", "1024", "Most messages of a chat.", low=1),
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
        "Both in-flight words mean the same; V1 is static batching: a batch runs to its end before the next begins.",
        placeholder="batching_strategy",
    ),
    _engine(
        "batch_scheduler_policy", ("guaranteed_no_evict", "max_utilization", "static_batch"), "guaranteed_no_evict",
        "Who may hold KV cache: only requests that can finish, as many as fit now (some are paused later), or one "
        "batch after the other.",
    ),
    _engine(
        "waiting_queue_policy", ("priority", "fcfs", "shortest_first"), "priority",
        "Order of waiting requests; equal priorities are served as they come.",
    ),
    _engine("max_batch_size", "int", "32", "Most requests in a step; may exceed triton_max_batch_size.", low=1),
    _engine("max_num_tokens", "int", "chosen", "Most tokens in a step.", low=1),
    _engine("max_seq_len", "int", "the model's", "Most tokens of a request, prompt and output together.", low=2),
    _engine("max_queue_size", "int", "0", "Most waiting requests; 0 = no limit.", low=0),
    _engine("enable_chunked_context", "bool", "true", "Split long prompts over several steps."),
    _engine("chunk_unit_size", "int", "1", "Chunks are multiples of this many tokens.", low=1),
    _engine(
        "context_chunking_policy", ("first_come_first_served", "equal_progress"), "first_come_first_served",
        "Which long prompts a step's tokens go to: the oldest, or all alike.",
    ),
    _engine(
        "context_cost_tokens", "int", "chosen",
        "Tokens before a prompt's token that make it take twice as long. Beside requests that generate, chunks late in "
        "a prompt get smaller by it, to a quarter at most; 0 = all chunks alike.", low=0,
    ),
    _engine(
        "kv_cache_layout", ("paged", "contiguous"), "paged",
        "Blocks of tokens_per_block tokens, or one run of max_seq_len tokens a request (without reuse).",
    ),
    _engine("tokens_per_block", "int", "chosen", "Tokens a block of the KV cache holds.", low=1),
    _engine("max_tokens_in_paged_kv_cache", "int", "from memory", "Size of the KV cache in tokens.", low=1),
    _engine(
        "kv_cache_free_gpu_mem_fraction", "float", "0.9", "Share of free GPU memory for the KV cache.", low=0, high=1
    ),
    _engine("enable_kv_cache_reuse", "bool", "true", "Reuse the KV cache for prompts with the same beginning."),
    _engine(
        "max_attention_window_size", "ints", "the model's",
        "Most recent tokens a layer sees: one value a layer, separated by commas, repeated over the layers.", low=1,
    ),
    _engine(
        "kv_cache_dtype", ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e5m2", "int8"), "auto",
        "Number format of the KV cache; auto: the one that the checkpoint was made for, else that of the weights. fp8 "
        "(E4M3), fp8_e5m2 and int8 hold about four times as many tokens as float32, with rounding.",
    ),
    _engine("max_beam_width", "int", "1", "Requests above it are refused; so are beams over 1, not built yet.", low=1),
    _engine("dtype", ("auto", "float32", "bfloat16", "float16"), "auto", "Number format of weights and computation."),
    _engine("device", ("auto", "cpu", "cuda"), "auto", "Where the model runs."),
    _engine("attention_backend", "text", "auto", "Which attention implementation."),
    _engine(
        "operators", "text", "auto",
        "What the layers compute with: native (C, compiled on this machine; auto on a CPU), torch, or a plugin's by "
        "its name.",
    ),
    _engine(
        "weight_only_precision", ("auto", "float16", "bfloat16", "int16", "int8", "w8a8"), "auto",
        "Form in which weights that the checkpoint has plain stay in a CPU's memory; auto: that of dtype. Floats are "
        "computed with in float32, integers in integers: int16 (a scale for 64 numbers of a row) costs about what "
        "float16 does and is faster, int8 has a scale for each row, w8a8 is int8 with tokens of 7 bits, too: the "
        "fastest of all.",
    ),
    _engine(
        "batch_invariant", "bool", "where it can be had",
        "Whether logits must have the same bits whatever other requests are computed with them; true refuses to start "
        "where that cannot be had.",
    ),
    _engine(
        "record_layers", "bool", "true",
        "Whether the operations of all layers are recorded at start and run as one call (native operators on a CPU).",
    ),
    _engine(
        "plugins", "text", "ENGINE_PLUGINS",
        "Plugins besides those of installed packages: modules, .py files and package folders, separated by commas; "
        "none leaves the installed ones out. What a path names is run: see plugins.md.",
    ),
    _engine(
        "model_backend", ("auto", "native", "transformers"), "auto",
        "Whose modules the model is made of: the engine's own (native), transformers', or native where it has the "
        "architecture.",
    ),
    _engine(
        "generation_config", ("ignore", "model"), "ignore",
        "model: requests that leave temperature, top_k, top_p, min_p or repetition_penalty unset take the values of "
        "the model's generation_config.json, whose end ids count in any case.",
    ),
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
    _engine("iter_stats_max_iterations", "int", "1000", "Iterations whose statistics are kept.", low=0),
    _engine("step_timeout_ms", "int", "0", "A longer step counts as stuck; 0 = chosen from the model's size.", low=0),
    _engine(
        "max_logits_bytes", "int", "67108864",
        "Most bytes of context and generation logits together that a request may ask for.", low=0,
    ),
    Parameter(
        "max_sequences", "max_sequences", (PREPROCESSING, ENGINE), "int", "64",
        "Most rows of a request, and rows times num_return_sequences.", low=1,
    ),
    _engine("debug_step_delay_ms", "float", "0", "For tests: every step takes at least this long.", low=0),
    _engine("debug_fail_on_tokens", "ids", "unset", "For tests: a step with exactly these tokens fails."),
    _engine("debug_hang_on_tokens", "ids", "unset", "For tests: a step with exactly these tokens never returns."),
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
    _old(
        "prompt_embedding_table_data_type", "There are no embedding tables yet; their input is declared TYPE_FP16.",
        (ENGINE, BLS, ENSEMBLE),
    ),
    _old("tokenizer_type", "The tokenizer's folder says what it is.", (PREPROCESSING, POSTPROCESSING)),
    _unused("multi_block_mode", "A choice of the attention kernel, which we make."),
    _unused("enable_context_fmha_fp32_acc", "Sums are in float32 in any case."),
    _unused("enable_trt_overlap", "Belongs to another runtime."),
    _unused("gpu_weights_percent", "Weights are not streamed."),
    _unused("xgrammar_tokenizer_info_path", "The tokenizer itself suffices."),
    _unused("recv_poll_period_ms", "There is no process to poll."),
    _unused("request_stats_max_iterations", "Statistics are kept per iteration."),
    _unused("kv_cache_host_memory_bytes", "The KV cache has no host tier yet; answers are the same without."),
    _unused("kv_cache_onboard_blocks", "The KV cache has no host tier yet."),
    _unused("cross_kv_cache_fraction", "Concerns encoder-decoder models."),
    _unused("normalize_log_probs", "Applies to beam widths over 1."),
    _unused("cuda_graph_mode", "There are no CUDA graphs yet; answers are the same without."),
    _unused("cuda_graph_cache_size", "There are no CUDA graphs yet."),
    _unused("gpu_device_ids", "The engine uses one device, the first that torch sees."),
    _unused("participant_ids", "The engine is one process."),
    _unused("num_nodes", "The engine is one process."),
    _unused("lora_cache_optimal_adapter_size", "No LoRA adapters yet; requests with one are refused."),
    _unused("lora_cache_max_adapter_size", "No LoRA adapters yet; requests with one are refused."),
    _unused("lora_cache_gpu_memory_fraction", "No LoRA adapters yet; requests with one are refused."),
    _unused("lora_cache_host_memory_bytes", "No LoRA adapters yet; requests with one are refused."),
    _unused("lora_prefetch_dir", "No LoRA adapters yet; requests with one are refused."),
    _unused("lookahead_window_size", "Counts with decoding_mode lookahead only."),
    _unused("lookahead_ngram_size", "Counts with decoding_mode lookahead only."),
    _unused("lookahead_verification_set_size", "Counts with decoding_mode lookahead only."),
    _unused("medusa_choices", "Counts with decoding_mode medusa only."),
    _unused("eagle_choices", "Counts with decoding_mode eagle only."),
    _unused("speculative_decoding_fast_logits", "No speculative decoding yet; requests for it are refused."),
    _unused("guided_decoding_backend", "No guided decoding yet; requests for it are refused."),
    _unused("multimodal_model_path", "No images and video yet; requests with them are refused.", (PREPROCESSING,)),
    _unused("hf_model_path", "No images and video yet; requests with them are refused.", (PREPROCESSING,)),
    _unused("max_num_images", "No images and video yet; requests with them are refused.", (PREPROCESSING,)),
    _unused("tensorrt_llm_draft_model_name", "No speculative decoding yet; requests for it are refused.", (BLS,)),
    _unused("multimodal_encoders_name", "No images and video yet; requests with them are refused.", (BLS,)),
    # Not built yet, and answers would differ without it.
    _unbuilt(
        "decoding_mode", "Speculative modes; plain sampling serves top_k, top_p, top_k_top_p and auto.",
        ("top_k", "top_p", "top_k_top_p", "auto", "beam_search"),
    ),
    _unbuilt("sink_token_length", "Attention sinks (StreamingLLM); 0 = none.", ("0",)),
    _unbuilt("encoder_model_path", "Encoder-decoder models.", placeholder="encoder_engine_dir"),
)  # fmt: skip


def parameters_of(model: str) -> tuple[Parameter, ...]:
    """The parameters that a model's config may hold, placeholders of its own fields left out."""
    return tuple(p for p in PARAMETERS if model in p.models and p.key != SHAPE)
