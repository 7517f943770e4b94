"""Models other than Llama through a real server: one with recurrent states, and one that transformers' modules run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from backend_engine.text.tokenizer import load_tokenizer
from tests.e2e.conftest import serving
from tests.support.tiny_models import TINY_MODELS, reference_logits, scramble

PROMPTS = ["Count Stop Text Lines", "Long", "Pick Pick Pick Emoji Special Half User List Bad Pick Count"]
NEW_TOKENS = 12
MODELS = {
    "recurrent": ("GraniteMoeHybridForCausalLM", dict(TINY_MODELS["granite_hybrid"].values)),
    "fallback": ("StableLmForCausalLM", {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
                                         "num_attention_heads": 4, "num_key_value_heads": 2, "use_qkv_bias": True}),
}  # fmt: skip


def build(architecture: str, values: dict[str, Any], tokenizer_dir: Path, folder: Path) -> Any:
    """A random checkpoint with the table model's tokenizer."""
    folder.mkdir()
    for path in tokenizer_dir.glob("*token*"):
        shutil.copy(path, folder)
    model_class = getattr(transformers, architecture)
    vocab_size = load_tokenizer(tokenizer_dir).vocab_size
    known = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = model_class.config_class(
        **{**known, **values, "vocab_size": vocab_size, "max_position_embeddings": 256, "pad_token_id": 0,
           "bos_token_id": None, "eos_token_id": None}
    )  # fmt: skip
    model = model_class(config).eval()
    scramble(model)
    model.save_pretrained(folder)
    return model


def reference_text(model: Any, tokenizer: Any, text: str) -> str:
    """What transformers says, every token from a pass over the whole text."""
    ids = tokenizer.encode(text)
    output: list[int] = []
    for _ in range(NEW_TOKENS):
        output.append(int(reference_logits(model, ids, [*output, 0])[-1].argmax()))
    return str(tokenizer.decode(output))


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_answers_through_the_server_as_transformers_does(
    kind: str, table_model_dir: Path, tmp_path: Path
) -> None:
    architecture, values = MODELS[kind]
    model = build(architecture, values, table_model_dir, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    expected = {prompt: reference_text(model, tokenizer, prompt) for prompt in PROMPTS}
    with serving(tmp_path / "model", max_num_tokens=16, max_batch_size=16) as server:
        for entry in ("ensemble", "tensorrt_llm_bls"):
            for prompt in [*PROMPTS, *PROMPTS]:  # again, from blocks that are there
                status, body = server.generate(entry, text_input=prompt, max_tokens=NEW_TOKENS)
                assert (status, body["text_output"]) == (200, expected[prompt])
            events = server.events(
                entry, text_input=PROMPTS[0], max_tokens=NEW_TOKENS, stream=True, exclude_input_in_output=True
            )
            assert "".join(event["text_output"] for event in events) == expected[PROMPTS[0]]
        log = server.log()
    backend = "transformers" if kind == "fallback" else "native"
    assert f"model_backend {backend}: " in log or f"model_backend='{backend}'" in log
