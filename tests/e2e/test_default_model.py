"""The default model: greedy tokens are transformers', in process and through a real server."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend_engine import LLM, SamplingParams
from tests.e2e.conftest import ProductServer, serving
from tests.support.client import at_once, grpc_text

pytestmark = [pytest.mark.triton, pytest.mark.model]
ROOT = Path(__file__).parents[2]
QUESTIONS = ["What is the capital of France?", "Count to five.", "Name a colour.", "Who wrote Hamlet?"]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def model_dir() -> Path:
    command = [sys.executable, str(ROOT / "scripts" / "fetch_model.py")]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_process(model_dir: Path) -> dict[str, str]:
    """Answers of ``LLM``, checked token by token against transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    texts = {}
    with LLM(str(model_dir), dtype="float32") as llm:
        results = llm.generate(QUESTIONS, SamplingParams(max_tokens=NUM_TOKENS))
        for question, result in zip(QUESTIONS, results, strict=True):
            ids = torch.tensor([result.prompt_token_ids])
            with torch.no_grad():
                reference = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
            if reference[-1] == llm.tokenizer.eos_token_id:
                reference.pop()
            assert result.outputs[0].token_ids == reference
            texts[question] = result.outputs[0].text
        answer = llm.chat([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(max_tokens=NUM_TOKENS))
        assert answer.outputs[0].text == "The capital of France is Paris."
    return texts


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[ProductServer]:
    with serving(model_dir, dtype="float32") as ready:
        yield ready


@pytest.mark.timeout(600)
def test_the_server_says_what_the_engine_says(server: ProductServer, in_process: dict[str, str]) -> None:
    fields = {"max_tokens": NUM_TOKENS}
    for model in ("ensemble", "tensorrt_llm_bls"):
        calls = [
            lambda q=question, m=model, s=stream: grpc_text(server.grpc, m, text_input=q, stream=s, **fields)
            for question in QUESTIONS
            for stream in (False, True)
        ]
        assert at_once(calls) == [in_process[question] for question in QUESTIONS for _ in (0, 1)]
