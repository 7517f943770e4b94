"""The one list of tensors: name, type, dims and meaning of every input and output of every model.

Parsing, responses, the config.pbtxt templates (checked by a test) and the BLS all read it. A field that the token
model and the text models spell differently is one ``Option`` with both names. Holds data only.
"""

from typing import NamedTuple

PREPROCESSING = "preprocessing"
ENGINE = "tensorrt_llm"
POSTPROCESSING = "postprocessing"
BLS = "tensorrt_llm_bls"
ENSEMBLE = "ensemble"

BOOL, INT32, UINT64, FP32, STRING = "TYPE_BOOL", "TYPE_INT32", "TYPE_UINT64", "TYPE_FP32", "TYPE_STRING"


class TensorRow(NamedTuple):
    """One tensor of one model. ``dims`` leave the batch dimension out; ``reshape``: declared [1], seen as a scalar."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    doc: str
    optional: bool = False
    ragged: bool = False
    reshape: bool = False


class ModelTensors(NamedTuple):
    """Inputs and outputs of one model, in the order in which its config lists them."""

    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]


class Option(NamedTuple):
    """One scalar of a request.

    ``field`` is our name for it, ``token_name`` its input on the engine model and ``text_name`` on the BLS and the
    ensemble; ``None`` = not an input there. ``as_parameter``: may be sent as a request parameter too.
    """

    field: str
    token_name: str | None
    text_name: str | None
    dtype: str
    doc: str
    optional: bool = True
    as_parameter: bool = False


def _same(field: str, dtype: str, doc: str, *, name: str | None = None, as_parameter: bool = False) -> Option:
    return Option(field, name or field, name or field, dtype, doc, as_parameter=as_parameter)


OPTIONS: tuple[Option, ...] = (
    Option("max_tokens", "request_output_len", "max_tokens", INT32, "Most new tokens, at least 1.", optional=False),
    _same("num_return_sequences", INT32, "Number of answers; only 1 for now."),
    _same("end_id", INT32, "Token that ends the text; -1 = none. Text models: absent = the model's own."),
    _same("pad_id", INT32, "Padding token."),
    _same("beam_width", INT32, "Width of beam search; only 1 for now."),
    _same("temperature", FP32, "0 = greedy; above 0 samples."),
    Option("top_k", "runtime_top_k", "top_k", INT32, "Keep the k likeliest tokens; 0 = all, 1 = greedy."),
    Option("top_p", "runtime_top_p", "top_p", FP32, "Keep the likeliest tokens that reach p; 0 or less = all."),
    _same("min_p", FP32, "Drop tokens less likely than min_p times the likeliest.", as_parameter=True),
    Option("length_penalty", "len_penalty", "length_penalty", FP32, "For beam search; no effect without it."),
    _same("repetition_penalty", FP32, "Above 0; 1 = off."),
    _same("min_tokens", INT32, "New tokens before which nothing ends the text.", name="min_length"),
    _same("min_tokens", INT32, "Newer spelling of min_length."),
    _same("presence_penalty", FP32, "Subtracted once for a token that was generated."),
    _same("frequency_penalty", FP32, "Subtracted for each time a token was generated."),
    _same("seed", UINT64, "Equal seeds give equal texts; absent = a fresh one.", name="random_seed"),
    _same("seed", UINT64, "Newer spelling of random_seed."),
    _same("return_log_probs", BOOL, "Ask for cum_log_probs and output_log_probs."),
    _same("return_context_logits", BOOL, "Not supported yet: true is refused."),
    _same("return_generation_logits", BOOL, "Not supported yet: true is refused."),
    _same("return_perf_metrics", BOOL, "Not supported yet: true is refused."),
    _same("exclude_input_in_output", BOOL, "Leave the prompt out of a non-streamed answer."),
    Option("streaming", "streaming", "stream", BOOL, "Answer piece by piece; needs a decoupled model."),
    Option("stop", "stop", None, BOOL, "End the running request that has the same request id."),
    _same(
        "include_stop_words_in_output", BOOL, "Text ends after the stop word (true) or before it.", as_parameter=True
    ),
    _same("return_finish_reason", BOOL, "Ask for finish_reason.", as_parameter=True),
    _same("return_stop_reason", BOOL, "Ask for stop_reason.", as_parameter=True),
    _same("return_num_input_tokens", BOOL, "Ask for num_input_tokens."),
    _same("return_num_output_tokens", BOOL, "Ask for num_output_tokens."),
    _same(
        "queue_timeout_ms", INT32, "Longest wait before the request runs; 0 = the model's default.", as_parameter=True
    ),
    _same("deadline_ms", INT32, "Longest time in all; 0 = the model's default.", as_parameter=True),
    _same("cache_salt", STRING, "Requests share cached prefixes only under equal salts.", as_parameter=True),
    Option("return_errors_in_band", "return_errors_in_band", None, BOOL, "Send errors in the tensor error."),
    Option("piecewise", "piecewise", None, BOOL, "Answer with one piece; the next ones are asked for (the BLS does)."),
    Option(
        "next_piece", "next_piece", None, BOOL, "Ask for the next piece of the request that has the same request id."
    ),
    Option("detokenize", "detokenize", None, BOOL, "Make the text in text_output (set by preprocessing)."),
)

_TOKEN_LISTS = (
    TensorRow("embedding_bias", FP32, (-1,), "Added to the logits: one value a token id, or none.", True, True),
    TensorRow("stop_words_list", INT32, (2, -1), "Stop words as ids and end offsets.", True, True),
    TensorRow("bad_words_list", INT32, (2, -1), "Forbidden words as ids and end offsets.", True, True),
    TensorRow(
        "stop_words_text", STRING, (-1,), "Stop words as text (from preprocessing); replaces the list.", True, True
    ),
    TensorRow("stop_token_ids", INT32, (-1,), "Further end ids (from preprocessing).", True, True),
)
_TEXT_LISTS = (
    TensorRow("bad_words", STRING, (-1,), "Words that must not appear.", True),
    TensorRow("stop_words", STRING, (-1,), "Words that end the text.", True),
    TensorRow("embedding_bias_words", STRING, (-1,), "Words whose tokens get a bias.", True),
    TensorRow("embedding_bias_weights", FP32, (-1,), "One bias a word.", True),
)
_RESULTS = (
    TensorRow("cum_log_probs", FP32, (-1,), "Sum of the log probabilities so far [1, 1]."),
    TensorRow("output_log_probs", FP32, (-1, -1), "Log probability of each new token [1, 1, n]."),
    TensorRow("finish_reason", STRING, (-1,), "stop, length, cancelled, timeout or error; with the last response."),
    TensorRow("stop_reason", STRING, (-1,), "The stop word, empty for an end id; with the last response."),
    TensorRow("num_input_tokens", INT32, (1,), "Tokens of the prompt."),
    TensorRow("num_output_tokens", INT32, (1,), "Token ids in this response."),
)


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


_TEXT_MODEL = ModelTensors(
    inputs=(TensorRow("text_input", STRING, (1,), "The prompt."), *_text_options(), *_TEXT_LISTS),
    outputs=(TensorRow("text_output", STRING, (-1,), "The text, or its next piece when streaming."), *_RESULTS),
)

MODELS: dict[str, ModelTensors] = {
    PREPROCESSING: ModelTensors(
        inputs=(
            TensorRow("QUERY", STRING, (1,), "The prompt."),
            TensorRow("REQUEST_OUTPUT_LEN", INT32, (1,), "Passed on."),
            TensorRow("BAD_WORDS_DICT", STRING, (-1,), "Words that must not appear.", True),
            TensorRow("STOP_WORDS_DICT", STRING, (-1,), "Words that end the text.", True),
            TensorRow("EMBEDDING_BIAS_WORDS", STRING, (-1,), "Words whose tokens get a bias.", True),
            TensorRow("EMBEDDING_BIAS_WEIGHTS", FP32, (-1,), "One bias a word.", True),
            TensorRow("END_ID", INT32, (1,), "Replaces the model's own end ids.", True),
            TensorRow("PAD_ID", INT32, (1,), "Replaces the tokenizer's pad id.", True),
            TensorRow(
                "RETURN_ERRORS_IN_BAND", BOOL, (1,), "Answer errors in ERROR and ERROR_CODE (the BLS asks).", True
            ),
        ),
        outputs=(
            TensorRow("INPUT_ID", INT32, (-1,), "Token ids, padded on the right."),
            TensorRow("REQUEST_INPUT_LEN", INT32, (1,), "Their true number."),
            TensorRow("BAD_WORDS_IDS", INT32, (2, -1), "Forbidden words as ids and end offsets."),
            TensorRow("STOP_WORDS_IDS", INT32, (2, -1), "Stop words as ids and end offsets."),
            TensorRow("EMBEDDING_BIAS", FP32, (-1,), "One value a token id, or none."),
            TensorRow("REQUEST_OUTPUT_LEN", INT32, (-1,), "As received."),
            TensorRow("OUT_END_ID", INT32, (1,), "The end id in force."),
            TensorRow("OUT_PAD_ID", INT32, (1,), "The pad id in force."),
            TensorRow("STOP_WORDS_TEXT", STRING, (-1,), "The stop words themselves, when there are any."),
            TensorRow("STOP_TOKEN_IDS", INT32, (-1,), "All end ids of the model, when the request named none."),
            TensorRow("DETOKENIZE", BOOL, (1,), "Always true: the engine shall make the text."),
            TensorRow("ERRORS_IN_BAND", BOOL, (1,), "Always true: the engine's errors shall come as tensors."),
            TensorRow("ERROR", STRING, (1,), "What was wrong with the request, when asked for."),
            TensorRow("ERROR_CODE", STRING, (1,), "The class of that error."),
        ),
    ),
    ENGINE: ModelTensors(
        inputs=(
            TensorRow("input_ids", INT32, (-1,), "The prompt's token ids.", True, True),
            TensorRow("input_lengths", INT32, (1,), "How many of them count.", reshape=True),
            *_token_options(),
            *_TOKEN_LISTS,
        ),
        outputs=(
            TensorRow("output_ids", INT32, (-1, -1), "New token ids [1, 1, n]; with the prompt unless excluded."),
            TensorRow("sequence_length", INT32, (-1,), "Number of output_ids [1, 1]."),
            *_RESULTS,
            TensorRow("text_output", STRING, (-1,), "The text of this response, when detokenize asks for it."),
            TensorRow("error", STRING, (1,), "An error of the engine, when return_errors_in_band asks for it."),
            TensorRow("error_code", STRING, (1,), "The class of that error."),
            TensorRow("more", BOOL, (1,), "Whether further pieces follow, when answering piecewise."),
        ),
    ),
    POSTPROCESSING: ModelTensors(
        inputs=(
            TensorRow("TOKENS_BATCH", INT32, (-1, -1), "Token ids [batch, beams, n]."),
            TensorRow("SEQUENCE_LENGTH", INT32, (-1,), "How many of each count [batch, beams]."),
            TensorRow("TEXT", STRING, (-1,), "The text, when the engine made it.", True),
            TensorRow("ERROR", STRING, (1,), "The engine's error; it becomes the answer.", True),
            TensorRow("ERROR_CODE", STRING, (1,), "The class of that error.", True),
        ),
        outputs=(TensorRow("OUTPUT", STRING, (-1,), "One text a beam, flat."),),
    ),
    BLS: _TEXT_MODEL,
    ENSEMBLE: _TEXT_MODEL,
}

# What preprocessing says -> the input of the engine model that takes it (the ensemble's wiring, and the BLS's).
ENGINE_FROM_PREPROCESSING: dict[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "EMBEDDING_BIAS": "embedding_bias",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
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
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}

SHARED_PARAMETERS: frozenset[str] = frozenset(option.field for option in OPTIONS if option.as_parameter)


def engine_from_text() -> dict[str, str]:
    """Inputs of the text models that go to the engine model as they are -> its name for them."""
    return {
        option.text_name: option.token_name
        for option in OPTIONS
        if option.text_name and option.token_name and option.text_name not in PREPROCESSING_FROM_TEXT
    }


def input_names(model: str) -> tuple[str, ...]:
    """Names of a model's inputs, in order."""
    return tuple(row.name for row in MODELS[model].inputs)


def spellings(field: str, *, text_model: bool) -> tuple[str, ...]:
    """The inputs that carry ``field``, oldest spelling first; what one kind of model lacks, by the other's name."""
    options = [option for option in OPTIONS if option.field == field]
    names = [(o.text_name or o.token_name) if text_model else (o.token_name or o.text_name) for o in options]
    return tuple(name for name in names if name is not None)
