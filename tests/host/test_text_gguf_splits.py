"""How texts are split before byte-level BPE, by the names in GGUF files: as the models' tokenizer.json files say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.text.gguf_pretokenizers import PRE_TOKENIZERS
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.gguf_tokenizers import SPLITS, bpe_with, write_gguf
from tests.support.tokenizer_folders import PARTS

TEXTS = st.one_of(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.text(" \nabZé語1'.", max_size=12))


@pytest.fixture(scope="module")
def splitters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Each known pre-tokenizer, with the same small vocabulary."""
    root = tmp_path_factory.mktemp("splits")
    return {name: load_tokenizer(write_gguf(root / f"{name}.gguf", bpe_with(pre=name))) for name in PRE_TOKENIZERS}


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(SPLITS)), TEXTS)
def test_texts_are_split_as_the_models_tokenizers_do(splitters: dict[str, Tokenizer], name: str, text: str) -> None:
    ours = splitters[name].rust.pre_tokenizer.pre_tokenize_str(text)
    assert ours == SPLITS[name].pre_tokenize_str(text)


def test_names_that_mean_the_same_and_splits_without_a_tokenizer_json(splitters: dict[str, Tokenizer]) -> None:
    for name, other in (("llama3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2"), ("minimax-m2", "gpt-4o")):
        assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[other]

    def parts(name: str, text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in splitters[name].rust.pre_tokenizer.pre_tokenize_str(text)]

    assert parts("default", "ab <1234> \u00b25") == ["ab", " ", "<", "123", "4", ">", " ", "\u00b25"]
    assert parts("falcon", "ab `1234 5") == ["ab", " ", "`", "123", "4", " 5"]
    assert parts("kimi-k2", "It\u4e2dx 12") == ["It", "\u4e2d", "x", " ", "12"]
    assert parts("gpt-4o", "It\u4e2dx 12") == ["It\u4e2dx", " ", "12"]
