"""Windows that the user sets, against transformers with an explicit mask in every layer."""

from pathlib import Path

import pytest
import torch

from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_llama import build_tiny_llama, limit_windows, reference_greedy, reference_logits

NEW_TOKENS = 12


def _prompt(length: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("tokens_per_block", [8, 160])
@pytest.mark.parametrize("windows", [(7,), (5, 19), (1000, 3), (1,)])
def test_logits_and_tokens_are_those_of_transformers(
    windows: tuple[int, ...], tokens_per_block: int, tmp_path: Path
) -> None:
    model = build_tiny_llama(tmp_path, num_hidden_layers=3)
    plain = reference_logits(model, _prompt(41))
    limit_windows(model, windows)
    assert not torch.allclose(reference_logits(model, _prompt(41))[-1], plain[-1]), "the windows make a difference"
    driver = EngineDriver(tmp_path, tokens_per_block=tokens_per_block, max_attention_window=windows)
    for request_id, chunk in enumerate((1000, 9, 1)):
        output = driver.generate(driver.add(request_id, _prompt(41)), NEW_TOKENS, chunk)
        assert output == reference_greedy(model, _prompt(41), NEW_TOKENS)
        expected = reference_logits(model, _prompt(41) + output[:-1])[40:]
        torch.testing.assert_close(torch.stack(driver.logits[request_id]), expected, atol=1e-4, rtol=1e-4)


def _windows(own: int | None, given: tuple[int, ...]) -> list[int | None]:
    decl = AttentionDecl(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, rope=None, sliding_window=own)
    spec = ArchSpec(96, 32, 256, RmsNormDecl(1e-5), (LayerDecl(decl, None),) * 5, max_windows=given)
    return [attention.sliding_window for attention in spec.attention_specs()]


def test_a_layer_has_the_smaller_of_its_own_window_and_the_given_one_which_repeat_over_the_layers() -> None:
    assert _windows(None, ()) == [None] * 5
    assert _windows(16, ()) == [16] * 5
    assert _windows(None, (8, 32)) == [8, 32, 8, 32, 8]
    assert _windows(16, (8, 32, 16)) == [8, 16, 16, 8, 16]
