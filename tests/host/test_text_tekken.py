"""Folders with a tekken.json: ids are those of tiktoken behind the control tokens."""

from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.errors import ModelLoadError
from backend_engine.text.detokenizer import create_detokenizer
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizer_folders import NUM_TEKKEN_SPECIAL, PARTS, TEKKEN_PATTERN, small_ranks, tekken_folder

RANKS = dict(list(small_ranks().items())[:-10])
REFERENCE = tiktoken.Encoding("tekken", pat_str=TEKKEN_PATTERN, mergeable_ranks=RANKS, special_tokens={})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a file that does not list its control tokens."""
    return load_tokenizer(tekken_folder(tmp_path_factory.mktemp("tekken")))


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.text(max_size=20)))
def test_ids_are_tiktokens_behind_the_control_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = [i + NUM_TEKKEN_SPECIAL for i in REFERENCE.encode_ordinary(text)]
    assert tokenizer.encode_plain(text) == ids
    assert tokenizer.encode(text) == [1, *ids]
    detokenizer = create_detokenizer(tokenizer)
    pieces = [detokenizer.append([i]) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids) == text


def test_control_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode("[INST]a[/INST]<SPECIAL_25>")[1:] == [3, ord("a") + NUM_TEKKEN_SPECIAL, 4, 25]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == len(RANKS) + NUM_TEKKEN_SPECIAL
    listed = [
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 7, "token_str": "[ODD]", "is_control": True},
    ]
    other = load_tokenizer(tekken_folder(tmp_path, special_tokens=listed))
    assert other.encode("[ODD]<SPECIAL_2>") == [1, 7, 2]
    assert (other.bos_token_id, other.eos_token_id, other.vocab_size) == (1, None, tokenizer.vocab_size)


GOOD = {"pattern": TEKKEN_PATTERN, "default_vocab_size": 700, "default_num_special_tokens": 30}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"config": None}, "config is NoneType; expected an object"),
        ({"config": GOOD | {"pattern": r"\s+$"}}, r"config.pattern is '\\s+$'; expected a regular expression"),
        ({"config": GOOD | {"default_vocab_size": "x"}}, "config.default_vocab_size is 'x'; expected an integer"),
        ({"config": GOOD | {"default_vocab_size": 9999}}, "vocab has 700 tokens; expected 9969 or more"),
        ({"vocab": []}, "vocab has 0 tokens"),
        ({"vocab": [{"rank": 0, "token_bytes": "!"}] * 700}, "vocab[0] is {'rank': 0, 'token_bytes': '!'}; expected"),
        ({"vocab": [{"rank": 0, "token_bytes": "AA=="}] * 700}, r"vocab[1] has the token b'\x00' a second time"),
        ({"special_tokens": [{"rank": 99, "token_str": "x"}]}, "special_tokens[0] is {'rank': 99, 'token_str': 'x'}"),
        ({"special_tokens": [{"rank": i, "token_str": "x"} for i in (1, 2)]}, "has a token_str twice"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, state: dict[str, Any], words: str) -> None:
    folder = tekken_folder(tmp_path, **state)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    assert words in str(caught.value) and str(folder / "tekken.json") in str(caught.value)
    assert "\n" not in str(caught.value)
