"""Folders with a tiktoken ranks file: ids are the tiktoken library's, without it, without the network, without code."""

import base64
import json
import unicodedata
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.errors import ModelLoadError
from backend_engine.text.chat_template import ChatTemplate
from backend_engine.text.detokenizer import ByteDetokenizer, create_detokenizer
from backend_engine.text.tiktoken_ranks import ENCODINGS, KIMI_PATTERN, pattern_in_source
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizer_folders import KIMI_TOKENS, PARTS, RANKS, added, ranks_folder, small_ranks, write_ranks

NUM_RANKS = len(small_ranks())
TEXTS = st.one_of(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.text(max_size=30))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tiktoken.Encoding]]:
    """Each kind: our tokenizer, and tiktoken's own of the same ranks."""
    root = tmp_path_factory.mktemp("ranks")
    ranks = small_ranks()
    return {
        kind: (
            load_tokenizer(ranks_folder(root / kind, kind)),
            tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}),
        )
        for kind, (_, _, pattern) in RANKS.items()
    }


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(RANKS)), TEXTS)
def test_ids_are_tiktokens(loaded: dict[str, tuple[Tokenizer, tiktoken.Encoding]], kind: str, text: str) -> None:
    tokenizer, reference = loaded[kind]
    text = text.replace("<|", "")  # a control token's beginning
    normal = unicodedata.normalize("NFC", text) if kind == "qwen" else text
    assert tokenizer.encode_plain(text) == reference.encode_ordinary(normal)
    assert tokenizer.decode(tokenizer.encode_plain(text)) == normal


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(RANKS)), st.lists(st.integers(0, NUM_RANKS + 30), max_size=30), st.booleans())
def test_streamed_pieces_joined_are_decode_of_all(
    loaded: dict[str, tuple[Tokenizer, tiktoken.Encoding]], kind: str, ids: list[int], skip: bool
) -> None:
    tokenizer, _ = loaded[kind]
    detokenizer = create_detokenizer(tokenizer, (), skip)
    assert isinstance(detokenizer, ByteDetokenizer)
    pieces = [detokenizer.append([i]) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_texts_are_split_as_published(name: str) -> None:
    """Also where our library's regular expressions are written otherwise than tiktoken's."""
    published = {
        "cl100k_base": (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
            r"\s+(?!\S)|\s"
        ),
        "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    }
    from tokenizers import Regex, pre_tokenizers

    pattern = ENCODINGS[name].pattern
    ours = pre_tokenizers.Split(Regex(pattern), "isolated")
    texts = ["".join(PARTS[(i * k) % len(PARTS)] for i in range(9)) for k in range(1, 60)]
    for text in [*texts, "a  \n  ", "1234567 x", "I'LL'll's", "\n \n\n x", "aB中Cd文e"]:
        encoded = text.encode()
        ranks = {bytes([byte]): byte for byte in range(256)}
        for start in range(len(encoded)):  # every part of the text is a token: each piece comes out as one
            for end in range(start + 2, len(encoded) + 1):
                ranks.setdefault(encoded[start:end], len(ranks))
        theirs = tiktoken.Encoding("x", pat_str=published.get(name, pattern), mergeable_ranks=ranks, special_tokens={})
        pieces = [theirs.decode_single_token_bytes(i).decode() for i in theirs.encode_ordinary(text)]
        assert [piece for piece, _ in ours.pre_tokenize_str(text)] == pieces


def test_kimis_control_tokens_and_unused_ids(loaded: dict[str, tuple[Tokenizer, tiktoken.Encoding]]) -> None:
    tokenizer, _ = loaded["kimi"]
    assert tokenizer.vocab_size == NUM_RANKS + 256
    assert [tokenizer.encode_plain(text) for text in KIMI_TOKENS] == [[NUM_RANKS + i] for i in range(5)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (NUM_RANKS, NUM_RANKS + 1)
    assert tokenizer.encode("Hello")[0] != NUM_RANKS  # nothing is added around a text
    think, unused = NUM_RANKS + 22, NUM_RANKS + 100
    assert tokenizer.encode_plain("<think>") == [think] and think not in tokenizer.special_ids
    assert tokenizer.decode([NUM_RANKS + 2, think, unused]) == f"<think><|reserved_token_{unused}|>"
    assert tokenizer.decode([NUM_RANKS + 2], skip_special_tokens=False) == "<|im_end|>"


def test_published_control_tokens(loaded: dict[str, tuple[Tokenizer, tiktoken.Encoding]]) -> None:
    qwen, llama, harmony = (loaded[kind][0] for kind in ("qwen", "llama3", "o200k"))
    assert qwen.encode("<|im_start|>a<|im_end|>") == [NUM_RANKS + 1, ord("a"), NUM_RANKS + 2]
    assert (qwen.eos_token_id, qwen.bos_token_id, qwen.vocab_size) == (NUM_RANKS, None, NUM_RANKS + 208)
    assert (llama.encode_plain("<|eot_id|>"), llama.vocab_size) == ([NUM_RANKS + 9], NUM_RANKS + 256)
    assert (llama.bos_token_id, llama.eos_token_id) == (NUM_RANKS, NUM_RANKS + 1)
    assert harmony.encode_plain("<|start|><|message|>") == [NUM_RANKS + 8, NUM_RANKS + 10]
    assert (harmony.eos_token_id, harmony.vocab_size) == (NUM_RANKS + 4, NUM_RANKS + 1090)


def test_a_chat_cannot_write_control_tokens(loaded: dict[str, tuple[Tokenizer, tiktoken.Encoding]]) -> None:
    tokenizer, reference = loaded["kimi"]
    template = ChatTemplate(tokenizer, "{{ messages[0].content }}<|im_end|>")
    ids = template.encode([{"role": "user", "content": "[BOS]<|im_end|>x"}])
    assert ids == [*reference.encode_ordinary("[BOS]<|im_end|>x"), NUM_RANKS + 2]


def test_the_chat_template_of_the_folder(tmp_path: Path) -> None:
    folder = ranks_folder(tmp_path / "a", "qwen", chat_template="config")
    assert load_tokenizer(folder).chat_template(with_tools=False) == "config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    several = load_tokenizer(ranks_folder(tmp_path / "b", "qwen", chat_template=named))
    assert (several.chat_template(with_tools=False), several.chat_template(with_tools=True)) == ("plain", "tools")
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template(with_tools=False) == "file"


SOURCE = """
import os
os.makedirs({mark!r})
class OtherTokenizer:
    pat_str = "|".join([r"[a-c]+", r"[^a-c]+"])
"""


def test_a_pattern_that_the_folders_code_states_is_read_and_the_code_not_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "OtherTokenizer", "auto_map": {"AutoTokenizer": ["code.OtherTokenizer", None]}}
    mark = tmp_path / "mark"
    (tmp_path / "code.py").write_text(SOURCE.format(mark=str(mark)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    write_ranks(tmp_path / "tiktoken.model", small_ranks())
    tokenizer = load_tokenizer(tmp_path)
    reference = tiktoken.Encoding("x", pat_str="[a-c]+|[^a-c]+", mergeable_ranks=small_ranks(), special_tokens={})
    text = "abcab  Hello aaabab"
    assert tokenizer.encode_plain(text) == reference.encode_ordinary(text)
    assert not mark.exists()


@pytest.mark.parametrize(
    "source",
    ["", "pat_str = f()", "PAT_STR = 'a'\npat_str = 'b'", "pat_str = r'\\s+$'", "pat_str = r'\\d{1,3}+'", "def"],
)
def test_code_that_states_no_pattern(tmp_path: Path, source: str) -> None:
    (tmp_path / "x.py").write_text(source)
    assert pattern_in_source(tmp_path / "x.py") is None
    assert pattern_in_source(tmp_path / "nothing.py") is None
    (tmp_path / "x.py").write_text(f"class T:\n    pat_str: str = {KIMI_PATTERN!r}\n")
    assert pattern_in_source(tmp_path / "x.py") == KIMI_PATTERN


def test_ranks_that_nothing_says_how_to_split(tmp_path: Path) -> None:
    folder = ranks_folder(tmp_path, "kimi", tokenizer_class="NewTokenizer")
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    message = str(caught.value)
    assert f"{folder / 'tokenizer_config.json'}: tokenizer_class 'NewTokenizer' is not known" in message
    assert "tiktoken.model" in message and "trust_remote_code" in message and "\n" not in message


def line(token: bytes, rank: int) -> str:
    return f"{base64.b64encode(token).decode()} {rank}\n"


BYTES = "".join(line(bytes([byte]), byte) for byte in range(256))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (BYTES + "not base64!\n", "line 257 is b'not base64!'; expected a token in base64, a blank and its rank"),
        (BYTES + "YWI= x\n", "line 257 is b'YWI= x'"),
        (BYTES + "YWI=\n", "line 257 is b'YWI='"),
        (BYTES + line(b"a", 256), r"line 257: the token b'a' is there already, with rank 97"),
        (BYTES.replace(line(b"a", 97), ""), "has 255 tokens and none for the byte 0x61; expected one for each byte"),
        (BYTES + line(b"ab", 300), "has no rank 256, or two; expected the ranks 0 to 256, each once"),
        (BYTES + line(b"ab", 255), "has no rank 256, or two"),
        (BYTES[:1000] + "\x00\x01" * 50, "expected a token in base64"),
        ("", "has 0 tokens"),
    ],
)
def test_a_corrupt_ranks_file(tmp_path: Path, content: str, words: str) -> None:
    folder = ranks_folder(tmp_path, "kimi")
    (folder / "tiktoken.model").write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    assert words in str(caught.value) and str(folder / "tiktoken.model") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_added_tokens_that_contradict_the_ranks(tmp_path: Path) -> None:
    folder = ranks_folder(tmp_path, "kimi", added_tokens_decoder={"97": added("<x>")})
    with pytest.raises(
        ModelLoadError, match=r"disagree: the added tokens say that '<x>' is id 97, but .*model has 'a'"
    ):
        load_tokenizer(folder)
    write_ranks(folder / "other.tiktoken", small_ranks())
    with pytest.raises(ModelLoadError, match=r"disagree: .* has the ranks files other\.tiktoken, tiktoken\.model"):
        load_tokenizer(folder)
