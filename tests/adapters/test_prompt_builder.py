"""Preprocessing and postprocessing without Triton Server, on the table model's tokenizer."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backend_engine.errors import InvalidRequestError
from backend_engine.text.tokenizer import Tokenizer
from backend_engine.triton_io.error_codes import ModelCallError, code_of
from backend_engine.triton_io.parameters import PreprocessingParameters
from backend_engine.triton_io.prompt_builder import ModelFacts, PromptBuilder
from backend_engine.triton_io.text_output import texts
from backend_engine.triton_io.word_lists import WordLimits, from_word_ids

WIDE = WordLimits()


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    """The table model's."""
    from tests.support.table_model import build_tokenizer

    yield Tokenizer(build_tokenizer())


def builder(tokenizer: Tokenizer, end_ids: tuple[int, ...] = (), **settings: Any) -> PromptBuilder:
    values: dict[str, Any] = {
        "tokenizer_dir": "/t", "model_dir": None, "trust_remote_code": False, "add_special_tokens": True,
        "reject_unknown_parameters": False, "max_text_bytes": 100, "word_limits": WordLimits(4, 20),
    } | settings  # fmt: skip
    facts = ModelFacts.of(tokenizer, {"vocab_size": tokenizer.vocab_size + 8}, end_ids)
    return PromptBuilder(tokenizer, facts, PreprocessingParameters(**values))


def inputs(*prompts: str, **more: Any) -> dict[str, np.ndarray]:
    kinds = {"EMBEDDING_BIAS_WEIGHTS": np.float32, "END_ID": np.int32, "PAD_ID": np.int32}
    made = {
        "QUERY": np.array([[prompt.encode()] for prompt in prompts], dtype=np.object_),
        "REQUEST_OUTPUT_LEN": np.array([[5]] * len(prompts), np.int32),
    }
    for name, value in more.items():
        encoded = [[v.encode() if isinstance(v, str) else v for v in row] for row in value]
        made[name] = np.array(encoded, dtype=kinds.get(name, np.object_))
    return made


def test_a_plain_prompt(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer).build(inputs("Count"))
    assert out["INPUT_ID"].tolist() == [tokenizer.encode("Count")] and out["REQUEST_INPUT_LEN"].tolist() == [[1]]
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[5]]
    assert out["STOP_WORDS_IDS"].shape == out["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert out["EMBEDDING_BIAS"].shape == (1, 0)
    assert out["OUT_END_ID"].tolist() == [[tokenizer.eos_token_id]]
    assert out["OUT_PAD_ID"].tolist() == [[tokenizer.pad_token_id]]
    assert out["STOP_TOKEN_IDS"].tolist() == [[tokenizer.eos_token_id]]
    assert out["DETOKENIZE"].all() and out["ERRORS_IN_BAND"].all() and "STOP_WORDS_TEXT" not in out


def test_rows_of_a_batch_are_padded_on_the_right(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer).build(inputs("Count", "CountTextList", PAD_ID=[[9], [9]]))
    assert out["REQUEST_INPUT_LEN"].tolist() == [[1], [3]]
    assert out["INPUT_ID"].tolist()[0][1:] == [9, 9]
    assert {name: len(values) for name, values in out.items()} == dict.fromkeys(out, 2)


def test_all_end_ids_of_the_model_count_until_the_client_names_one(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer, end_ids=(7, 8)).build(inputs("Count"))
    assert out["OUT_END_ID"].tolist() == [[7]] and out["STOP_TOKEN_IDS"].tolist() == [[7, 8]]
    out = builder(tokenizer, end_ids=(7, 8)).build(inputs("Count", END_ID=[[3]]))
    assert out["OUT_END_ID"].tolist() == [[3]] and "STOP_TOKEN_IDS" not in out


@pytest.mark.parametrize("words", [[[""]], [[]]])
def test_empty_words_are_none(tokenizer: Tokenizer, words: list[list[str]]) -> None:
    out = builder(tokenizer).build(inputs("Count", STOP_WORDS_DICT=words, BAD_WORDS_DICT=words))
    assert from_word_ids(out["STOP_WORDS_IDS"][0], "x", WIDE) == from_word_ids(out["BAD_WORDS_IDS"][0], "x", WIDE) == []
    assert "STOP_WORDS_TEXT" not in out


def test_stop_words_go_on_as_text_and_as_ids(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer).build(inputs("Count", STOP_WORDS_DICT=[["x1, y1", "", "\n"]]))
    assert [word for word in out["STOP_WORDS_TEXT"].reshape(-1) if word] == [b"x1, y1", b"\n"]
    ids = from_word_ids(out["STOP_WORDS_IDS"][0], "x", WIDE)
    assert ids == [tokenizer.encode("x1, y1", False), tokenizer.encode("\n", False)]


def test_a_bad_word_is_blocked_in_each_spelling(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer).build(inputs("Bad", BAD_WORDS_DICT=[["London"]]))
    assert [tokenizer.decode(ids) for ids in from_word_ids(out["BAD_WORDS_IDS"][0], "x", WIDE)] == ["London", " London"]
    out = builder(tokenizer).build(inputs("Bad", BAD_WORDS_DICT=[[" London"]]))
    assert [tokenizer.decode(ids) for ids in from_word_ids(out["BAD_WORDS_IDS"][0], "x", WIDE)] == [" London"]


def test_the_embedding_bias_is_as_long_as_the_models_vocabulary(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer).build(
        inputs("Bad", EMBEDDING_BIAS_WORDS=[[" London", "", "Bad"]], EMBEDDING_BIAS_WEIGHTS=[[-20.0, 5.0, 1.5]])
    )
    bias = out["EMBEDDING_BIAS"]
    assert bias.shape == (1, tokenizer.vocab_size + 8)
    expected = {tokenizer.encode(" London", False)[0]: -20.0, tokenizer.encode("Bad", False)[0]: 1.5}
    assert {int(i): float(bias[0, i]) for i in np.flatnonzero(bias[0])} == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (inputs(""), ["empty", "text_input"]),
        (inputs("x" * 101), ["text_input has 101 bytes", "100"]),
        (
            {"QUERY": np.array([[b"\xff"]], dtype=np.object_), "REQUEST_OUTPUT_LEN": np.ones((1, 1), np.int32)},
            ["UTF-8"],
        ),
        ({"QUERY": inputs("a")["QUERY"]}, ["max_tokens is required"]),
        ({"REQUEST_OUTPUT_LEN": np.ones((1, 1), np.int32)}, ["text_input is required"]),
        (inputs("a", STOP_WORDS_DICT=[["a"] * 5]), ["stop_words has 5 words"]),
        (inputs("a", BAD_WORDS_DICT=[["a" * 21]]), ["bad_words has 21 bytes"]),
        (inputs("a", END_ID=[[1, 2]]), ["end_id", "single value"]),
        (inputs("a", "b", END_ID=[[1]]), ["END_ID has 1 rows"]),
        (inputs("a", EMBEDDING_BIAS_WORDS=[["a", "b"]], EMBEDDING_BIAS_WEIGHTS=[[1.0]]), ["2 words", "1 weights"]),
        (inputs("a", EMBEDDING_BIAS_WORDS=[["a"]], EMBEDDING_BIAS_WEIGHTS=[[float("nan")]]), ["finite"]),
        (inputs("a", EMBEDDING_BIAS_WORDS=[["a"]]), ["1 words", "0 weights"]),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(tokenizer: Tokenizer, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builder(tokenizer).build(values)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_empty_prompt_is_fine_where_a_begin_token_is_added() -> None:
    from tests.support.table_model import build_tokenizer

    with_bos = Tokenizer(build_tokenizer(add_bos=True))
    assert builder(with_bos).build(inputs(""))["INPUT_ID"].tolist() == [[with_bos.bos_token_id]]
    with pytest.raises(InvalidRequestError, match="empty"):
        builder(with_bos, add_special_tokens=False).build(inputs(""))


def test_postprocessing_decodes_each_beam_up_to_its_length(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode(" one two three", False), tokenizer.encode(" four", False)
    tokens = np.array([[one, two + [-1] * (len(one) - len(two))]], np.int32)
    lengths = np.array([[2, 1]], np.int32)
    result = texts({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}, tokenizer, True)
    assert result.tolist() == [b" one two", b" four"]
    end = np.array([[[tokenizer.eos_token_id]]], np.int32)
    one_token = {"TOKENS_BATCH": end, "SEQUENCE_LENGTH": np.array([[1]], np.int32)}
    assert texts(one_token, tokenizer, True).tolist() == [b""]
    assert texts(one_token, tokenizer, False).tolist() == [b"</s>"]


def test_postprocessing_hands_a_ready_text_through(tokenizer: Tokenizer) -> None:
    values = {
        "TOKENS_BATCH": np.zeros((1, 1, 0), np.int32),
        "SEQUENCE_LENGTH": np.zeros((1, 1), np.int32),
        "TEXT": np.array([["🦙".encode()]], dtype=np.object_),
    }
    assert texts(values, tokenizer, True).tolist() == ["🦙".encode()]


def test_postprocessing_turns_an_error_of_the_engine_into_its_answer(tokenizer: Tokenizer) -> None:
    values = {
        "TOKENS_BATCH": np.zeros((1, 1, 0), np.int32),
        "SEQUENCE_LENGTH": np.zeros((1, 1), np.int32),
        "ERROR": np.array([[b"the step failed"]], dtype=np.object_),
        "ERROR_CODE": np.array([[b"UNAVAILABLE"]], dtype=np.object_),
    }
    with pytest.raises(ModelCallError, match="the step failed") as caught:
        texts(values, tokenizer, True)
    assert code_of(caught.value) == "UNAVAILABLE"
    with pytest.raises(ModelCallError) as caught:
        texts(values | {"ERROR_CODE": np.array([[b"NO_SUCH_CODE"]], dtype=np.object_)}, tokenizer, True)
    assert code_of(caught.value) == "INTERNAL"


@pytest.mark.parametrize(
    ("tokens", "lengths", "culprit"), [((3,), (1,), "TOKENS_BATCH"), ((1, 2, 3), (1, 1), "SEQUENCE_LENGTH has 1")]
)
def test_postprocessing_refuses_shapes_that_do_not_fit(
    tokenizer: Tokenizer, tokens: tuple[int, ...], lengths: tuple[int, ...], culprit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=culprit):
        texts(
            {"TOKENS_BATCH": np.zeros(tokens, np.int32), "SEQUENCE_LENGTH": np.zeros(lengths, np.int32)},
            tokenizer,
            True,
        )
