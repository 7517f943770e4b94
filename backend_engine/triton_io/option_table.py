"""The scalars of a request: each field once, with what the token model and the text models call it. Data only."""

from backend_engine.triton_io.tensor_rows import BOOL, FP32, INT32, STRING, UINT64, Option, shared

OPTIONS: tuple[Option, ...] = (
    Option("max_tokens", "request_output_len", "max_tokens", INT32, "Most new tokens, at least 1.", optional=False),
    shared("num_return_sequences", INT32, "Number of answers to each prompt; more than 1 needs a decoupled model."),
    shared("end_id", INT32, "Token that ends the text; -1 = none. Text models: absent = the model's own."),
    shared("pad_id", INT32, "Padding token."),
    shared("beam_width", INT32, "Width of beam search; only 1 for now."),
    shared("temperature", FP32, "0 = greedy; above 0 samples."),
    Option("top_k", "runtime_top_k", "top_k", INT32, "Keep the k likeliest tokens; 0 = all, 1 = greedy."),
    Option("top_p", "runtime_top_p", "top_p", FP32, "Keep the likeliest tokens that reach p; 0 or less = all."),
    Option(
        "top_p_min", "runtime_top_p_min", None, FP32, "A decaying top_p does not fall below this.",
    ),
    Option("top_p_decay", "runtime_top_p_decay", None, FP32, "Factor of top_p with each new token; 1 = it stays."),
    Option("top_p_reset_ids", "runtime_top_p_reset_ids", None, INT32, "Token that sets top_p back; -1 = none."),
    shared("min_p", FP32, "Drop tokens less likely than min_p times the likeliest.", as_parameter=True),
    Option("length_penalty", "len_penalty", "length_penalty", FP32, "For beam search; no effect without it."),
    Option("early_stopping", "early_stopping", None, BOOL, "For beam search; no effect without it."),
    Option(
        "beam_search_diversity_rate", "beam_search_diversity_rate", None, FP32,
        "For beam search; no effect without it.",
    ),
    shared("repetition_penalty", FP32, "Above 0; 1 = off."),
    shared("min_tokens", INT32, "New tokens before which nothing ends the text.", name="min_length"),
    shared("min_tokens", INT32, "Newer spelling of min_length."),
    shared("presence_penalty", FP32, "Subtracted once for a token that was generated."),
    shared("frequency_penalty", FP32, "Subtracted for each time a token was generated."),
    shared("seed", UINT64, "Equal seeds give equal texts; absent = a fresh one.", name="random_seed"),
    shared("seed", UINT64, "Newer spelling of random_seed."),
    shared("return_log_probs", BOOL, "Ask for cum_log_probs and output_log_probs."),
    shared("return_context_logits", BOOL, "Ask for context_logits; the prompt's cached beginning is not reused then."),
    shared("return_generation_logits", BOOL, "Ask for generation_logits."),
    shared("return_perf_metrics", BOOL, "Ask for the kv_cache_*, *_time_ns and acceptance tensors."),
    shared("return_perf_metrics", BOOL, "Older spelling of return_perf_metrics.", name="return_kv_cache_reuse_stats"),
    shared("exclude_input_in_output", BOOL, "Leave the prompt out of a non-streamed answer."),
    Option("streaming", "streaming", "stream", BOOL, "Answer piece by piece; needs a decoupled model."),
    Option("stop", "stop", None, BOOL, "End the running request that has the same request id."),
    shared(
        "include_stop_words_in_output", BOOL, "Text ends after the stop word (true) or before it.", as_parameter=True
    ),
    shared("return_finish_reason", BOOL, "Ask for finish_reason.", as_parameter=True),
    shared("return_stop_reason", BOOL, "Ask for stop_reason.", as_parameter=True),
    shared("return_num_input_tokens", BOOL, "Ask for num_input_tokens."),
    shared("return_num_output_tokens", BOOL, "Ask for num_output_tokens."),
    shared(
        "priority", INT32, "1 = most urgent, up to 100; 0 or absent = the middle.", as_parameter=True
    ),
    shared(
        "queue_timeout_ms", INT32, "Longest wait before the request runs; 0 = the model's default.", as_parameter=True
    ),
    shared("deadline_ms", INT32, "Longest time in all; 0 = the model's default.", as_parameter=True),
    shared(
        "logits_processors", STRING, "Processors of plugins, a JSON object: for each name an object of arguments.",
        as_parameter=True,
    ),
    shared("cache_salt", STRING, "Requests share cached prefixes only under equal salts.", as_parameter=True),
    Option("return_errors_in_band", "return_errors_in_band", None, BOOL, "Send errors in the tensor error."),
    Option("piecewise", "piecewise", None, BOOL, "Answer with one piece; the next ones are asked for (the BLS does)."),
    Option(
        "next_piece", "next_piece", None, BOOL, "Ask for the next piece of the request that has the same request id."
    ),
    Option(
        "piece_group", "piece_group", None, STRING,
        "Hand out further pieces together with those of other requests of this group: next_piece under its id.",
    ),
    Option("detokenize", "detokenize", None, BOOL, "Make the text in text_output (set by preprocessing)."),
)  # fmt: skip

SHARED_PARAMETERS: frozenset[str] = frozenset(option.field for option in OPTIONS if option.as_parameter)


def spellings(field: str, *, text_model: bool) -> tuple[str, ...]:
    """The inputs that carry ``field``, main spelling first; what one kind of model lacks, by the other's name."""
    options = [option for option in OPTIONS if option.field == field]
    names = [(o.text_name or o.token_name) if text_model else (o.token_name or o.text_name) for o in options]
    return tuple(name for name in names if name is not None)
