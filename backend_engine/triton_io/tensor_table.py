"""The one list of tensors: name, type, dims and meaning of every input and output of every model, and the wiring.

Parsing, responses, the config.pbtxt templates and docs/tensors.md (written by ``scripts/write_contract.py``, checked
by a test) and the BLS all read it. Scalars come from ``option_table``, what is declared but not built from
``feature_table``. Holds data only.
"""

from backend_engine.triton_io.feature_table import FEATURES
from backend_engine.triton_io.option_table import OPTIONS, SHARED_PARAMETERS, spellings
from backend_engine.triton_io.tensor_rows import (
    BLS,
    BOOL,
    ENGINE,
    ENSEMBLE,
    FP16,
    FP32,
    INT32,
    INT64,
    LOGITS,
    POSTPROCESSING,
    PREPROCESSING,
    STRING,
    UINT8,
    UINT64,
    ModelTensors,
    Option,
    TensorRow,
    optional,
    ragged,
    required,
)

__all__ = [
    "BLS", "BOOL", "ENGINE", "ENSEMBLE", "FP32", "INT32", "LOGITS", "OPTIONS", "POSTPROCESSING", "PREPROCESSING",
    "SHARED_PARAMETERS", "STRING", "UINT64", "ModelTensors", "Option", "TensorRow", "spellings",
]  # fmt: skip

_TOKEN_LISTS = (
    ragged("embedding_bias", FP32, (-1,), "Added to the logits: one value a token id, or none."),
    ragged("stop_words_list", INT32, (2, -1), "Stop words as ids and end offsets."),
    ragged("bad_words_list", INT32, (2, -1), "Forbidden words as ids and end offsets."),
    ragged("stop_words_text", STRING, (-1,), "Stop words as text (from preprocessing); replaces the list."),
    ragged("stop_token_ids", INT32, (-1,), "Further end ids (from preprocessing)."),
)
_TEXT_LISTS = (
    optional("messages", STRING, (1,), "A chat as JSON, in place of text_input, which is then empty."),
    optional("bad_words", STRING, (-1,), "Words that must not appear."),
    optional("stop_words", STRING, (-1,), "Words that end the text."),
    optional("embedding_bias_words", STRING, (-1,), "Words whose tokens get a bias."),
    optional("embedding_bias_weights", FP32, (-1,), "One bias a word."),
)
# What return_perf_metrics asks for; with the last response of a sequence.
PERF_ROWS = (
    required("kv_cache_alloc_new_blocks", INT32, (1,), "KV cache blocks that were newly taken."),
    required("kv_cache_reused_blocks", INT32, (1,), "Blocks that were found in the cache."),
    required("kv_cache_alloc_total_blocks", INT32, (1,), "Blocks that were allocated in all."),
    required("arrival_time_ns", INT64, (1,), "When the request came; steady clock."),
    required("first_scheduled_time_ns", INT64, (1,), "When it first ran."),
    required("first_token_time_ns", INT64, (1,), "When its first token was there."),
    required("last_token_time_ns", INT64, (1,), "When its last token was there."),
    required("acceptance_rate", FP32, (1,), "Of draft tokens; 0 without speculative decoding."),
    required("total_accepted_draft_tokens", INT32, (1,), "0 without speculative decoding."),
    required("total_draft_tokens", INT32, (1,), "0 without speculative decoding."),
)
_RESULTS = (
    required("cum_log_probs", FP32, (-1,), "Sum of the log probabilities so far [1, 1]."),
    required("output_log_probs", FP32, (-1, -1), "Log probability of each new token [1, 1, n]."),
    required("context_logits", LOGITS, (-1, -1), "Logits of the prompt's tokens [1, n, vocabulary]."),
    required("generation_logits", LOGITS, (-1, -1, -1), "Logits of the new tokens [1, 1, n, vocabulary]."),
    required("batch_index", INT32, (1,), "Row of the request's batch; only when it has several."),
    required("sequence_index", INT32, (1,), "Which answer; only when num_return_sequences is above 1."),
)
_OUR_RESULTS = (
    required("finish_reason", STRING, (-1,), "stop, length, cancelled, timeout or error; with the last response."),
    required("stop_reason", STRING, (-1,), "The stop word, empty for an end id; with the last response."),
    required("num_input_tokens", INT32, (1,), "Tokens of the prompt."),
    required("num_output_tokens", INT32, (1,), "Token ids in this response."),
)
_BLS_RESHAPED = frozenset(
    {"return_log_probs", "return_context_logits", "return_generation_logits", "num_return_sequences",
     "return_perf_metrics", "lora_task_id"}
)  # fmt: skip


def _token_options() -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(option.token_name, option.dtype, (1,), option.doc, option.optional, reshape=True)
        for option in OPTIONS
        if option.token_name is not None
    )


def _text_options() -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(option.text_name, option.dtype, (1,), option.doc, option.optional)
        for option in OPTIONS
        if option.text_name is not None
    )


def _text_model(*more: TensorRow) -> ModelTensors:
    features = (row for feature in FEATURES for row in feature.text)
    return ModelTensors(
        inputs=(required("text_input", STRING, (1,), "The prompt."), *_text_options(), *_TEXT_LISTS, *features, *more),
        outputs=(
            required("text_output", STRING, (-1,), "The text, or its next piece when streaming."),
            *_RESULTS,
            *PERF_ROWS,
            *_OUR_RESULTS,
        ),
    )


def _bls() -> ModelTensors:
    model = _text_model(*(row for feature in FEATURES for row in feature.bls_only))
    inputs = tuple(row._replace(reshape=True) if row.name in _BLS_RESHAPED else row for row in model.inputs)
    return ModelTensors(inputs, model.outputs)


def _ensemble() -> ModelTensors:
    model = _text_model()
    return ModelTensors(tuple(row._replace(reshape=False) for row in model.inputs), model.outputs)


_PREPROCESSING = ModelTensors(
    inputs=(
        required("QUERY", STRING, (1,), "The prompt."),
        required("REQUEST_OUTPUT_LEN", INT32, (1,), "Passed on."),
        optional("MESSAGES", STRING, (1,), "A chat as JSON, in place of QUERY, which is then empty."),
        optional("BAD_WORDS_DICT", STRING, (-1,), "Words that must not appear."),
        optional("STOP_WORDS_DICT", STRING, (-1,), "Words that end the text."),
        optional("EMBEDDING_BIAS_WORDS", STRING, (-1,), "Words whose tokens get a bias."),
        optional("EMBEDDING_BIAS_WEIGHTS", FP32, (-1,), "One bias a word."),
        optional("END_ID", INT32, (1,), "Replaces the model's own end ids."),
        optional("PAD_ID", INT32, (1,), "Replaces the tokenizer's pad id."),
        optional("RETURN_ERRORS_IN_BAND", BOOL, (1,), "Answer errors in ERROR and ERROR_CODE (the BLS asks)."),
        *(row for feature in FEATURES for row in feature.preprocessing),
    ),
    outputs=(
        required("INPUT_ID", INT32, (-1,), "Token ids, padded on the right."),
        required("REQUEST_INPUT_LEN", INT32, (1,), "Their true number."),
        required("DECODER_INPUT_ID", INT32, (-1,), "The pad id: there is no decoder prompt."),
        required("REQUEST_DECODER_INPUT_LEN", INT32, (1,), "1."),
        required("BAD_WORDS_IDS", INT32, (2, -1), "Forbidden words as ids and end offsets."),
        required("STOP_WORDS_IDS", INT32, (2, -1), "Stop words as ids and end offsets."),
        required("EMBEDDING_BIAS", FP32, (-1,), "One value a token id, or none."),
        required("REQUEST_OUTPUT_LEN", INT32, (-1,), "As received."),
        required("OUT_END_ID", INT32, (1,), "The end id in force."),
        required("OUT_PAD_ID", INT32, (1,), "The pad id in force."),
        required("OUT_PROMPT_TABLE_EXTRA_IDS", UINT64, (-1,), "Empty: there are no embedding tables."),
        required("PIXEL_VALUES", FP16, (-1, -1, -1, -1), "Never sent: no images yet."),
        required("ASPECT_RATIO_IDS", INT64, (-1,), "Never sent: no images yet."),
        required("ASPECT_RATIO_MASK", INT64, (-1, -1), "Never sent: no images yet."),
        required("CROSS_ATTENTION_MASK", INT64, (-1, -1, -1), "Never sent: no images yet."),
        required("IMAGE_SIZES", INT64, (-1, 2), "Never sent: no images yet."),
        required("IS_VIDEO_INPUT", BOOL, (1,), "Never sent: no video yet."),
        required("ATTENTION_MASK", INT64, (-1,), "Never sent: no images yet."),
        required("IMAGE_GRID_THW", INT64, (3,), "Never sent: no images yet."),
        required("VISION_INPUT_ID", INT32, (-1,), "Never sent: no images yet."),
        required("STOP_WORDS_TEXT", STRING, (-1,), "The stop words themselves, when there are any."),
        required("STOP_TOKEN_IDS", INT32, (-1,), "All end ids of the model, when the request named none."),
        required("DETOKENIZE", BOOL, (1,), "Always true: the engine shall make the text."),
        required("ERRORS_IN_BAND", BOOL, (1,), "Always true: the engine's errors shall come as tensors."),
        required("ERROR", STRING, (1,), "What was wrong with the request, when asked for."),
        required("ERROR_CODE", STRING, (1,), "The class of that error."),
    ),
)
_ENGINE = ModelTensors(
    inputs=(
        ragged("input_ids", INT32, (-1,), "The prompt's token ids."),
        TensorRow("input_lengths", INT32, (1,), "How many of them count.", reshape=True),
        *_token_options(),
        *_TOKEN_LISTS,
        *(row for feature in FEATURES for row in feature.engine),
    ),
    outputs=(
        required("output_ids", INT32, (-1, -1), "New token ids [1, 1, n]; with the prompt unless excluded."),
        required("sequence_length", INT32, (-1,), "Number of output_ids [1, 1]."),
        *_RESULTS,
        required("context_phase_params", UINT8, (-1,), "Never sent: no disaggregated serving yet."),
        *PERF_ROWS,
        *_OUR_RESULTS,
        required("text_output", STRING, (-1,), "The text of this response, when detokenize asks for it."),
        required("error", STRING, (1,), "An error of the engine, when return_errors_in_band asks for it."),
        required("error_code", STRING, (1,), "The class of that error."),
        required("more", BOOL, (1,), "Whether further pieces follow, when answering piecewise."),
        required("pieces", STRING, (1,), "The next pieces of a piece_group, as JSON."),
    ),
)
_POSTPROCESSING = ModelTensors(
    inputs=(
        required("TOKENS_BATCH", INT32, (-1, -1), "Token ids [batch, beams, n]."),
        required("SEQUENCE_LENGTH", INT32, (-1,), "How many of each count [batch, beams]."),
        optional("TEXT", STRING, (-1,), "The text, when the engine made it."),
        optional("ERROR", STRING, (1,), "The engine's error; it becomes the answer."),
        optional("ERROR_CODE", STRING, (1,), "The class of that error."),
    ),
    outputs=(required("OUTPUT", STRING, (-1,), "One text a beam, flat."),),
)

MODELS: dict[str, ModelTensors] = {
    PREPROCESSING: _PREPROCESSING,
    ENGINE: _ENGINE,
    POSTPROCESSING: _POSTPROCESSING,
    BLS: _bls(),
    ENSEMBLE: _ensemble(),
}

# What preprocessing says -> the input of the engine model that takes it (the ensemble's wiring, and the BLS's).
ENGINE_FROM_PREPROCESSING: dict[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "EMBEDDING_BIAS": "embedding_bias",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
    "STOP_WORDS_TEXT": "stop_words_text",
    "STOP_TOKEN_IDS": "stop_token_ids",
    "DETOKENIZE": "detokenize",
    "ERRORS_IN_BAND": "return_errors_in_band",
}
# Outputs of the engine model -> the input of postprocessing that takes them.
POSTPROCESSING_FROM_ENGINE: dict[str, str] = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "text_output": "TEXT",
    "error": "ERROR",
    "error_code": "ERROR_CODE",
}
# Inputs of the text models -> the input of preprocessing that takes them.
PREPROCESSING_FROM_TEXT: dict[str, str] = {
    "text_input": "QUERY",
    "messages": "MESSAGES",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "image_bytes_input": "IMAGE_BYTES",
    "image_url_input": "IMAGE_URL",
    "video_bytes_input": "VIDEO_BYTES",
}


def engine_from_text() -> dict[str, str]:
    """Inputs of the text models that go to the engine model as they are -> its name for them."""
    engine = {row.name for row in MODELS[ENGINE].inputs}
    names = {option.text_name: option.token_name for option in OPTIONS if option.text_name and option.token_name}
    names |= {row.name: row.name for feature in FEATURES for row in feature.text if row.name in engine}
    return {text: token for text, token in names.items() if text not in PREPROCESSING_FROM_TEXT}


def input_names(model: str) -> tuple[str, ...]:
    """Names of a model's inputs, in order."""
    return tuple(row.name for row in MODELS[model].inputs)
