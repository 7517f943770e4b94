"""Tokenizer folders as they come: which class opens them, added tokens, code of their own, files that disagree."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import models, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from backend_engine.errors import ModelLoadError
from backend_engine.text.tokenizer import Tokenizer, check_same_tokenizer, load_tokenizer
from tests.support.small_tokenizers import sentencepiece_like
from tests.support.table_model import build_tokenizer, token_id
from tests.support.tokenizer_folders import added, ranks_folder, sentencepiece_folder

BOS, EOS = token_id("<s>"), token_id("</s>")


def table_folder(folder: Path, **config: Any) -> Path:
    """The table model's tokenizer; ``config`` overrides tokenizer_config.json."""
    build_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, mark: Path) -> Path:
    """Give a folder a tokenizer class of its own, whose code leaves a mark."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    path.write_text(json.dumps(config | own))
    return folder


def test_code_beside_a_tokenizer_runs_only_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tokenizer.json says it all, so that it is used without the code; trusted code runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    mark = tmp_path / "mark"
    folder = with_code(table_folder(tmp_path / "model"), mark)
    assert load_tokenizer(folder).encode("Count") == [token_id("Count")]
    assert not mark.exists()
    trusted = load_tokenizer(folder, trust_remote_code=True)
    assert mark.exists() and trusted.encode("Count") == [token_id("Count")]


@pytest.mark.parametrize("files", ["none", "vocab.json", "tokenizer.model"])
def test_code_is_not_run_where_nothing_else_can_read_the_files(tmp_path: Path, files: str) -> None:
    mark = tmp_path / "mark"
    if files == "tokenizer.model":
        sentencepiece_folder(tmp_path / "model", "bpe")
    folder = with_code(tmp_path / "model", mark)
    if files == "vocab.json":
        (folder / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    message = str(caught.value)
    assert f"{folder / 'tokenizer_config.json'}: tokenizer_class 'OwnTokenizer' is not known" in message
    assert "its own code runs only with trust_remote_code" in message and "\n" not in message
    assert not mark.exists()


def test_an_unknown_class(tmp_path: Path) -> None:
    """Harmless beside a tokenizer.json, and otherwise named."""
    folder = table_folder(tmp_path / "fast", tokenizer_class="NewTokenizer")
    assert load_tokenizer(folder).encode("Count") == [token_id("Count")]
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "vocab.json").write_text('{"a": 0}')
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "NewTokenizer"}')
    with pytest.raises(ModelLoadError, match=r"tokenizer_class 'NewTokenizer' is not known.*expected tokenizer\.json"):
        load_tokenizer(slow)


def test_a_tokenizer_json_alone(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Count<s>") == [token_id("Count"), BOS]


def test_vocab_and_merges_alone(tmp_path: Path) -> None:
    """GPT-2's first form."""
    state = json.loads(build_tokenizer().backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"] | {"<|endoftext|>": len(state["vocab"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in state["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Count") == [token_id("Count")]
    assert tokenizer.decode([token_id("Count"), token_id(" caf")]) == "Count caf"


def test_plain_folders_are_loaded_without_torch(tmp_path: Path) -> None:
    """Which takes seconds to import; preprocessing and postprocessing have no other use for it."""
    folders = [
        table_folder(tmp_path / "fast", tokenizer_class="PreTrainedTokenizerFast"),
        ranks_folder(tmp_path / "ranks", "kimi"),
        sentencepiece_folder(tmp_path / "pieces", "unigram")[0],
    ]
    script = (
        "import sys\nfrom backend_engine.text.tokenizer import load_tokenizer\n"
        "for folder in sys.argv[1:]: load_tokenizer(folder).encode('a')\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_added_tokens_keep_ids_and_flags(tmp_path: Path) -> None:
    fast = build_tokenizer()
    next_id = len(fast)
    fast.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    tokens = {
        str(next_id): added("<tool>", special=False, lstrip=True),
        str(next_id + 1): added("<|eot|>", rstrip=True),
        str(next_id + 2): added("ok then", special=False, normalized=True),
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": tokens}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": next_id, "<s>": BOS}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_plain("Count  <tool>Count") == [token_id("Count"), next_id, token_id("Count")]
    assert tokenizer.encode_plain("<|eot|>  Count") == [next_id + 1, token_id("Count")]
    assert tokenizer.encode_plain("ok then") == [next_id + 2]
    assert next_id not in tokenizer.special_ids and next_id + 1 in tokenizer.special_ids
    assert tokenizer.decode([next_id, next_id + 1, next_id + 2]) == "<tool>ok then"
    assert tokenizer.control_tokens["<|eot|>"] == next_id + 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"500": added("<x>")}}, "says that '<x>' is id 500, but"),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(BOS): added("<x>")}}, f"'<x>' is id {BOS}, but"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": added("<s>")}}, f"has it as id {BOS}"),
        ("added_tokens.json", {"<s>": 9}, "added_tokens.json says that '<s>' is id 9, but "),
        ("added_tokens.json", {"<s>": "9"}, "added_tokens.json: '<s>' is '9'; expected a token id"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder is a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "y"}}, "has the key 'x'; expected a token id"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"9": 5}},
            "added_tokens_decoder.9 is 5; expected a token's",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"9": added("<x>") | {"lstrip": 1}}},
            "added_tokens_decoder.9: lstrip is 1; expected true or false",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"900": "a", "901": "a"}}, "'a' is id 900 and id 901"),
        ("vocab.json", {"Count": 3}, "vocab.json says that 'Count' is id 3, but"),
        ("vocab.json", {f"t{i}": i for i in range(300)}, "of which only 0 are the same"),
    ],
)
def test_two_files_that_disagree(tmp_path: Path, name: str, content: Any, words: str) -> None:
    folder = table_folder(tmp_path)
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    if words.endswith("901"):
        known = {}
    path.write_text(json.dumps(known | content))
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    assert words in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_agree(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    vocab = json.loads(build_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "added_tokens.json").write_text(json.dumps({"<s>": BOS}))
    (folder / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")  # of no use, of no harm
    assert load_tokenizer(folder).encode("Count") == [token_id("Count")]


def test_a_sentencepiece_model_beside_another_tokenizer(tmp_path: Path) -> None:
    folder, processor = sentencepiece_folder(tmp_path, "bpe", {})
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer.encode(text) for text in ("hello the", "two")]
    tokenizer.rust.save(str(folder / "tokenizer.json"))
    assert [load_tokenizer(folder).encode(text) for text in ("hello the", "two")] == ids
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    one, other = processor.piece_to_id("a"), processor.piece_to_id("b")
    vocab["a"], vocab["b"] = other, one
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(
        ModelLoadError, match=r"disagree: .*tokenizer\.model says that '[ab]' is id \d+, but .*\.json has"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list; expected a JSON object"),
        ('{"chat_template": 5}', "chat_template"),
    ],
)
def test_a_broken_tokenizer_config(tmp_path: Path, content: str, words: str) -> None:
    folder, _ = sentencepiece_folder(tmp_path, "bpe")
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_tokenizer(folder)
    assert str(folder / "tokenizer_config.json") in str(caught.value)


def test_a_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    """It may lie elsewhere and have further tokens, but must not give a token another id."""
    model = table_folder(tmp_path / "model")
    fast = build_tokenizer()
    fast.add_tokens(["<more>"])
    fast.save_pretrained(tmp_path / "more")
    check_same_tokenizer(load_tokenizer(tmp_path / "more"), tmp_path / "more", model)
    check_same_tokenizer(load_tokenizer(model), model, tmp_path / "model" / ".." / "model")
    (tmp_path / "weights").mkdir()
    check_same_tokenizer(load_tokenizer(model), model, tmp_path / "weights")
    sentencepiece_like().save_pretrained(tmp_path / "other")
    with pytest.raises(
        ModelLoadError, match=rf"disagree: {tmp_path}/other says that '.*' is id \d+, but {tmp_path}/model"
    ):
        check_same_tokenizer(load_tokenizer(tmp_path / "other"), tmp_path / "other", model)


def post_processed(single: str) -> Tokenizer:
    fast = build_tokenizer()
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", BOS), ("</s>", EOS), ("<pad>", token_id("<pad>"))]
    )
    return Tokenizer(fast)


@pytest.mark.parametrize(
    ("single", "prefix"),
    [
        ("$A", []),
        ("<s> $A", [BOS]),
        ("<s> <s> $A", [BOS]),
        ("<s> $A </s>", [BOS]),
        ("$A </s>", []),
        ("<pad> <s> $A", [token_id("<pad>"), BOS]),
    ],
)
@pytest.mark.parametrize(("text", "num_begins"), [("Count", 0), ("<s>Count", 1), ("<s><s>Count", 2), ("", 0)])
def test_what_stands_around_a_prompt(single: str, prefix: list[int], text: str, num_begins: int) -> None:
    """A begin token once, whoever writes it, and no end token: a prompt is to be continued."""
    tokenizer = post_processed(single)
    plain = [BOS] * num_begins + ([token_id("Count")] if text else [])
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode_plain(text) == plain
    begun = [*(i for i in prefix if i != BOS), BOS] if num_begins else prefix
    assert tokenizer.encode(text) == [*begun, *plain[num_begins:]]
    assert tokenizer.has_end_token is single.endswith("</s>")


def test_a_beginning_of_several_tokens_stands_once() -> None:
    """Whether the tokenizer names one of them its begin token or none, as GLM's."""
    fast = build_tokenizer()
    pad = token_id("<pad>")
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> </s> $A", special_tokens=[("</s>", EOS), ("<pad>", pad)]
    )
    fast.bos_token = None
    tokenizer = Tokenizer(fast)
    for text in ("Count", "<pad></s>Count", "<pad></s><pad></s>Count"):
        assert tokenizer.encode(text) == [pad, EOS, token_id("Count")]
    assert tokenizer.encode("</s>Count") == [pad, EOS, EOS, token_id("Count")]


@pytest.mark.parametrize(
    ("processor", "prefix"),
    [
        (processors.BertProcessing(("</s>", 1), ("<s>", 0)), [0]),
        (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), [0]),
        (processors.ByteLevel(trim_offsets=False), []),
        (
            processors.Sequence(
                [
                    processors.ByteLevel(trim_offsets=False),
                    processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
                    processors.TemplateProcessing(single="word $A </s>", special_tokens=[("word", 2), ("</s>", 1)]),
                ]
            ),
            [0],
        ),
    ],
)
def test_other_kinds_of_post_processors(processor: Any, prefix: list[int]) -> None:
    """On a vocabulary that knows hardly a text."""
    rust = Rust(models.WordLevel({"<s>": 0, "</s>": 1, "word": 2}))
    rust.post_processor = processor
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>"))
    whole = rust.encode("word").ids
    assert tokenizer.encode("word") == [*prefix, 2] == whole[: len(prefix) + 1]
    assert tokenizer.has_end_token is (len(whole) > len(prefix) + 1)


def test_a_tokenizer_in_python() -> None:
    tokenizer = Tokenizer(ByT5Tokenizer())
    assert tokenizer.has_end_token and tokenizer.encode("a") == tokenizer.encode_plain("a") == [ord("a") + 3]
