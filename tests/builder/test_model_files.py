"""What is written beside the weights: the same tokenizer for every kind of source, and nothing that could be run."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from backend_engine.builder.model_files import check_model_files, write_model_files
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.errors import ConfigError
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.gguf_tokenizers import TEMPLATE, bpe_with, sentencepiece_values, write_gguf
from tests.support.small_tokenizers import sentencepiece_like, unigram, word_piece
from tests.support.table_model import build_tokenizer
from tests.support.tokenizer_folders import PARTS, added, ranks_folder, sentencepiece_folder, tekken_folder

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "name": "é"}


def checkpoint(path: Path, **settings: Any) -> Checkpoint:
    return Checkpoint(path, "hugging_face", CONFIG, list, **settings)


def written(path: Path, output: Path, **settings: Any) -> Tokenizer:
    """Write, and open what was written where its source is not any more."""
    output.mkdir()
    assert write_model_files(checkpoint(path), output, CONFIG, **settings) == ()
    path.rename(path.with_name("away"))
    assert not [file for file in output.rglob("*") if file.is_dir() or file.suffix == ".py"]
    return load_tokenizer(output)


def check_same(one: Tokenizer, other: Tokenizer) -> None:
    assert one.vocabulary() == other.vocabulary() and one.control_tokens == other.control_tokens
    for text in ("".join(PARTS), *PARTS, "<s>hello</s>", " I'LL  be 12345 "):
        assert one.encode(text) == other.encode(text), text
        assert one.decode(one.encode(text)) == other.decode(other.encode(text)), text
    for with_tools in (False, True):
        assert one.chat_template(with_tools) == other.chat_template(with_tools)


def llama_folder(folder: Path) -> None:
    build_tokenizer().save_pretrained(folder)


def kimi_folder(folder: Path) -> None:
    ranks_folder(folder, "kimi")
    (folder / "tokenization_kimi.py").write_text("pat_str = '|'.join([r'[a-z]+', r'.'])\nraise SystemError\n")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def byt5_folder(folder: Path) -> None:
    """No vocabulary at all, and a tokenizer in Python."""
    ByT5Tokenizer().save_pretrained(folder)


def many_templates(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()


FOLDERS: dict[str, Any] = {
    "tokenizer.json": llama_folder,
    "wordpiece": lambda folder: word_piece().save_pretrained(folder),
    "unigram": lambda folder: unigram().save_pretrained(folder),
    "llama": lambda folder: sentencepiece_like().save_pretrained(folder),
    "kimi": kimi_folder,
    "qwen": lambda folder: ranks_folder(folder, "qwen"),
    "llama3": lambda folder: ranks_folder(folder, "llama3"),
    "o200k": lambda folder: ranks_folder(folder, "o200k"),
    "tekken": tekken_folder,
    "sentencepiece": lambda folder: sentencepiece_folder(
        folder, "unigram", {"chat_template": "t", "added_tokens_decoder": {"360": added("<x>")}}
    ),
    "byt5": byt5_folder,
    "templates": many_templates,
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_tokenizer_of_a_folder(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path / "model")
    original = load_tokenizer(tmp_path / "model")
    check_same(written(tmp_path / "model", tmp_path / "out"), original)
    config = tmp_path / "out" / "tokenizer_config.json"
    assert not config.exists() or "auto_map" not in json.loads(config.read_text())
    if kind == "templates":
        assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == {
            "default": "plain",
            "tool_use": "tools",
        }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_tokenizer_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    if kind == "gpt2":
        values = bpe_with()
    else:
        values = sentencepiece_values(sentencepiece_folder(tmp_path / "sp", "bpe")[1], "llama")
    path = write_gguf(tmp_path / "model.gguf", {**values, "tokenizer.chat_template": TEMPLATE})
    original = load_tokenizer(path)
    assert original.chat_template(False) == TEMPLATE
    check_same(written(path, tmp_path / "out"), original)


def test_a_folder_with_a_gguf_file_and_a_template_beside_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model" / "x.gguf", {**bpe_with(), "tokenizer.chat_template": TEMPLATE})
    (tmp_path / "model" / "chat_template.jinja").write_text("beside")
    assert written(tmp_path / "model", tmp_path / "out").chat_template(False) == "beside"


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "model.nemo", write_gguf(tmp_path / "x.gguf", {"a": 1})):
        path.touch()
        assert check_model_files(checkpoint(path)) == (f"no tokenizer in {path}: none is written",)
    (tmp_path / "empty" / "tokenizer_config.json").write_text('{"tokenizer_class": "LostTokenizer"}')
    (note,) = check_model_files(checkpoint(tmp_path / "empty"))
    assert note.startswith(f"no tokenizer in {tmp_path / 'empty'}: none is written (") and "\n" not in note


def test_configurations_without_code(tmp_path: Path) -> None:
    generation = {"eos_token_id": [1, 2]}
    folder = tmp_path / "out"
    folder.mkdir()
    source = checkpoint(tmp_path, generation=generation)
    write_model_files(source, folder, {**CONFIG, "auto_map": {"AutoConfig": "own.Config"}})
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == CONFIG
    assert json.loads((folder / "generation_config.json").read_text()) == generation
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json"]


OWN_CLASS = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_tokens(["<own>"])
"""


def own_code(folder: Path) -> Path:
    llama_folder(folder)
    (folder / "own.py").write_text(OWN_CLASS)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


def test_a_tokenizer_that_its_code_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without trust it is written as it is used without; with trust what is written would be another one."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = own_code(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        check_model_files(checkpoint(folder), trust_remote_code=True)
    message = str(caught.value)
    assert f"the tokenizer of {folder} cannot be written: without code of its own it has another vocabulary" in message
    assert "\n" not in message
    check_same(load_tokenizer(folder), written(folder, tmp_path / "out"))


def test_a_tokenizer_that_is_nothing_without_its_code_is_refused(tmp_path: Path) -> None:
    folder = own_code(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^the tokenizer cannot be written: .*runs only with trust_remote_code$"):
            check_model_files(checkpoint(folder))
        (folder / "vocab.json").write_text('{"a": 0}')


def test_a_copy_that_is_not_the_same_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: here a file is not copied as it is."""
    llama_folder(tmp_path / "model")

    def changed(source: Any, target: Any) -> None:
        target.write(source.read().replace(b"<pad>", b"<pda>"))

    monkeypatch.setattr(shutil, "copyfileobj", changed)
    with pytest.raises(ConfigError, match="it has another vocabulary; take it out of that folder"):
        check_model_files(checkpoint(tmp_path / "model"))


def test_what_is_no_regular_file_is_not_copied(tmp_path: Path) -> None:
    """Links of the Hub's cache are followed."""
    llama_folder(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    check_same(written(tmp_path / "model", tmp_path / "out"), load_tokenizer(tmp_path / "blobs"))
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]
