"""What is declared for clients and not built yet: the inputs of each feature, by model.

``unbuilt.py`` refuses a request that uses one of them; ``tensor_table.py`` declares them. A feature that gets built
takes its rows from here into its own place, and the refusal is gone. Data only.
"""

from typing import NamedTuple

from backend_engine.triton_io.tensor_rows import (
    BOOL,
    ENCODER_FEATURES,
    FP16,
    FP32,
    INT32,
    INT64,
    LOGITS,
    STRING,
    UINT8,
    UINT64,
    TensorRow,
    optional,
    ragged,
    scalar_row,
)


class Feature(NamedTuple):
    """A feature that is not built: what to call it, and its inputs on the engine, the text models and preprocessing.

    An input that is empty, or holds nothing but zeros, false and empty strings, asks for nothing; with ``counts_zero``
    only an empty one does.
    """

    name: str
    engine: tuple[TensorRow, ...] = ()
    text: tuple[TensorRow, ...] = ()
    preprocessing: tuple[TensorRow, ...] = ()
    bls_only: tuple[TensorRow, ...] = ()
    counts_zero: bool = False


_GUIDED = (
    ("guided_decoding_guide_type", "json, json_schema, regex, ebnf_grammar or structural_tag."),
    ("guided_decoding_guide", "The schema, expression or grammar."),
)
_LORA = (
    ragged("lora_weights", FP16, (-1, -1), "Weights of the adapter, on its first use."),
    ragged("lora_config", INT32, (-1, 3), "Rows of module id, layer, rank."),
)
_PROMPT_TABLE_DOC = "Embeddings that replace prompt ids beyond the vocabulary."

FEATURES: tuple[Feature, ...] = (
    Feature(
        "encoder-decoder models",
        engine=(
            ragged("encoder_input_features", ENCODER_FEATURES, (-1, -1), "Features for the encoder."),
            scalar_row("encoder_output_lengths", INT32, "Length of the encoder's output."),
            ragged("decoder_input_ids", INT32, (-1,), "The decoder's prompt; a single id, the default, is accepted."),
            scalar_row("decoder_input_lengths", INT32, "How many of decoder_input_ids count."),
            ragged("cross_attention_mask", BOOL, (-1, -1), "Mask of the cross attention."),
            ragged("skip_cross_attn_blocks", BOOL, (1,), "Leave the cross attention out."),
        ),
        text=(optional("decoder_text_input", STRING, (1,), "The decoder's prompt."),),
        preprocessing=(optional("DECODER_QUERY", STRING, (1,), "The decoder's prompt."),),
    ),
    Feature(
        "speculative decoding",
        engine=(
            ragged("draft_input_ids", INT32, (-1,), "Draft tokens to verify."),
            ragged("draft_logits", LOGITS, (-1, -1), "Their logits."),
            scalar_row("draft_acceptance_threshold", FP32, "0 to 1, with draft_logits."),
            ragged("lookahead_window_size", INT32, (1,), "Lookahead decoding."),
            ragged("lookahead_ngram_size", INT32, (1,), "Lookahead decoding."),
            ragged("lookahead_verification_set_size", INT32, (1,), "Lookahead decoding."),
        ),
        bls_only=(
            optional("num_draft_tokens", INT32, (1,), "Above 0: draft with the draft model."),
            scalar_row("use_draft_logits", BOOL, "Compare logits instead of tokens."),
        ),
    ),
    Feature(
        "prompt tuning",
        engine=(
            ragged("prompt_embedding_table", FP16, (-1, -1), _PROMPT_TABLE_DOC),
            ragged("prompt_table_extra_ids", UINT64, (-1,), "Tell tables apart, one id a prompt token."),
            scalar_row("prompt_vocab_size", INT32, "Ids from the vocabulary's size on index the table."),
        ),
        text=(
            optional("prompt_embedding_table", FP16, (-1, -1), _PROMPT_TABLE_DOC),
            optional("prompt_vocab_size", INT32, (1,), "Number of rows of the table that count."),
            optional("prompt_table_extra_id", UINT64, (1,), "Tells tables apart."),
        ),
        preprocessing=(optional("PROMPT_TABLE_EXTRA_ID", UINT64, (1,), "Tells embedding tables apart."),),
    ),
    Feature(
        "images and video",
        engine=(
            optional("mrope_rotary_cos_sin", FP32, (-1,), "Rotary positions of an image."),
            optional("mrope_position_deltas", INT64, (1,), "Their offset."),
        ),
        text=(
            optional("image_bytes_input", UINT8, (-1, -1, -1, -1), "Raw images."),
            optional("image_url_input", STRING, (1,), "An image by http(s) or data URL."),
            optional("video_bytes_input", UINT8, (-1, -1, -1, -1), "Raw frames."),
        ),
        preprocessing=(
            optional("IMAGE_BYTES", UINT8, (-1, -1, -1, -1), "Raw images."),
            optional("IMAGE_URL", STRING, (1,), "An image by http(s) or data URL."),
            optional("IMAGES", STRING, (-1,), "Images by URL or base64."),
            optional("VIDEO_BYTES", UINT8, (-1, -1, -1, -1), "Raw frames."),
        ),
        bls_only=(optional("image_input", FP16, (-1, 3, -1, -1), "Preprocessed pixels."),),
    ),
    Feature(
        "LoRA adapters",
        engine=(scalar_row("lora_task_id", UINT64, "The adapter."), *_LORA),
        text=(optional("lora_task_id", UINT64, (1,), "The adapter."), *_LORA),
        counts_zero=True,
    ),
    Feature(
        "disaggregated serving",
        engine=(ragged("context_phase_params", UINT8, (-1,), "What a context-only request has computed."),),
    ),
    Feature(
        "KV cache retention",
        engine=(
            ragged("retention_token_range_starts", INT32, (-1,), "First tokens of the ranges."),
            ragged("retention_token_range_ends", INT32, (-1,), "Their ends; -1 = the prompt's."),
            ragged("retention_token_range_priorities", INT32, (-1,), "0 to 100 each."),
            ragged("retention_token_range_durations_ms", INT32, (-1,), "-1 = for ever."),
            ragged("retention_decode_priority", INT32, (1,), "Priority of generated tokens."),
            ragged("retention_decode_duration_ms", INT32, (1,), "Their duration."),
        ),
        counts_zero=True,
    ),
    Feature(
        "guided decoding",
        engine=tuple(ragged(name, STRING, (1,), doc) for name, doc in _GUIDED),
        text=tuple(ragged(name, STRING, (1,), doc) for name, doc in _GUIDED),
    ),
)


def feature_names() -> frozenset[str]:
    """Every input of every feature, on whichever model."""
    return frozenset(
        row.name
        for feature in FEATURES
        for rows in (feature.engine, feature.text, feature.preprocessing, feature.bls_only)
        for row in rows
    )
