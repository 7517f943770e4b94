"""What a token's products and its attention cost, counted from layers; how many tokens before it balance the two."""

import dataclasses
import logging
from pathlib import Path

import pytest

from backend_engine import LLM, SchedulerConfig
from backend_engine.attention.interface import AttentionSpec
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.token_work import attention_flop, balanced_context_tokens, num_layer_weights
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import build_tiny_model

# SmolLM2-135M: 30 layers of width 576, 9 heads of 64, 3 of keys and values, inner width 1536.
SMOLLM2_WEIGHTS = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
SMOLLM2 = tuple(AttentionSpec(i, num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125) for i in range(30))
TINY_LAYER = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 112 + 2 * 64


def test_a_small_model_is_balanced_at_about_2460_tokens() -> None:
    assert SMOLLM2_WEIGHTS == 106_168_320
    assert attention_flop(SMOLLM2) == 4 * 9 * 64 * 30
    assert balanced_context_tokens(SMOLLM2_WEIGHTS, SMOLLM2, 8192) == 2458


def test_layers_with_a_window_do_not_count_unless_it_holds_every_text() -> None:
    windowed = tuple(dataclasses.replace(spec, sliding_window=512) for spec in SMOLLM2)
    assert balanced_context_tokens(SMOLLM2_WEIGHTS, windowed, 8192) is None
    assert balanced_context_tokens(SMOLLM2_WEIGHTS, windowed, 512) == 2458
    assert balanced_context_tokens(SMOLLM2_WEIGHTS, windowed[:15] + SMOLLM2[15:], 8192) == 4915
    assert balanced_context_tokens(SMOLLM2_WEIGHTS, (), 8192) is None


def test_one_vector_for_keys_and_values_counts_with_both_widths() -> None:
    latent = AttentionSpec(0, num_heads=4, num_kv_heads=1, head_dim=40, scale=1.0, value_dim=32)
    assert attention_flop([latent]) == 2 * 4 * (40 + 32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_the_weights_of_layers_are_without_those_of_the_vocabulary(tmp_path: Path, backend: str, tied: bool) -> None:
    build_tiny_llama(tmp_path, tie_word_embeddings=tied)
    loaded = load_model(str(tmp_path), "float32", "cpu", model_backend=backend)
    assert num_layer_weights(loaded.model) == 2 * TINY_LAYER


def test_of_a_mixture_as_many_experts_count_as_a_token_goes_to(tmp_path: Path) -> None:
    """Mixtral of width 64, 2 layers, 4 heads of 24, 2 of keys and values, two of 8 experts of inner width 112."""
    build_tiny_model("mixtral", tmp_path)
    loaded = load_model(str(tmp_path), "float32", "cpu")
    attention = 2 * 64 * 24 * (4 + 2)
    assert num_layer_weights(loaded.model) == 2 * (attention + 2 * 3 * 64 * 112 + 8 * 64 + 2 * 64)


@pytest.mark.parametrize(
    ("args", "scheduler", "expected"),
    [
        # 0.8 * 2 * 2 * 33,920 weights / (4 * 2 layers * 4 heads * 16)
        ({}, {}, round(0.8 * 2 * 2 * TINY_LAYER / 512)),
        ({}, {"context_cost_tokens": 77}, 77),
        ({"context_cost_tokens": 0}, {"context_cost_tokens": 77}, 0),
        ({}, {"enable_chunked_context": False}, None),
    ],
)
def test_an_engine_takes_what_is_said_or_chooses_and_says_so(
    tmp_path: Path,
    args: dict[str, int],
    scheduler: dict[str, int],
    expected: int | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_tiny_llama(tmp_path)
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    caplog.set_level("INFO")
    with LLM(str(tmp_path), skip_tokenizer_init=True, scheduler_config=SchedulerConfig(**scheduler), **args) as llm:
        assert llm.config.scheduler.context_cost_tokens == expected
    assert ("chosen: context_cost_tokens" in caplog.text) == (not args and not scheduler)
