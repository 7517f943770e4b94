"""``perplexity`` and ``window_inputs``: against transformers, by hand for a model of known probabilities, and however
the texts are cut up.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.kv_cache.kv_pool import KV_DTYPES
from backend_engine.model_engine.model_inputs import EngineLimits, ModelInputsBuilder
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.token_windows import blocks_per_window, window_inputs
from backend_engine.post_training import perplexity as module
from backend_engine.post_training.calibration_model import load_for_calibration
from backend_engine.post_training.perplexity import perplexity
from tests.support.engine_driver import new_request
from tests.support.parity import prompt
from tests.support.tiny_models import build_tiny_model

WINDOWS = [prompt(37, seed) for seed in range(5)]
# Attention, windows and sinks, latent vectors, recurrent states, positions that depend on the text's length.
MODELS = ["llama", "gpt_oss", "deepseek_v2", "granite_hybrid", "llama_longrope"]


@torch.inference_mode()
def reference(model: torch.nn.Module, windows: list[list[int]]) -> float:
    losses = []
    for window in windows:
        ids = torch.tensor([window])
        log_probabilities = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        losses.append(-log_probabilities.gather(1, ids[0, 1:, None]))
    return math.exp(torch.cat(losses).mean().item())


@pytest.mark.parametrize("name", MODELS)
def test_it_is_that_of_transformers_however_texts_are_cut_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(build_tiny_model(name, tmp_path), WINDOWS)
    loaded = load_model(tmp_path, "float32", "cpu")
    calls: list[tuple[int, int, str]] = []
    assert perplexity(loaded, WINDOWS, "float32", lambda *call: calls.append(call)) == pytest.approx(expected, 1e-5)
    assert calls == [(5, 5, "perplexity")]
    assert perplexity(load_for_calibration(open_checkpoint(tmp_path), "cpu"), WINDOWS, "float32") == pytest.approx(
        expected, rel=1e-5
    )
    # Two windows at once; then a window in steps of 11 tokens.
    monkeypatch.setattr(module, "_MAX_TOKENS", 74)
    assert perplexity(loaded, WINDOWS, "float32", lambda *call: calls.append(call)) == pytest.approx(expected, 1e-5)
    assert [call[0] for call in calls[1:]] == [2, 4, 5]
    monkeypatch.setattr(module, "_MAX_LOGITS_BYTES", 4 * 96 * 11)
    assert perplexity(loaded, WINDOWS, "float32") == pytest.approx(expected, rel=1e-5)


def test_a_cache_of_fewer_bits_changes_it_a_little(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    loaded = load_model(tmp_path, "float32", "cpu")
    exact = perplexity(loaded, WINDOWS, "float32")
    found = {name: perplexity(loaded, WINDOWS, name) for name in KV_DTYPES}
    for name, value in found.items():
        assert (value == exact) == (name == "float32")
        assert value == pytest.approx(exact, rel=0.3)
    # Near for near forms.
    assert abs(found["bfloat16"] - exact) < abs(found["fp8_e5m2"] - exact)


def test_a_model_of_known_probabilities(table_model_dir: Path, table_ids: dict[str, int]) -> None:
    loaded = load_model(table_model_dir, "float32", "cpu")
    windows = [
        [table_ids[word] for word in ("Pick", " red", "Pick", " green")],
        [table_ids[word] for word in ("Pick", " blue", "Pick", " red")],
    ]
    probabilities = [0.5, 1.0, 0.3, 0.2, 1.0, 0.5]
    expected = math.prod(probabilities) ** (-1 / len(probabilities))
    assert perplexity(loaded, windows, "float32") == pytest.approx(expected, rel=1e-5)
    # After this word another one is as good as impossible: -40 against 0.
    surprise = perplexity(loaded, [[table_ids["Count"], table_ids[" 2"]]], "float32")
    assert surprise == pytest.approx(math.exp(40), rel=1e-5)


def test_a_broken_model_has_none_and_a_hopeless_one_an_infinite_one(table_model_dir: Path) -> None:
    loaded = load_for_calibration(open_checkpoint(table_model_dir), "cpu")
    with torch.inference_mode():
        loaded.model.lm_head.weight.mul_(1e3)
    windows = [[5, 6, 7]]
    assert perplexity(loaded, windows, "float32") == math.inf
    with torch.inference_mode():
        loaded.model.lm_head.weight.mul_(math.nan)
    assert math.isnan(perplexity(loaded, windows, "float32"))


@pytest.mark.parametrize(("length", "span"), [(9, None), (8, (0, 8)), (9, (3, 8)), (1, None), (9, (8, 9))])
def test_windows_are_inputs_as_those_of_requests(length: int, span: tuple[int, int] | None) -> None:
    size, device = 4, torch.device("cpu")
    windows = np.array([prompt(length, seed) for seed in range(3)])
    start, stop = span or (0, length)
    found = window_inputs(windows, size, device, True, span)
    rows = []
    for i, window in enumerate(windows.tolist()):
        request = new_request(i, window)
        # The whole context gives logits: what requests with ``return_context_logits`` have.
        rows.append(ScheduledRequest(request, start, stop - start, stop == length))
    output = SchedulerOutput(0, tuple(rows), ())
    width = blocks_per_window(length, size)
    tables = np.arange(3 * width, dtype=np.int32).reshape(3, width)
    expected = ModelInputsBuilder(EngineLimits(3, 64, 16), size, device).build(output, tables)
    for field in ("input_ids", "position_ids", "text_lens"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    for field in ("q_lens", "kv_lens", "block_tables", "slot_mapping"):
        values, wanted = getattr(found.attention, field), getattr(expected.attention, field)
        assert values.dtype == wanted.dtype and torch.equal(values, wanted), field
    for field in ("q_lens_host", "kv_lens_host", "block_tables_host"):
        assert np.array_equal(getattr(found.attention, field), getattr(expected.attention, field)), field
    for field in ("num_contexts", "num_ctx_tokens", "tokens_per_block"):
        assert getattr(found.attention, field) == getattr(expected.attention, field), field
    assert found.logits_indices.tolist() == list(range(3 * (stop - start)))
    assert window_inputs(windows, size, device, False, span).logits_indices.shape == (0,)
