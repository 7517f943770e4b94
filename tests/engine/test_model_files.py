"""What an engine takes from the files beside the weights: end ids, recommended sampling, and a tokenizer that fits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from backend_engine import LLM, SamplingParams
from backend_engine.errors import ConfigError, InvalidRequestError, ModelLoadError
from tests.support.table_model import CHAT_TEMPLATE, build_table_model, build_tokenizer


def edited(folder: Path, name: str, **values: Any) -> Path:
    """Write ``values`` into a JSON file of ``folder``."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.fixture
def folder(table_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the table model to write in."""
    return Path(shutil.copytree(table_model_dir, tmp_path / "model"))


def test_recommended_sampling_only_when_asked_for(folder: Path) -> None:
    edited(folder, "generation_config.json", do_sample=True, temperature=1.0, top_k=2, max_new_tokens=3)
    with LLM(str(folder), max_seq_len=64) as llm:
        texts = {llm.generate("Pick").outputs[0].text for _ in range(12)}
        assert len(texts) == 1 and len(llm.generate("Pick").outputs[0].token_ids) == 32
    with LLM(str(folder), max_seq_len=64, generation_config="model") as llm:
        outputs = [llm.generate("Pick").outputs[0] for _ in range(30)]
        assert len({output.text for output in outputs}) > 1
        assert {len(output.token_ids) for output in outputs} == {32}, "how long an answer gets is the request's to say"
        assert not any("blue" in output.text for output in outputs), "top_k keeps the two likeliest"
        greedy = [llm.generate("Pick", SamplingParams(temperature=0.0, max_tokens=5)).outputs[0] for _ in range(12)]
        assert {output.text for output in greedy} == {" redPick redPick red"}


def test_a_model_that_recommends_nothing_is_greedy(folder: Path) -> None:
    edited(folder, "generation_config.json", do_sample=False, temperature=1.0)
    with LLM(str(folder), max_seq_len=64, generation_config="model") as llm:
        assert len({llm.generate("Pick").outputs[0].text for _ in range(12)}) == 1


def test_recommendations_that_cannot_be_read(folder: Path) -> None:
    edited(folder, "generation_config.json", temperature=-1)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: temperature -1 is out of range"):
        LLM(str(folder), max_seq_len=64, generation_config="model")
    LLM(str(folder), max_seq_len=64).shutdown()
    with pytest.raises(ConfigError, match="generation_config 'auto' is not allowed; use ignore, model"):
        LLM(str(folder), max_seq_len=64, generation_config="auto")


def test_the_tokenizers_end_token_for_a_model_whose_files_name_none(folder: Path) -> None:
    edited(folder, "config.json", eos_token_id=None)
    edited(folder, "generation_config.json", eos_token_id=None)
    with LLM(str(folder), max_seq_len=64) as llm:
        assert llm.generate("Text").outputs[0].text == " gamma delta"
        assert llm.generate("Text").outputs[0].finish_reason == "stop"


def test_a_tokenizer_with_ids_beyond_the_embedding(folder: Path, tmp_path: Path) -> None:
    fast = build_tokenizer()
    size = len(fast)
    fast.add_tokens(["<more>", "<most>"])
    fast.save_pretrained(tmp_path / "larger")
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(folder), tokenizer=str(tmp_path / "larger"), max_seq_len=64)
    assert str(caught.value) == (
        f"the tokenizer in {tmp_path / 'larger'} has 2 ids that the model has no embedding for: {size} ('<more>'), "
        f"{size + 1} ('<most>'); config.json says vocab_size {size}, so that ids must be below it"
    )


def test_places_for_images_may_lie_beyond_the_embedding(folder: Path) -> None:
    """As Gemma 3's for text alone; a prompt with one is refused when it comes."""
    fast = build_tokenizer()
    fast.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    fast.save_pretrained(folder)
    edited(folder, "tokenizer_config.json", image_token="<image_soft_token>")
    with LLM(str(folder), max_seq_len=64) as llm:
        assert llm.generate("Text").outputs[0].text == " gamma delta"
        with pytest.raises(InvalidRequestError, match=f"token id {len(fast) - 1} of the prompt is outside"):
            llm.generate("Text<image_soft_token>")


def test_a_tokenizer_that_disagrees_with_the_models_own(folder: Path, tmp_path: Path) -> None:
    fast = build_tokenizer()
    fast.save_pretrained(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = state["model"]["vocab"]
    vocab["Text"], vocab["Count"] = vocab["Count"], vocab["Text"]
    path.write_text(json.dumps(state))
    with pytest.raises(
        ModelLoadError, match=r"two tokenizers that disagree: .*other says that '(Text|Count)' is id \d+"
    ):
        LLM(str(folder), tokenizer=str(tmp_path / "other"), max_seq_len=64)


def test_the_begin_token_stands_once_however_a_prompt_comes(tmp_path: Path) -> None:
    """A text, a text that a template has begun, a chat; with the tokenizer's own begin token or without."""
    folder = build_table_model(tmp_path, add_bos=True)
    edited(folder, "tokenizer_config.json", chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    bos = build_tokenizer().bos_token_id
    with LLM(str(folder), max_seq_len=64) as llm:

        def begins(prompt: Any, **params: Any) -> int:
            return llm.generate(prompt, SamplingParams(max_tokens=1, **params)).prompt_token_ids.count(bos)

        assert begins("Text") == begins("<s>Text") == begins("<s><s>Text") == 1
        assert begins("Text", add_special_tokens=False) == 0
        assert begins("<s>Text", add_special_tokens=False) == 1
        chat = llm.chat([{"role": "user", "content": "<s>Text"}], SamplingParams(max_tokens=1))
        assert chat.prompt_token_ids.count(bos) == 1 and chat.prompt_token_ids[0] == bos
        rendered = llm.tokenizer.decode(chat.prompt_token_ids, skip_special_tokens=False).replace("<s>Text", "Text")
        assert rendered.startswith("<s><|im_start|>") and begins(rendered) == 1
