"""The Llama family against transformers beside what all families are tested for: settings of its configuration, and
checkpoints in other forms.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.engine_driver import EngineDriver
from tests.support.parity import check, prompt
from tests.support.tiny_llama import build_tiny_llama

NEW_TOKENS = 12

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_query": {},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 32},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "relu": {"hidden_act": "relu"},
    "tied": {"tie_word_embeddings": True},
    "norm_eps": {"rms_norm_eps": 0.5},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path, **VARIANTS[name])
    driver = EngineDriver(tmp_path)
    ids = prompt(61)
    for request_id, chunk in enumerate((1000, 7, 1)):
        output = driver.generate(driver.add(request_id, ids), NEW_TOKENS, chunk)
        check(driver, model, request_id, ids, output)


def test_a_step_without_finished_contexts_gives_no_logits(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path)
    driver = EngineDriver(tmp_path)
    driver.step(context=[(driver.add(0, prompt(20)), 8)])
    assert driver.logits[0] == []


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
