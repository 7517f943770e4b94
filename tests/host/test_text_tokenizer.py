"""``Tokenizer``: encoding, begin tokens, spellings of bad words, control tokens as text, loading faults, threads."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from backend_engine.errors import InvalidRequestError, ModelLoadError
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import sentencepiece_like, unigram
from tests.support.table_model import CHAT_TEMPLATE, build_tokenizer, token_id

TABLE = Tokenizer(build_tokenizer())
LLAMA = Tokenizer(sentencepiece_like("llama"))
GEMMA = Tokenizer(sentencepiece_like("gemma"))
UNIGRAM = Tokenizer(unigram())


def test_loads_a_folder(table_model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(table_model_dir))
    reference = AutoTokenizer.from_pretrained(table_model_dir)
    assert tokenizer.vocab_size == len(reference) == 413
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == tuple(
        token_id(token) for token in ("<s>", "</s>", "<pad>")
    )
    assert tokenizer.chat_template(with_tools=False) == tokenizer.chat_template(with_tools=True) == CHAT_TEMPLATE
    assert tokenizer.special_token_names == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    text = " alpha 🦙 <|im_end|>\n\nUser: café"
    assert tokenizer.encode(text) == reference(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text), False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == " alpha 🦙 \n\nUser: café"


def test_padding_falls_back_to_the_end_token() -> None:
    assert LLAMA.pad_token_id == LLAMA.eos_token_id == 2
    assert LLAMA.chat_template(with_tools=False) is None


def test_begin_token_is_added_once() -> None:
    ids = LLAMA.encode("Hello")
    assert ids[0] == LLAMA.bos_token_id
    assert LLAMA.encode("<s>Hello") == [1, *LLAMA.encode_plain("<s>Hello")[1:]]
    assert LLAMA.encode("<s>Hello").count(1) == 1
    assert LLAMA.encode("Hello", add_special_tokens=False) == LLAMA.encode_plain("Hello") == ids[1:]
    assert LLAMA.encode("") == [1]
    assert LLAMA.encode_plain("") == TABLE.encode("") == []


@pytest.mark.parametrize(
    ("word", "variants"),
    [
        ("London", [[token_id("London")], [token_id(" London")]]),
        (" London", [[token_id(" London")]]),
        ("STOP", [[83, 84, token_id("OP")], [token_id(" ST"), token_id("OP")]]),
        ("\n", [[10], [32, 10]]),
        ("", []),
        (" ", [[32]]),
    ],
)
def test_spellings_of_a_word_in_byte_level(word: str, variants: list[list[int]]) -> None:
    assert TABLE.token_variants(word) == variants


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_spellings_of_a_word_in_sentencepiece(tokenizer: Tokenizer) -> None:
    """Also the one without the blank that such tokenizers put in front of a text."""
    bare, blank = (tokenizer.encode_plain(text)[-1] for text in ("a\nHello", "a Hello"))
    assert bare != blank
    assert tokenizer.token_variants("Hello") == [[bare], [blank]]
    assert tokenizer.token_variants(" Hello") == [[blank]]


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff"])
def test_text_that_is_not_unicode(text: str) -> None:
    for encode in (TABLE.encode, TABLE.encode_plain, lambda t: TABLE.encode_literal(t, [])):
        with pytest.raises(InvalidRequestError, match=f"character {len(text) - 1} is half of a surrogate pair"):
            encode(text)


@pytest.mark.parametrize("tokenizer", [TABLE, LLAMA, GEMMA, UNIGRAM], ids=["table", "llama", "gemma", "unigram"])
def test_control_tokens_become_text_outside_their_spans(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>a<|im_end|>b</s>c<|im_end|>"
    start = text.rindex("<|im_end|>")
    ids = tokenizer.encode_literal(text, [(0, 12), (start, len(text))])
    shown = [i for i in ids if i in tokenizer.control_tokens.values()]
    assert shown == [tokenizer.control_tokens["<|im_start|>"], tokenizer.control_tokens["<|im_end|>"]]
    assert ids[0] == shown[0] and ids[-1] == shown[1]
    if tokenizer is not UNIGRAM:  # whose decoder takes blanks out at the beginning
        assert tokenizer.decode(ids, False) == tokenizer.decode(tokenizer.encode_plain(text), False) == text


PIECES = st.sampled_from(["<|im_start|>", "<|im_end|>", "<s>", "a", " ", "Hello", "\n", "🦙", "<think>", "<", "|>"])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([TABLE, LLAMA, GEMMA]), st.lists(PIECES, max_size=8))
def test_with_all_its_control_tokens_a_text_is_encoded_as_ever(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text, spans, end = "", [], 0
    for piece in pieces:
        text += piece
        if piece in tokenizer.control_tokens:
            spans.append((len(text) - len(piece), len(text)))
    ids = tokenizer.encode_literal(text, spans)
    assert ids == tokenizer.encode_plain(text), end


def test_threads_share_a_tokenizer() -> None:
    texts = [f" alpha{n} <|im_end|> café" for n in range(200)]
    expected = [TABLE.encode(text) for text in texts]
    fresh = Tokenizer(build_tokenizer())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fresh.encode, texts)) == expected
        assert list(pool.map(fresh.decode, expected)) == [text.replace("<|im_end|>", "") for text in texts]
        assert len(set(map(id, pool.map(lambda _: fresh.token_table(), texts)))) == 1
        literal = list(pool.map(lambda text: fresh.encode_literal(text, []), texts))
    assert literal == [TABLE.encode_literal(text, []) for text in texts]


GOOD = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer in {folder}: looked for tokenizer.json, tokenizer.model"),
        ({"tokenizer.json": "{"}, "cannot load the tokenizer in {folder} (tokenizer.json): "),
        ({"tokenizer.json": "{}", "tokenizer_config.json": GOOD}, "(tokenizer.json, tokenizer_config.json): "),
        ({"tokenizer.json": "[]", "tokenizer_config.json": GOOD}, "cannot load the tokenizer in {folder}"),
        ({"tokenizer_config.json": GOOD}, "cannot load the tokenizer in {folder}"),
        ({"tokenizer.json": '{"added_tokens": [], "model": {"type": "No"}}', "tokenizer_config.json": GOOD}, "cannot"),
        (
            {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'},
            "runs only with trust_remote_code",
        ),
    ],
)
def test_a_folder_that_cannot_be_loaded(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert words.format(folder=tmp_path) in message
    assert "\n" not in message


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))
