"""Tokenizers behind the porch: begin tokens, recommended sampling, bad fits, and code that must not run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_pb_utils import InferenceRequest, InferenceResponse, Tensor
from tests.adapters.test_models import Chain, text
from tests.support.table_model import CHAT_TEMPLATE, build_table_model, build_tokenizer, token_id

BOS = token_id("<s>")


def prompts(model: Any, query: str = "", messages: str = "") -> InferenceResponse:
    """Preprocessing's answer for one prompt."""
    tensors = [
        Tensor("QUERY", np.array([[query.encode()]], np.object_)),
        Tensor("REQUEST_OUTPUT_LEN", np.array([[4]], np.int32)),
    ]
    if messages:
        tensors.append(Tensor("MESSAGES", np.array([[messages.encode()]], np.object_)))
    (response,) = model.execute([InferenceRequest(inputs=tensors)])
    return response


def ids_of(response: InferenceResponse) -> list[int]:
    assert not response.has_error(), response.error().message()
    return response.arrays()["INPUT_ID"][0].tolist()


@pytest.fixture
def begun_dir(tmp_path: Path) -> Path:
    """The table model with a tokenizer that adds a begin token, and a chat template that writes one."""
    folder = build_table_model(tmp_path / "begun", add_bos=True)
    path = folder / "tokenizer_config.json"
    template = "{{ bos_token }}" + CHAT_TEMPLATE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize(("add", "num_begins"), [("true", 1), ("false", 0)])
def test_the_begin_token_stands_once(
    start_model: Callable[..., Any], begun_dir: Path, add: str, num_begins: int
) -> None:
    model = start_model("preprocessing", tokenizer_dir=str(begun_dir), add_special_tokens=add)
    assert ids_of(prompts(model, "Text")) == [BOS] * num_begins + [token_id("Text")]
    assert ids_of(prompts(model, "<s>Text")) == [BOS, token_id("Text")]
    chat = ids_of(prompts(model, messages=json.dumps([{"role": "user", "content": "<s>Text"}])))
    assert chat.count(BOS) == 1 and chat[0] == BOS
    rendered = build_tokenizer().decode(chat).replace("<s>Text", "Text")
    assert ids_of(prompts(model, rendered)).count(BOS) == 1


def test_recommended_sampling_through_the_bls(
    start_model: Callable[..., Any], table_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(table_model_dir, tmp_path / "model"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "top_k": 3}))
    for setting, varies in (("ignore", False), ("model", True)):
        chain = Chain(start_model, str(folder), True, generation_config=setting)
        for name, route in chain.routes().items():
            monkeypatch.setitem(pb_utils.ROUTES, name, route)
        assert (len({text(chain.ask("Pick")) for _ in range(12)}) > 1) is varies
        assert len({text(chain.ask("Pick", temperature=0.0)) for _ in range(6)}) == 1
        chain.close()


def test_two_tokenizers_that_disagree(start_model: Callable[..., Any], table_model_dir: Path, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    start_model("preprocessing", tokenizer_dir=str(tmp_path), gpt_model_path=str(table_model_dir))
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = state["model"]["vocab"]
    vocab["Text"], vocab["Count"] = vocab["Count"], vocab["Text"]
    path.write_text(json.dumps(state))
    for model in ("preprocessing", "tensorrt_llm"):
        with pytest.raises(
            pb_utils.TritonModelException, match=rf"two tokenizers that disagree: {tmp_path} says"
        ) as caught:
            start_model(model, tokenizer_dir=str(tmp_path), gpt_model_path=str(table_model_dir), device="cpu")
        assert "\n" not in str(caught.value)


def test_a_tokenizer_with_ids_beyond_the_embedding(
    start_model: Callable[..., Any], table_model_dir: Path, tmp_path: Path
) -> None:
    fast = build_tokenizer()
    fast.add_tokens(["<more>"])
    fast.save_pretrained(tmp_path)
    with pytest.raises(
        pb_utils.TritonModelException, match=r"has 1 ids that the model has no embedding for: 413 \('<mor"
    ):
        start_model("preprocessing", tokenizer_dir=str(tmp_path), gpt_model_path=str(table_model_dir))


def test_a_place_for_an_image_is_refused_in_a_prompt(
    start_model: Callable[..., Any], table_model_dir: Path, tmp_path: Path
) -> None:
    fast = build_tokenizer()
    fast.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    fast.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token": "<image_soft_token>"}))
    model = start_model("preprocessing", tokenizer_dir=str(tmp_path), gpt_model_path=str(table_model_dir))
    response = prompts(model, "Text<image_soft_token>")
    assert "text_input spells token 413, which the model has no embedding for" in response.error().message()
    assert ids_of(prompts(model, "Text")) == [token_id("Text")]


def test_code_beside_a_tokenizer_is_not_run(
    start_model: Callable[..., Any], tmp_path: Path, table_model_dir: Path
) -> None:
    """Neither by preprocessing nor by postprocessing nor by the engine, unless trust_remote_code says so."""
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    for model in ("preprocessing", "postprocessing", "tensorrt_llm"):
        more = {"gpt_model_path": str(table_model_dir)} if model == "tensorrt_llm" else {}
        with pytest.raises(
            pb_utils.TritonModelException, match=r"tokenizer_class 'Own' is not known.*trust_remote_code"
        ):
            start_model(model, tokenizer_dir=str(tmp_path), **more)
    assert not mark.exists()
