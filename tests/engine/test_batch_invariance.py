"""A token's logits have the same bits alone, in a batch and in chunks, on a CPU with native operations."""

from pathlib import Path

import pytest
import torch

from backend_engine import LLM, SamplingParams, SchedulerConfig
from backend_engine.errors import ConfigError
from tests.support.parity import prompt
from tests.support.tiny_models import build_tiny_model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "granite", "phi3")
PROMPTS = [prompt(length, seed) for seed, length in enumerate((45, 1, 7, 30, 64, 12, 3, 21))]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, return_generation_logits=True)


def logits(folder: Path, together: bool, max_num_tokens: int = 512, **options: object) -> list[torch.Tensor]:
    scheduler = SchedulerConfig(max_batch_size=8, max_num_tokens=max_num_tokens)
    with LLM(str(folder), scheduler_config=scheduler, skip_tokenizer_init=True, max_seq_len=128, **options) as llm:
        batches = [PROMPTS] if together else [[ids] for ids in PROMPTS]
        results = [result for batch in batches for result in llm.generate(batch, PARAMS, use_tqdm=False)]
    return [torch.from_numpy(result.outputs[0].generation_logits) for result in results]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits_alone_and_together_and_in_chunks(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    alone = logits(tmp_path, together=False, batch_invariant=True)
    for max_num_tokens, num_threads in ((512, 2), (16, 1)):
        together = logits(tmp_path, True, max_num_tokens, num_threads=num_threads, batch_invariant=True)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)), max_num_tokens


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int16", "int8", "w8a8"])
def test_other_forms_of_weights_too(precision: str, tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    options = {"weight_only_precision": precision, "batch_invariant": True}
    alone, together = logits(tmp_path, False, **options), logits(tmp_path, True, 24, **options)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    plain = logits(tmp_path, True)
    assert not torch.equal(plain[0], together[0])
    # The first token, before answers go their own ways.
    tolerance = 0.2 if precision == "w8a8" else 0.1
    torch.testing.assert_close(together[0][0], plain[0][0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", {}),
        ("mamba2", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"attention_backend": "torch"}),
        ("llama", {"operators": "torch"}),
        ("llama", {"record_layers": False}),
        ("llama", {"model_backend": "transformers"}),
    ],
)
def test_where_it_cannot_be_had_the_engine_says_so(name: str, options: dict[str, object], tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    with pytest.raises(ConfigError, match="batch_invariant true cannot be had"):
        LLM(str(tmp_path), skip_tokenizer_init=True, batch_invariant=True, **options)
    LLM(str(tmp_path), skip_tokenizer_init=True, **options).shutdown()


def test_forms_of_weights_are_checked(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    with pytest.raises(
        ConfigError, match="weight_only_precision 'int3' is not allowed; use auto, float16, bfloat16, int16, int8, w8a8"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True, weight_only_precision="int3")
    with pytest.raises(
        ConfigError, match="'int8' is not allowed with device cpu and dtype bfloat16; use device cpu and"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True, weight_only_precision="int8", dtype="bfloat16")
