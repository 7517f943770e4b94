"""The Llama family against transformers: same logits and same greedy tokens, however the work is cut up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.engine_driver import EngineDriver
from tests.support.tiny_llama import build_tiny_llama, reference_greedy, reference_logits

NEW_TOKENS = 12
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, "factor": 4.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_query": {},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 32},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "norm_eps": {"rms_norm_eps": 0.5},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "rope_dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    "rope_llama3": {
        "rope_parameters": {"rope_type": "llama3", **ROPE, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "rope_yarn": {"rope_parameters": {"rope_type": "yarn", **ROPE}},
    "rope_yarn_tuned": {
        "rope_parameters": {
            "rope_type": "yarn", **ROPE, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
            "mscale": 0.7, "mscale_all_dim": 1.1,
        }
    },
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (length,), generator=generator).tolist()


def check(driver: EngineDriver, model: Any, request_id: int, ids: list[int], output: list[int]) -> None:
    """The engine's tokens and logits are those of the reference."""
    assert output == reference_greedy(model, ids, len(output))
    expected = reference_logits(model, ids + output[:-1])[len(ids) - 1 :]
    torch.testing.assert_close(torch.stack(driver.logits[request_id]), expected, **TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path, **VARIANTS[name])
    driver = EngineDriver(tmp_path)
    ids = prompt(61)
    for request_id, chunk in enumerate((1000, 7, 1)):
        output = driver.generate(driver.add(request_id, ids), NEW_TOKENS, chunk)
        check(driver, model, request_id, ids, output)


def test_requests_that_share_steps_answer_as_if_alone(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    driver = EngineDriver(tmp_path)
    prompts = [prompt(61, 1), prompt(5, 2), prompt(1, 3), prompt(40, 4)]
    first, second, third, fourth = (driver.add(i, ids) for i, ids in enumerate(prompts))
    driver.step(context=[(second, 5)])
    driver.step(context=[(first, 30), (third, 1)], generation=[second])
    driver.step(context=[(first, 31), (fourth, 17)], generation=[second, third])
    driver.step(context=[(fourth, 1)], generation=[third, first])
    driver.step(context=[(fourth, 22)], generation=[first, second])
    for _ in range(8):
        driver.step(generation=[third, first, fourth, second])
    for request, ids in zip((first, second, third, fourth), prompts, strict=True):
        check(driver, model, request.request_id, ids, request.output_token_ids)


def test_a_paused_request_computes_its_whole_text_again(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    driver = EngineDriver(tmp_path)
    request = driver.add(0, prompt(20))
    driver.generate(request, 5)
    request.pause()
    driver.generate(request, NEW_TOKENS, chunk=9)
    check(driver, model, 0, prompt(20), request.output_token_ids)


def test_a_step_without_finished_contexts_gives_no_logits(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path)
    driver = EngineDriver(tmp_path)
    driver.step(context=[(driver.add(0, prompt(20)), 8)])
    assert driver.logits[0] == []


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_stays_close_to_float32(dtype: str, limit: float, tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    driver = EngineDriver(tmp_path, dtype)
    driver.generate(driver.add(0, prompt(30)), 1, chunk=11)
    expected = reference_logits(model, prompt(30))[-1]
    error = (driver.logits[0][0] - expected).norm() / expected.norm()
    assert error < limit


def test_a_checkpoint_in_half_precision_is_converted(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    driver = EngineDriver(tmp_path)
    output = driver.generate(driver.add(0, prompt(30)), 4)
    check(driver, model, 0, prompt(30), output)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    driver = EngineDriver(tmp_path)
    output = driver.generate(driver.add(0, prompt(30)), 4)
    check(driver, model, 0, prompt(30), output)
