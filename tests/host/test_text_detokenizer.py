"""Incremental detokenizing: whatever the ids and however they arrive, the pieces joined are ``decode`` of them all."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from backend_engine.text.detokenizer import (
    ByteDetokenizer,
    CleaningDetokenizer,
    StepDetokenizer,
    TextDetokenizer,
    WindowedDetokenizer,
    create_detokenizer,
)
from backend_engine.text.token_table import byte_level_alphabet
from backend_engine.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import (
    ODD_DECODERS,
    ODD_TOKENS,
    SENTENCEPIECE_DECODERS,
    odd,
    python_decoded,
    sentencepiece_like,
    unigram,
    word_piece,
)
from tests.support.table_model import build_tokenizer

FORCED_CLEAN_UP = {
    "clean_up_tokenization_spaces": True,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
}
TOKENIZERS = {
    "byte_level": Tokenizer(build_tokenizer()),
    **{name: Tokenizer(sentencepiece_like(name)) for name in SENTENCEPIECE_DECODERS},
    "unigram": Tokenizer(unigram()),
    "cleaned_unigram": Tokenizer(unigram(clean_up_tokenization_spaces=True)),
    "cleaned_llama": Tokenizer(sentencepiece_like("llama", **FORCED_CLEAN_UP)),
    "uncleaned_llama": Tokenizer(sentencepiece_like("llama", clean_up_tokenization_spaces=True)),
    "word_piece": Tokenizer(word_piece()),
    "cleaned_word_piece": Tokenizer(word_piece(clean_up_tokenization_spaces=True)),
}
REFERENCES = {
    "byte_level": build_tokenizer(),
    **{name: sentencepiece_like(name) for name in SENTENCEPIECE_DECODERS},
    "word_piece": word_piece(),
    "cleaned_word_piece": word_piece(clean_up_tokenization_spaces=True),
    "cleaned_unigram": unigram(clean_up_tokenization_spaces=True),
    "cleaned_llama": sentencepiece_like("llama", **FORCED_CLEAN_UP),
    "uncleaned_llama": sentencepiece_like("llama", clean_up_tokenization_spaces=True),
}
NAMES = sorted(TOKENIZERS)
BYTES_IN_PYTHON = ByT5Tokenizer()
IN_BYTES = "🦙 café €語\u0301"


def pieces_of(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int] = (), prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """Pieces when ``ids`` arrive in runs that end at ``cuts``; one at a time without cuts."""
    detokenizer = create_detokenizer(tokenizer, prompt, skip)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))}) if cuts else list(range(len(ids) + 1))
    pieces = [detokenizer.append(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


@st.composite
def id_lists(draw: st.DrawFn) -> tuple[str, list[int], list[int], bool]:
    """A tokenizer and ids for it: any ids, with many bytes (so that characters form and break), specials, strays."""
    name = draw(st.sampled_from(NAMES))
    tokenizer = TOKENIZERS[name]
    byte_ids = {"byte_level": range(256)}.get(name, range(5, 261))
    characters = [[byte_ids[b] for b in c.encode()] for c in IN_BYTES] if len(byte_ids) <= tokenizer.vocab_size else []
    any_id = st.integers(0, tokenizer.vocab_size + 2).map(lambda i: [i])
    special = st.sampled_from(sorted(tokenizer.special_ids)).map(lambda i: [i])
    last_words = st.integers(max(tokenizer.vocab_size - 60, 0), tokenizer.vocab_size - 1).map(lambda i: [i])
    byte = st.sampled_from([[i] for i in byte_ids])
    part = st.one_of(any_id, special, last_words, byte, *([st.sampled_from(characters)] if characters else []))
    ids = [i for group in draw(st.lists(part, max_size=24)) for i in group]
    return name, ids, draw(st.lists(st.integers(0, 40), max_size=6)), draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(id_lists())
def test_pieces_joined_are_decode_of_all(case: tuple[str, list[int], list[int], bool]) -> None:
    name, ids, cuts, skip = case
    tokenizer = TOKENIZERS[name]
    expected = tokenizer.decode(ids, skip)
    assert "".join(pieces_of(tokenizer, ids, skip=skip)) == expected
    assert "".join(pieces_of(tokenizer, ids, cuts or (3,), skip=skip)) == expected
    if name in REFERENCES:
        assert expected == REFERENCES[name].decode(ids, skip_special_tokens=skip)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMES), st.text(" abHelo.n'té語🦙", min_size=1, max_size=20), id_lists())
def test_text_after_a_prompt_is_its_continuation(
    name: str, prompt: str, case: tuple[str, list[int], list[int], bool]
) -> None:
    """Up to the prompt's last whole token: blanks are kept, and what the prompt says doesn't come out."""
    tokenizer = TOKENIZERS[name]
    prompt_ids = tokenizer.encode(prompt + " Hello")
    ids = [i for i in case[1] if i < tokenizer.vocab_size]
    whole, beginning = tokenizer.decode_raw(prompt_ids + ids), tokenizer.decode_raw(prompt_ids)
    assert whole.startswith(beginning)
    if not tokenizer.cleans_up_spaces:
        assert "".join(pieces_of(tokenizer, ids, prompt=prompt_ids)) == whole[len(beginning) :]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.text(IN_BYTES + "abc", max_size=30))
def test_no_piece_of_a_real_text_holds_a_replacement_mark(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode_plain(text)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces_of(tokenizer, ids))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("byte_level", ByteDetokenizer),
        *((name, TextDetokenizer) for name in SENTENCEPIECE_DECODERS),
        ("unigram", TextDetokenizer),
        ("uncleaned_llama", TextDetokenizer),
        ("cleaned_llama", CleaningDetokenizer),
        ("cleaned_unigram", CleaningDetokenizer),
        ("word_piece", StepDetokenizer),
    ],
)
def test_the_common_kinds_never_decode_again(name: str, kind: type) -> None:
    assert type(create_detokenizer(TOKENIZERS[name])) is kind


@pytest.mark.parametrize("name", SENTENCEPIECE_DECODERS)
def test_words_keep_their_blanks(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode_plain("Hello big world")
    if name == "metaspace_never":
        assert "".join(pieces_of(tokenizer, ids)) == " Hello big world"
    else:
        assert "".join(pieces_of(tokenizer, ids)).strip() == "Hello big world"
    after_prompt = pieces_of(tokenizer, tokenizer.encode_plain("x world")[-1:], prompt=tokenizer.encode("the big"))
    assert "".join(after_prompt) == " world"


def test_the_begin_token_alone_does_not_count_as_text_before() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer.encode_plain("Hello big")
    assert "".join(pieces_of(tokenizer, ids, prompt=tokenizer.encode(""))) == "Hello big"
    assert "".join(pieces_of(tokenizer, ids, prompt=tokenizer.encode("the"))) == " Hello big"


def test_byte_level_holds_back_unfinished_characters_only() -> None:
    detokenizer = create_detokenizer(TOKENIZERS["byte_level"])
    assert [detokenizer.append([byte]) for byte in "é🦙!".encode()] == ["", "é", "", "", "", "🦙", "!"]
    assert detokenizer.flush() == ""
    assert [detokenizer.append([byte]) for byte in (0xE2, 0x82, ord("x"))] == ["", "", "\ufffdx"]
    assert (detokenizer.append([0xF0, 0x9F]), detokenizer.flush()) == ("", "\ufffd")


def test_a_run_of_byte_tokens_is_text_or_not_as_a_whole() -> None:
    tokenizer = TOKENIZERS["gemma"]
    word = tokenizer.encode_plain("Hello")[-1]
    run = [5 + byte for byte in "🦙".encode()]
    detokenizer = create_detokenizer(tokenizer)
    assert [detokenizer.append([i]) for i in (*run, word)] == ["", "", "", "", "🦙Hello"]
    broken = create_detokenizer(tokenizer)
    assert broken.append([*run, 5 + 0xFF]) == ""
    assert broken.append([word]) == "\ufffd" * 5 + "Hello"
    assert (broken.append(run), broken.flush()) == ("", "🦙")


def test_special_tokens_inside_a_run_of_bytes_do_not_break_it_when_skipped() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [5 + 0xE2, 1, 5 + 0x82, 10_000, 5 + 0xAC]
    assert "".join(pieces_of(tokenizer, ids)) == "€"
    assert "".join(pieces_of(tokenizer, ids, skip=False)) == "\ufffd<s>\ufffd\ufffd"


@pytest.mark.parametrize("build", [build_tokenizer, sentencepiece_like, word_piece])
def test_ids_outside_the_vocabulary_give_no_text(build: object) -> None:
    tokenizer = Tokenizer(build())  # type: ignore[operator]
    assert "".join(pieces_of(tokenizer, [-1, tokenizer.vocab_size, 10**6, 2**31])) == ""


ODD = {
    (name, cleanup): Tokenizer(odd(name, clean_up_tokenization_spaces=cleanup))
    for name in ODD_DECODERS
    for cleanup in (False, True)
}


@pytest.mark.parametrize("name", ODD_DECODERS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-1, len(ODD_TOKENS) + 1), max_size=30),
    st.lists(st.integers(0, 30), max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_any_decoder_of_the_library(name: str, ids: list[int], cuts: list[int], cleanup: bool, skip: bool) -> None:
    tokenizer = ODD[name, cleanup]
    if name == "strip_end":
        ids = [ODD_TOKENS.index("hello"), *ids]
    expected = tokenizer.decode(ids, skip)
    known = [i for i in ids if i >= 0]
    assert expected == odd(name, clean_up_tokenization_spaces=cleanup).decode(known, skip_special_tokens=skip)
    for pieces in (pieces_of(tokenizer, ids, skip=skip), pieces_of(tokenizer, ids, cuts or (3,), skip=skip)):
        assert "".join(pieces) == expected
        assert "\ufffd" in expected or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(set(ODD_DECODERS) - {"regex_over_text", "byte_level_twice", "fused_ctc"})),
    st.lists(st.integers(3, len(ODD_TOKENS) - 1), max_size=12),
    st.lists(st.integers(3, len(ODD_TOKENS) - 1), max_size=12),
)
def test_any_decoder_goes_on_after_a_prompt(name: str, prompt: list[int], ids: list[int]) -> None:
    """Where the whole text begins with the prompt's own text."""
    tokenizer = ODD[name, False]
    prompt += [ODD_TOKENS.index("world")]
    whole, beginning = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
    if whole.startswith(beginning):
        assert "".join(pieces_of(tokenizer, ids, prompt=[*prompt, 1, 2])) == whole[len(beginning) :]


def test_rewriting_that_several_tokens_make_up() -> None:
    def joined(name: str, *tokens: str, prompt: Sequence[str] = ()) -> str:
        ids, prompt_ids = ([ODD_TOKENS.index(token) for token in part] for part in (tokens, prompt))
        return "".join(pieces_of(ODD[name, False], ids, prompt=prompt_ids))

    assert joined("fused_metaspace", "hello", " ", "do", " ", "not") == "hello don't"
    assert joined("replace_long", "aa", "b", "</", "w", ">", "a") == "-a"
    assert joined("word_ends", "a", prompt=["lo</w>"]) == " a"
    assert joined("word_ends", "b", prompt=["a"]) == "b"
    assert joined("word_piece", "a", "##s", prompt=["hello", "<s>"]) == " as"


def test_only_what_may_change_is_held_back() -> None:
    def pieces(name: str, *tokens: str, cleanup: bool = False) -> list[str]:
        return pieces_of(ODD[name, cleanup], [ODD_TOKENS.index(token) for token in tokens])

    assert pieces("word_piece", "hello", "##ing", "world", ".") == ["hello", "ing", " world", " .", ""]
    assert pieces("word_piece_cleanup", "do", "n't", ".") == ["do", "n't", ".", ""]
    assert pieces("word_piece", "do", "n", "n't", "a", ".", cleanup=True) == ["do", "", " nn't", " a", ".", ""]
    assert pieces("word_ends", "lo</w>", "a", ".</w>") == ["lo", " a", ".", ""]
    assert pieces("ctc", "a", "a", "<pad>", "a", "|") == ["a", "", "", "a", " ", ""]
    assert pieces("replace_long", "a", "a", "b", "a") == ["", "", "", "", "<a"]
    assert pieces("regex_over_text", "b", "a") == ["", "", "xbx"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 11), max_size=150), st.booleans())
def test_a_decoder_in_python_is_decoded_by_windows(ids: list[int], cleanup: bool) -> None:
    tokenizer = Tokenizer(python_decoded(clean_up_tokenization_spaces=cleanup))
    assert tokenizer.token_table() is None
    inner = create_detokenizer(tokenizer)
    assert type(inner) is (CleaningDetokenizer if cleanup else WindowedDetokenizer)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=20), st.lists(st.integers(-2, 400), max_size=40))
def test_a_tokenizer_in_python_is_decoded_by_windows(text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer(BYTES_IN_PYTHON)
    for sequence in (ids, tokenizer.encode_plain(text)):
        assert "".join(pieces_of(tokenizer, sequence)) == tokenizer.decode(sequence)


@pytest.mark.parametrize("build", [word_piece, python_decoded])
def test_a_word_after_a_prompt_continues_it(build: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(build())
    assert "".join(pieces_of(tokenizer, [4, 2], prompt=[1, 1, 2])) == " worlding"
    assert "".join(pieces_of(tokenizer, [4, 2], prompt=[4])) == " worlding"
    assert "".join(pieces_of(tokenizer, [4, 2])) == "worlding"


def test_tokens_in_symbols_of_the_byte_alphabet_and_outside_it() -> None:
    """Added tokens are spelled as they are: one with a blank stands for itself, one in the alphabet is bytes."""
    assert byte_level_alphabet()["Ġ"] == ord(" ")
    fast = build_tokenizer()
    fast.add_tokens(["two words", "ok"])
    tokenizer = Tokenizer(fast)
    ids = [tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "two wordsok"


def test_tables_are_built_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert tokenizer.token_table() is tokenizer.token_table()
