"""Every model family in shapes that nobody chose: random configurations, against transformers.

What transformers itself refuses is passed over; what a family refuses must be by name. Everything else has to agree.
"""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from backend_engine.errors import ModelLoadError
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_models import COMMON, TINY_MODELS, reference_logits, scramble

NUM_SHAPES = 8
NEW_TOKENS = 4
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
# Keys of configurations, those that a family has, and values to choose from.
CHOICES: dict[str, list[Any]] = {
    "hidden_size": [32, 48, 64, 96],
    "num_attention_heads": [2, 4, 8],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 16, 24, 32],
    "intermediate_size": [40, 112, 130],
    "num_hidden_layers": [1, 2, 3, 5],
    "vocab_size": [96, 101, 130],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "rms_norm_eps": [1e-6, 0.1],
    "layer_norm_eps": [1e-5, 0.1],
    "sliding_window": [3, 31, None],
    "num_experts": [2, 4, 7],
    "num_local_experts": [2, 4, 7],
    "n_routed_experts": [4, 8, 16],
    "num_experts_per_tok": [1, 2, 3],
    "moe_intermediate_size": [12, 24],
    "norm_topk_prob": [True, False],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1, 2],
    "routed_scaling_factor": [1.0, 2.5],
    "kv_lora_rank": [8, 24],
    "q_lora_rank": [12, None],
    "qk_rope_head_dim": [4, 8],
    "v_head_dim": [8, 20],
    "n_group": [1, 2, 4],
    "decoder_sparse_step": [1, 2],
    "shared_expert_intermediate_size": [20, 50],
    "residual_multiplier": [1.0, 0.5],
    "query_pre_attn_scalar": [16, 50],
    "final_logit_softcapping": [None, 10.0],
    "n_inner": [None, 50],
    "n_head": [2, 4],
    "state_size": [4, 16],
    "n_groups": [1, 2],
    "conv_kernel": [2, 4],
    "mamba_d_state": [8, 16],
    "mamba_d_conv": [2, 4],
    "rope_interleave": [True, False],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 3.0, **ROPE},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE},
    ],
}
ARCHITECTURES = sorted({row.architecture for row in TINY_MODELS.values()} - {"Gemma3ForConditionalGeneration"})


def random_model(architecture: str, rng: random.Random) -> Any:
    """A model of a random row with some keys changed; ``None`` when transformers has no such model."""
    row = rng.choice([row for row in TINY_MODELS.values() if row.architecture == architecture])
    model_class = getattr(transformers, architecture)
    known = row.config().to_dict()
    keys = sorted(key for key in CHOICES if key in known)
    changes = {key: copy.deepcopy(rng.choice(CHOICES[key])) for key in rng.sample(keys, rng.choice([1, 2, 3, 5]))}
    values = {**{key: value for key, value in COMMON.items() if key in known}, **row.values, **changes}
    torch.manual_seed(rng.randrange(1000))
    try:
        config = model_class.config_class(**values)
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        scramble(model)
        reference_logits(model, [3, 4, 5], [6])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError):
        return None
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_shapes_give_the_logits_of_transformers_or_are_refused_by_name(
    architecture: str, tmp_path: Path
) -> None:
    rng = random.Random(architecture)
    num_equal = 0
    for i in range(NUM_SHAPES):
        model = random_model(architecture, rng)
        if model is None:
            continue
        folder = tmp_path / str(i)
        model.save_pretrained(folder)
        try:
            driver = EngineDriver(folder)
        except ModelLoadError as error:
            assert "expected" in str(error) and "\n" not in str(error)
            continue
        prompt = [rng.randrange(3, 96) for _ in range(rng.choice([1, 7, 40, 70]))]
        output = driver.generate(driver.add(0, prompt), NEW_TOKENS, chunk=rng.choice([1000, 9, 1]))
        expected = reference_logits(model, prompt, output)
        error = (torch.stack(driver.logits[0]) - expected).abs().max() / (1 + expected.abs().max())
        assert error < 1e-4, (model.config, prompt, float(error))
        num_equal += 1
    assert num_equal >= NUM_SHAPES // 3, "hardly a shape was tested"
