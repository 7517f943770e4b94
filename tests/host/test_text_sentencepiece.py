"""Folders with a SentencePiece model and no tokenizer.json: ids are that library's, however the model was trained."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils import sentencepiece_model_pb2_new

from backend_engine.errors import ModelLoadError
from backend_engine.text.detokenizer import TextDetokenizer, create_detokenizer
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizer_folders import SENTENCEPIECE_PARTS, added, sentencepiece_folder

USER_PIECES = ["<sep>", "<|sys|>", "ab▁c"]
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "gemma": {
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
        "user_defined_symbols": USER_PIECES,
    },
    "default": {"byte_fallback": False},
    "trimmed": {"normalization_rule_name": "identity", "user_defined_symbols": USER_PIECES},
    "no_bytes": {"byte_fallback": False, "add_dummy_prefix": False, "remove_extra_whitespaces": False},
}  # fmt: skip
KINDS = list(itertools.product(("unigram", "bpe"), SETTINGS))
Loaded = dict[tuple[str, str], tuple[Tokenizer, sentencepiece.SentencePieceProcessor]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Each algorithm with each settings: our tokenizer, and SentencePiece's own of the same model."""
    found: Loaded = {}
    for algorithm, name in KINDS:
        folder = tmp_path_factory.mktemp(f"{algorithm}-{name}")
        _, processor = sentencepiece_folder(folder, algorithm, **SETTINGS[name])
        found[algorithm, name] = load_tokenizer(folder), processor
    return found


TEXTS = st.one_of(
    st.lists(st.sampled_from(SENTENCEPIECE_PARTS), max_size=12).map("".join), st.text(" abé語▁\n", max_size=9)
)


def is_tie(algorithm: str, ids: list[int], others: list[int]) -> bool:
    """Whether both are equally good by a unigram model: the same pieces in another order.

    SentencePiece adds scores up as float32 from left to right, so rounding decides there which one it takes.
    """
    return algorithm == "unigram" and sorted(ids) == sorted(others)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(KINDS), TEXTS, st.booleans())
@example(("unigram", "gemma"), "中文x.中文中文中文", True)  # a tie: 中文 before 中文中文, or behind it
@example(("bpe", "gemma"), "<0x41>", False)  # spelled as the piece of a byte, and none
@example(("bpe", "trimmed"), "<0x0A>", False)
def test_ids_are_sentencepieces(loaded: Loaded, kind: tuple[str, str], text: str, with_piece: bool) -> None:
    tokenizer, processor = loaded[kind]
    text = text.replace("</s>", "")  # a control token in our text, and no text in theirs
    if with_piece:
        text = f"{text[:3]}<sep>{text[3:]}ab c"
    ids = tokenizer.encode_plain(text)
    expected = processor.encode(text)
    assert ids == expected or is_tie(kind[0], ids, expected)
    if kind[1] in ("llama", "gemma"):
        assert tokenizer.decode(ids) == processor.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 370), max_size=30), st.lists(TEXTS, max_size=2), st.booleans())
def test_streamed_pieces_joined_are_decode_of_all(
    loaded: Loaded, kind: tuple[str, str], strays: list[int], texts: list[str], skip: bool
) -> None:
    tokenizer, _ = loaded[kind]
    ids = [*strays, *(i for text in texts for i in tokenizer.encode_plain(text)), *strays[:3]]
    detokenizer = create_detokenizer(tokenizer, (), skip)
    assert isinstance(detokenizer, TextDetokenizer)
    pieces = [detokenizer.append([i]) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_scores_decide_and_not_the_order_of_the_pieces(tmp_path: Path, algorithm: str) -> None:
    folder, usual = sentencepiece_folder(tmp_path, algorithm, **SETTINGS["llama"])
    path = folder / "tokenizer.model"
    model = sentencepiece_model_pb2_new.ModelProto.FromString(path.read_bytes())
    scores = [piece.score for piece in model.pieces if piece.type == 1]
    for piece, score in zip((p for p in model.pieces if p.type == 1), reversed(scores), strict=True):
        piece.score = score
    path.write_bytes(model.SerializeToString())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(folder)
    texts = ["".join(parts) for parts in itertools.permutations(("abc", "hello", " ", "then", "world"), 4)]
    for text in texts:
        assert tokenizer.encode_plain(text) == processor.encode(text)
    assert any(processor.encode(text) != usual.encode(text) for text in texts)


def test_a_user_piece_of_a_control_tokens_shape_is_one(loaded: Loaded) -> None:
    """Which a chat message cannot write, whatever SentencePiece does."""
    for kind in (("unigram", "gemma"), ("unigram", "trimmed"), ("bpe", "trimmed")):
        tokenizer, _ = loaded[kind]
        ids = tokenizer.encode_literal("ab<|sys|>c", [])
        assert tokenizer.decode(ids) == "ab<|sys|>c" and tokenizer.control_tokens["<|sys|>"] not in ids
    tokenizer, processor = loaded["bpe", "gemma"]
    token_id = processor.piece_to_id("<|sys|>")
    assert tokenizer.control_tokens["<|sys|>"] == token_id and token_id not in tokenizer.special_ids
    assert tokenizer.encode_plain("a<|sys|>b") == processor.encode("a<|sys|>b")
    assert token_id not in tokenizer.encode_literal("a<|sys|>b", [])


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
@pytest.mark.parametrize(
    ("config", "around"),
    [
        (None, ([1], [])),
        ({}, ([1], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"add_bos_token": False}, ([], [])),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "</s>"}, ([2], [])),
        ({"bos_token": None}, ([], [])),
    ],
)
def test_begin_and_end_tokens(
    tmp_path: Path, algorithm: str, config: dict[str, Any] | None, around: tuple[list[int], list[int]]
) -> None:
    """Prompts are to be continued, so that an end token is known and not put there."""
    folder, processor = sentencepiece_folder(tmp_path, algorithm, config, **SETTINGS["llama"])
    tokenizer = load_tokenizer(folder)
    plain = processor.encode("hello world")
    assert tokenizer.encode("hello world") == [*around[0], *plain]
    assert tokenizer.rust.encode("hello world").ids == [*around[0], *plain, *around[1]]
    assert tokenizer.encode("hello world", add_special_tokens=False) == plain
    assert tokenizer.has_end_token is bool(around[1])
    assert tokenizer.eos_token_id == 2


def test_the_blank_before_a_text_between_control_tokens(tmp_path: Path) -> None:
    folder, processor = sentencepiece_folder(tmp_path / "a", "bpe", {}, **SETTINGS["llama"])
    hello = processor.encode("hello")
    assert load_tokenizer(folder).encode_plain("</s>hello</s>hello") == [2, *hello, 2, *hello]
    folder, _ = sentencepiece_folder(tmp_path / "b", "bpe", {"legacy": False}, **SETTINGS["llama"])
    later = load_tokenizer(folder).encode_plain("hello</s>hello")
    assert later[: len(hello) + 1] == [*hello, 2] and later[len(hello) + 1 :] != hello
    folder, _ = sentencepiece_folder(tmp_path / "c", "bpe", {"add_prefix_space": False}, **SETTINGS["llama"])
    without = load_tokenizer(folder)
    assert without.encode_plain("hello") == later[len(hello) + 1 :]
    assert without.decode(without.encode_plain(" hello")) == " hello"


def test_added_tokens_beyond_the_model(tmp_path: Path) -> None:
    tokens = {
        "1": added("<s>"),
        "360": added("<|im_end|>", normalized=True),
        "363": added("<tool>", special=False, lstrip=True),
    }
    config = {"added_tokens_decoder": tokens, "eos_token": "<|im_end|>", "pad_token": "</s>"}
    folder, processor = sentencepiece_folder(tmp_path, "bpe", config, **SETTINGS["llama"])
    assert len(processor) <= 360
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_plain("<|im_end|>  <tool>") == [360, 363]  # lstrip takes the blanks
    hello = processor.encode("hello")
    assert tokenizer.encode_plain("hello<|im_end|>hello") == [*hello, 360, *hello]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (360, 2, 364)
    assert 360 in tokenizer.special_ids and 363 not in tokenizer.special_ids
    assert tokenizer.decode([363, 360]) == "<tool>"


def test_a_placeholder_piece_gets_the_name_that_the_folder_gives_it(tmp_path: Path) -> None:
    _, processor = sentencepiece_folder(tmp_path / "a", "unigram", **SETTINGS["gemma"])
    token_id = processor.piece_to_id("<sep>")
    config = {"added_tokens_decoder": {str(token_id): added("<|im_start|>")}}
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path / "b", "unigram", config, **SETTINGS["gemma"])[0])
    assert tokenizer.encode_plain("<|im_start|>") == [token_id]
    text_id = processor.piece_to_id("a")
    config = {"added_tokens_decoder": {str(text_id): added("<x>")}}
    folder, _ = sentencepiece_folder(tmp_path / "c", "unigram", config, **SETTINGS["gemma"])
    with pytest.raises(ModelLoadError, match=rf"disagree: .*added_tokens_decoder says that '<x>' is id {text_id}, but"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x01\x02", "is corrupt or no SentencePiece model"),
        (b"", "is no SentencePiece model: it has no pieces"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is corrupt or no SentencePiece model"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(tmp_path)
    assert f"{tmp_path / 'tokenizer.model'} {words}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_that_is_cut_off_or_of_a_kind_that_is_not_built(tmp_path: Path) -> None:
    folder, _ = sentencepiece_folder(tmp_path / "cut", "bpe", **SETTINGS["llama"])
    path = folder / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model is corrupt"):
        load_tokenizer(folder)
    folder, _ = sentencepiece_folder(tmp_path / "char", "char", **SETTINGS["llama"])
    with pytest.raises(ModelLoadError, match=r"model_type is char, which is not built; expected unigram or bpe"):
        load_tokenizer(folder)
    folder, _ = sentencepiece_folder(tmp_path / "suffix", "bpe", treat_whitespace_as_suffix=True, **SETTINGS["llama"])
    with pytest.raises(ModelLoadError, match=r"treat_whitespace_as_suffix is true, which is not built"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["add_bos_token", "legacy"])
def test_a_flag_that_is_none(tmp_path: Path, name: str) -> None:
    folder, _ = sentencepiece_folder(tmp_path, "bpe", {name: "yes"}, **SETTINGS["llama"])
    with pytest.raises(ModelLoadError, match=rf"tokenizer_config\.json: {name} is 'yes'; expected true or false"):
        load_tokenizer(folder)
