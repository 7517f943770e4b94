"""Preprocessing and postprocessing without Triton Server, on the table model's tokenizer."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backend_engine.errors import InvalidRequestError
from backend_engine.text.chat_template import ChatTemplate
from backend_engine.text.tokenizer import Tokenizer
from backend_engine.triton_io.error_codes import ModelCallError, code_of
from backend_engine.triton_io.parameters import PreprocessingParameters
from backend_engine.triton_io.prompt_builder import ModelFacts, PromptBuilder
from backend_engine.triton_io.text_output import texts
from backend_engine.triton_io.word_lists import WordLimits, from_word_ids
from tests.support.table_model import build_tokenizer

WIDE = WordLimits()


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    """The table model's."""
    yield Tokenizer(build_tokenizer())


def builder(tokenizer: Tokenizer, end_ids: tuple[int, ...] = (), **settings: Any) -> PromptBuilder:
    values: dict[str, Any] = {
        "tokenizer_dir": "/t", "model_dir": None, "trust_remote_code": False, "add_special_tokens": True,
        "reject_unknown_parameters": False, "max_text_bytes": 1000, "max_messages": 5, "max_sequences": 4,
        "word_limits": WordLimits(4, 20),
    } | settings  # fmt: skip
    facts = ModelFacts.of(tokenizer, {"vocab_size": tokenizer.vocab_size + 8}, end_ids)
    return PromptBuilder(tokenizer, ChatTemplate(tokenizer), facts, PreprocessingParameters(**values))


def inputs(*prompts: str, **more: Any) -> dict[str, np.ndarray]:
    kinds = {
        "EMBEDDING_BIAS_WEIGHTS": np.float32,
        "END_ID": np.int32,
        "PAD_ID": np.int32,
        "REQUEST_OUTPUT_LEN": np.int32,
    }
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


def test_each_row_is_as_if_it_came_alone(tokenizer: Tokenizer) -> None:
    """Each row has its own padding, ends, words and lengths; shorter lists of words are filled up with nothing."""
    rows: list[dict[str, Any]] = [
        {"PAD_ID": [9], "END_ID": [7], "STOP_WORDS_DICT": ["x1"], "BAD_WORDS_DICT": ["London", " London"],
         "EMBEDDING_BIAS_WORDS": ["Bad"], "EMBEDDING_BIAS_WEIGHTS": [1.5], "REQUEST_OUTPUT_LEN": [3]},
        {"PAD_ID": [8], "END_ID": [-1], "STOP_WORDS_DICT": ["x1", "\n", "end"], "BAD_WORDS_DICT": [],
         "EMBEDDING_BIAS_WORDS": [" London", "x", "Bad"], "EMBEDDING_BIAS_WEIGHTS": [-1, 2, 3],
         "REQUEST_OUTPUT_LEN": [70]},
        {"PAD_ID": [6], "END_ID": [2], "STOP_WORDS_DICT": [], "BAD_WORDS_DICT": ["end"],
         "EMBEDDING_BIAS_WORDS": [], "EMBEDDING_BIAS_WEIGHTS": [], "REQUEST_OUTPUT_LEN": [1]},
    ]  # fmt: skip
    prompts = ["Count", "CountTextList", "Bad"]
    filled: dict[str, Any] = {}
    for name in rows[0]:
        width = max(len(row[name]) for row in rows)
        nothing = 0.0 if name == "EMBEDDING_BIAS_WEIGHTS" else ""
        filled[name] = [row[name] + [nothing] * (width - len(row[name])) for row in rows]
    out = builder(tokenizer).build(inputs(*prompts, **filled))
    assert {name: len(values) for name, values in out.items()} == dict.fromkeys(out, 3)
    for index, row in enumerate(rows):
        alone = builder(tokenizer).build(inputs(prompts[index], **{name: [values] for name, values in row.items()}))
        length = int(alone["REQUEST_INPUT_LEN"][0, 0])
        assert out["INPUT_ID"][index, :length].tolist() == alone["INPUT_ID"][0].tolist()
        assert set(out["INPUT_ID"][index, length:].tolist()) <= set(row["PAD_ID"])
        for name in ("REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN", "OUT_END_ID", "OUT_PAD_ID", "DETOKENIZE"):
            assert out[name][index].tolist() == alone[name][0].tolist(), name
        for name in ("BAD_WORDS_IDS", "STOP_WORDS_IDS"):
            assert from_word_ids(out[name][index], "x", WIDE) == from_word_ids(alone[name][0], "x", WIDE)
        assert [word.decode() for word in out["STOP_WORDS_TEXT"][index] if word] == row["STOP_WORDS_DICT"]
        bias = alone["EMBEDDING_BIAS"][0] if alone["EMBEDDING_BIAS"].size else np.zeros_like(out["EMBEDDING_BIAS"][0])
        assert out["EMBEDDING_BIAS"][index].tolist() == bias.tolist()
    assert "STOP_TOKEN_IDS" not in out


def test_all_end_ids_of_the_model_go_to_each_row(tokenizer: Tokenizer) -> None:
    out = builder(tokenizer, end_ids=(7, 8)).build(inputs("Count", "CountTextList"))
    assert out["STOP_TOKEN_IDS"].tolist() == [[7, 8], [7, 8]] and out["OUT_END_ID"].tolist() == [[7], [7]]
    assert out["REQUEST_INPUT_LEN"].tolist() == [[1], [3]]
    assert out["INPUT_ID"][0].tolist() == [tokenizer.encode("Count")[0], *[tokenizer.pad_token_id] * 2]


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
        (inputs("x" * 1001), ["text_input has 1001 bytes", "1000"]),
        (inputs(*"aaaaa"), ["text_input has 5 rows; 1 to 4 are allowed"]),
        ({"QUERY": np.zeros((0, 1), np.object_), "REQUEST_OUTPUT_LEN": np.ones((0, 1), np.int32)}, ["has 0 rows"]),
        (inputs("a", "x" * 1001), ["text_input of row 1 has 1001 bytes"]),
        (inputs("a", ""), ["empty", "text_input of row 1"]),
        (inputs("a", REQUEST_OUTPUT_LEN=[[3, 4]]), ["max_tokens must be a single value, got 2"]),
        (inputs("a", "b", PAD_ID=[[3, 4], [5, 6]]), ["pad_id must be one value a row for 2 rows, got 4"]),
        (inputs("a", "b", STOP_WORDS_DICT=[["a"], ["a" * 21]]), ["stop_words of row 1 has 21 bytes"]),
        (inputs("a", "b", BAD_WORDS_DICT=[[b"a"], [b"\xff"]]), ["bad_words of row 1 is not valid UTF-8"]),
        (
            inputs("a", "b", EMBEDDING_BIAS_WORDS=[["a"], ["b"]], EMBEDDING_BIAS_WEIGHTS=[[1.0], [float("inf")]]),
            ["embedding_bias_weights of row 1 must be finite"],
        ),
        (inputs("a", DECODER_QUERY=[["b"]]), ["not built yet", "decoder_text_input"]),
        (
            {"QUERY": np.array([[b"\xff"]], dtype=np.object_), "REQUEST_OUTPUT_LEN": np.ones((1, 1), np.int32)},
            ["UTF-8"],
        ),
        ({"QUERY": inputs("a")["QUERY"]}, ["max_tokens is required"]),
        ({"REQUEST_OUTPUT_LEN": np.ones((1, 1), np.int32)}, ["text_input is required"]),
        (inputs("a", STOP_WORDS_DICT=[["a"] * 5]), ["stop_words has 5 words"]),
        (inputs("a", BAD_WORDS_DICT=[["a" * 21]]), ["bad_words has 21 bytes"]),
        (inputs("a", END_ID=[[1, 2]]), ["end_id", "single value"]),
        (inputs("a", "b", END_ID=[[1]]), ["end_id has 1 rows and text_input 2"]),
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
    with_bos = Tokenizer(build_tokenizer(add_bos=True))
    assert builder(with_bos).build(inputs(""))["INPUT_ID"].tolist() == [[with_bos.bos_token_id]]
    with pytest.raises(InvalidRequestError, match="empty"):
        builder(with_bos, add_special_tokens=False).build(inputs(""))


USER = {"role": "user", "content": "Count"}
PROMPT = "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n"


def chat(*rows: Any, text: str = "", **more: Any) -> dict[str, np.ndarray]:
    """Inputs whose rows are chats, as JSON text or what becomes it."""
    texts_of_rows = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    return inputs(*[text] * len(rows), MESSAGES=[[row] for row in texts_of_rows], **more)


def test_messages_are_rendered_by_the_models_template(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode(PROMPT)
    for value in ([USER], {"messages": [USER]}, {"messages": [USER], "tools": None, "chat_template_kwargs": {}}):
        out = builder(tokenizer).build(chat(value))
        assert out["INPUT_ID"].tolist() == [expected] and out["REQUEST_INPUT_LEN"].tolist() == [[len(expected)]]
    parts = {"role": "user", "content": [{"type": "text", "text": "Count"}]}
    assert builder(tokenizer).build(chat([parts]))["INPUT_ID"].tolist() == [expected]
    theirs = build_tokenizer().apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert theirs == expected
    assert tokenizer.decode(expected, False) == PROMPT


def test_all_else_is_for_a_chat_as_for_a_text(tokenizer: Tokenizer) -> None:
    more: dict[str, Any] = {
        "STOP_WORDS_DICT": [["x1"]], "BAD_WORDS_DICT": [["London"]], "END_ID": [[3]], "PAD_ID": [[4]],
        "EMBEDDING_BIAS_WORDS": [["Bad"]], "EMBEDDING_BIAS_WEIGHTS": [[1.5]],
    }  # fmt: skip
    from_chat, from_text = (
        builder(tokenizer).build(chat([USER], **more)),
        builder(tokenizer).build(inputs(PROMPT, **more)),
    )
    assert {n: v.tolist() for n, v in from_chat.items()} == {n: v.tolist() for n, v in from_text.items()}


def test_rows_of_chats_and_of_text_in_one_request(tokenizer: Tokenizer) -> None:
    values = inputs("", "Count", MESSAGES=[[json.dumps([USER])], [""]])
    out = builder(tokenizer).build(values)
    assert out["REQUEST_INPUT_LEN"].tolist() == [[len(tokenizer.encode(PROMPT))], [1]]
    assert out["INPUT_ID"][1, 0] == tokenizer.encode("Count")[0]
    assert builder(tokenizer).build(inputs("Count", MESSAGES=[[""]]))["INPUT_ID"].tolist() == [
        tokenizer.encode("Count")
    ]


def test_tools_and_variables_reach_the_template() -> None:
    fast = build_tokenizer()
    fast.chat_template = (
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{{ m.tool_call_id }}"
        "{% endfor %}{{ mood }}"
    )
    tokenizer = Tokenizer(fast)
    call = {"id": "7", "type": "function", "function": {"name": "w", "arguments": json.dumps({"city": "London"})}}
    value = {
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "7"},
        ],
        "tools": [{"name": "weather"}],
        "chat_template_kwargs": {"mood": "calm"},
    }  # fmt: skip
    out = builder(tokenizer).build(chat(value))
    assert tokenizer.decode(out["INPUT_ID"][0].tolist()) == "weatherLondon57calm"


def test_a_begin_token_is_never_doubled_and_never_the_clients() -> None:
    fast = build_tokenizer(add_bos=True)
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(fast)
    assert tokenizer.encode("Count")[0] == tokenizer.bos_token_id
    for add_special_tokens in (True, False):
        made = builder(tokenizer, add_special_tokens=add_special_tokens)
        for content in ("Count", "<s>Count", "</s>"):
            ids = made.build(chat([USER | {"content": content}]))["INPUT_ID"][0].tolist()
            assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
            assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids) == content


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (chat([USER], text="x"), ["messages and text_input", "both"]),
        (chat([USER], [USER], text="x"), ["messages of row 0 and text_input of row 0", "both"]),
        (chat("hello"), ["messages is not JSON", "character 0", '[{"role": "user"']),
        (chat("[" * 100_000, ), ["messages has 100000 bytes; at most 1000 are allowed"]),
        (chat(b"\xff"), ["messages is not valid UTF-8 (byte 0)"]),
        (chat(" "), ["messages is not JSON"]),
        (chat("3"), ["messages is a JSON number; it must be a JSON list"]),
        (chat("null"), ["messages is a JSON null"]),
        (chat('"hi"'), ["messages is a JSON string"]),
        (chat("true"), ["messages is a JSON boolean"]),
        (chat('[{"role": "user", "content": "a", "n": NaN}]'), ["messages holds a number"]),
        (chat({"messages": [USER], "model": "m"}), ["messages has the key 'model'", "chat_template_kwargs"]),
        (chat({"tools": []}), ["messages: its key messages must be a list"]),
        (chat({"messages": "x"}), ["messages: its key messages must be a list"]),
        (chat([]), ["messages is empty"]),
        (chat([USER] * 6), ["messages has 6 messages; at most 5 are allowed"]),
        (chat([USER, "x"]), ["messages[1] must be an object"]),
        (chat([USER, {"content": "x"}]), ["messages[1].role must be a name such as user"]),
        (chat([{"role": "a b", "content": "x"}]), ["messages[0].role"]),
        (chat([{"role": "user"}]), ["messages[0].content is missing"]),
        (chat([USER | {"content": "\ud800"}]), ["messages: ", "not valid Unicode"]),
        (
            chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            ["messages[0].content[0]", "image_url", "not built"],
        ),
        (chat([USER], [USER, 5]), ["messages of row 1: messages[1] must be an object"]),
        (chat([USER], "{"), ["messages of row 1 is not JSON"]),
        (chat({"messages": [USER], "tools": 5}), ["messages: tools must be a list of objects"]),
        (chat({"messages": [USER], "chat_template_kwargs": []}), ["messages: chat_template_kwargs must be an object"]),
        (chat({"messages": [USER], "chat_template_kwargs": {"tools": 1}}), ["the key 'tools'"]),
        (inputs("", MESSAGES=[["[]", "[]"]]), ["messages must be a single value, got 2"]),
        (inputs("a", "b", MESSAGES=[["[]"]]), ["messages has 1 rows and text_input 2"]),
    ],
)  # fmt: skip
def test_bad_messages_are_refused_with_one_line(tokenizer: Tokenizer, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builder(tokenizer).build(values)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_json_that_is_nested_too_deep(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer, max_text_bytes=1 << 20)
    with pytest.raises(InvalidRequestError, match="messages is nested too deep"):
        made.build(chat("[" * 500_000))
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] is nested more than 32 levels"):
        made.build(chat('[{"role": "user", "content": "a", "x": ' + "[" * 40 + "]" * 40 + "}]"))
    with pytest.raises(InvalidRequestError, match="too many digits"):
        made.build(chat('[{"role": "user", "content": ' + "1" * 5000 + "}]"))


def test_a_chat_for_a_model_without_a_template_or_with_a_bad_one() -> None:
    for template, words in (
        (None, "messages: the model has no chat template"),
        ("{% for %}", "messages: the chat template is not"),
    ):
        fast = build_tokenizer()
        fast.chat_template = template
        made = builder(Tokenizer(fast))
        with pytest.raises(InvalidRequestError, match=words):
            made.build(chat([USER]))
        assert made.build(inputs("Count"))["REQUEST_INPUT_LEN"].tolist() == [[1]]
    fast.chat_template = "{% if false %}x{% endif %}"
    with pytest.raises(InvalidRequestError, match="empty: messages must give at least one token"):
        builder(Tokenizer(fast)).build(chat([USER]))


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


@pytest.mark.parametrize("beams", [1, 2])
def test_a_response_without_ids_has_an_empty_text(tokenizer: Tokenizer, beams: int) -> None:
    given = {"TOKENS_BATCH": np.zeros((1, beams, 0), np.int32), "SEQUENCE_LENGTH": np.zeros((1, beams), np.int32)}
    assert texts(given, tokenizer, True).tolist() == [b""] * beams
