"""GGUF files as tokenizers: which paths are taken, and that each fault of a file is one line naming file and key."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from backend_engine.errors import ModelLoadError
from backend_engine.text.tokenizer import check_same_tokenizer, load_tokenizer
from tests.support.gguf_tokenizers import bpe_with, trained, write_gguf


def test_what_a_path_may_be(tmp_path: Path) -> None:
    values = bpe_with()
    expected = load_tokenizer(write_gguf(tmp_path / "one" / "m.gguf", values)).encode("Hello world")
    write_gguf(tmp_path / "one" / "mmproj-m.gguf", {"general.type": "mmproj"})
    assert load_tokenizer(str(tmp_path / "one")).encode("Hello world") == expected
    write_gguf(tmp_path / "split" / "m-00001-of-00002.gguf", values)
    write_gguf(tmp_path / "split" / "m-00002-of-00002.gguf", {"split.no": 1})
    for path in (
        tmp_path / "split",
        tmp_path / "split" / "m-00001-of-00002.gguf",
        tmp_path / "split" / "m-00002-of-00002.gguf",
    ):
        assert load_tokenizer(path).encode("Hello world") == expected
    check_same_tokenizer(load_tokenizer(tmp_path / "one"), tmp_path / "one", tmp_path / "split")
    beside = trained("smollm")
    beside.save_pretrained(tmp_path / "one")
    assert load_tokenizer(tmp_path / "one").vocabulary() == beside.get_vocab()  # a tokenizer.json comes first
    (tmp_path / "split" / "m-00001-of-00002.gguf").unlink()
    for path in (tmp_path / "split", tmp_path / "split" / "m-00002-of-00002.gguf"):
        with pytest.raises(
            ModelLoadError, match=r"m-00001-of-00002\.gguf does not belong to a whole model; expected 2"
        ):
            load_tokenizer(path)
    write_gguf(tmp_path / "split" / "other.gguf", values)
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF models \(m-00002-of-00002\.gguf, other\.gguf\)"):
        load_tokenizer(tmp_path / "split")
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf does not exist"):
        load_tokenizer(tmp_path / "nowhere.gguf")


SIZE = 389
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; expected one of llama, gpt2, t5"),
    ({"model": None}, "tokenizer.ggml.model is missing; expected a text"),
    ({"pre": "made-up"}, "tokenizer.ggml.pre is 'made-up'; expected one of default, falcon, "),
    ({"pre": None}, "tokenizer.ggml.pre is missing; expected one of default, falcon, "),
    ({"pre": 5}, "tokenizer.ggml.pre is 5; expected a text"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing; expected an array of texts"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is an array of 2; expected an array of texts"),
    ({"token_type": [1] * 7}, f"token_type is an array of 7; expected one value for each of the {SIZE} tokens"),
    ({"token_type": None}, "tokenizer.ggml.token_type is missing; expected an array of integers"),
    ({"token_type": [0.5] * SIZE}, f"token_type is an array of {SIZE}; expected an array of integers"),
    ({"token_type": [9] * SIZE}, "tokenizer.ggml.token_type[0] is 9; expected 1 to 6"),
    ({"tokens": ["a"] * SIZE}, "tokenizer.ggml.tokens[1] is 'a', which is token 0 already; expected each once"),
    ({"model": "llama"}, "tokenizer.ggml.scores is missing; expected an array of numbers"),
    ({"model": "t5", "scores": [0.5]}, "tokenizer.ggml.scores is an array of 1; expected one value for each of the"),
    ({"merges": None}, "tokenizer.ggml.merges is missing; expected an array of texts"),
    ({"merges": ["q H"]}, "tokenizer.ggml.merges[0] is 'q H'; expected two tokens that make a third"),
    ({"merges": ["ab"]}, "tokenizer.ggml.merges[0] is 'ab'; expected two tokens that make a third"),
    ({"bos_token_id": SIZE}, f"tokenizer.ggml.bos_token_id is {SIZE}; expected an id below {SIZE}"),
    ({"eot_token_id": "x"}, "tokenizer.ggml.eot_token_id is 'x'; expected an integer of at least 0"),
    ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is True; expected false, since there is no token"),
    ({"add_eos_token": 1}, "tokenizer.ggml.add_eos_token is 1; expected true or false"),
]


@pytest.mark.parametrize(("more", "words"), REFUSALS)
def test_refusals_name_file_and_key(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", bpe_with(**more))
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(path)
    message = str(caught.value)
    assert words in message and message.startswith(f"{path}: ") and "\n" not in message


def test_a_chat_template_that_is_no_text(tmp_path: Path) -> None:
    for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use"):
        path = write_gguf(tmp_path / "a.gguf", bpe_with() | {key: 5})
        with pytest.raises(ModelLoadError, match=f"{path}: {re.escape(key)} is 5; expected a text"):
            load_tokenizer(path)


def patched(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    return path


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", bpe_with() | {"tokenizer.chat_template": "PLAIN"})
    patched(path, b"\x07\0\0\0\0\0\0\0<think>", b"\x07\0\0\0\0\0\0\0<th\xffnk>")
    with pytest.raises(
        ModelLoadError, match=rf"{path}: tokenizer\.ggml\.tokens\[\d+\] is b'<th.*; expected UTF-8 text"
    ):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "b.gguf", bpe_with() | {"tokenizer.chat_template": "PLAIN"})
    patched(path, b"PLAIN", b"PL\xffIN")
    with pytest.raises(ModelLoadError, match=rf"{path}: tokenizer\.chat_template is b'PL.*; expected UTF-8 text"):
        load_tokenizer(path)


def test_broken_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", bpe_with()).read_bytes()
    tokens_at = whole.index(b"tokenizer.ggml.tokens") + 21
    broken = {
        "is empty; expected a GGUF file": b"",
        "begins with b'PK'": b"PK",
        "has GGUF version 1; expected version 2 or 3": whole[:4] + struct.pack("<I", 1) + whole[8:],
        "is big-endian; expected version 2 or 3, little-endian": whole[:4] + struct.pack(">I", 3) + whole[8:],
        "tokenizer.ggml.tokens is an array of type 9; expected 0 to 8": (
            whole[: tokens_at + 4] + struct.pack("<I", 9) + whole[tokens_at + 8 :]
        ),
        "tokenizer.ggml.tokens is a value of type 77": whole[:tokens_at]
        + struct.pack("<I", 77)
        + whole[tokens_at + 4 :],
        "tokenizer.ggml.tokens goes on behind them": (
            whole[: tokens_at + 8] + struct.pack("<Q", 1 << 60) + whole[tokens_at + 16 :]
        ),
        "general.architecture is there twice": whole.replace(b"tokenizer.ggml.model", b"general.architecture"),
        "is called b'tokenizer.ggml.mod\\xffl'": whole.replace(b"ggml.model", b"ggml.mod\xffl"),
    }
    path = tmp_path / "broken.gguf"
    for words, data in broken.items():
        path.write_bytes(data)
        with pytest.raises(ModelLoadError) as caught:
            load_tokenizer(path)
        message = str(caught.value)
        assert words in message and message.startswith(str(path)) and "\n" not in message
    for size in [*range(0, 400, 7), *range(400, len(whole) - 40, 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(
            ModelLoadError, match=f"{path} (is cut off or corrupt: it has {size} bytes|is empty|begins)"
        ):
            load_tokenizer(path)
