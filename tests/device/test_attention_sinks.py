"""Attention sinks: a learned score of each head that takes part in the softmax and stands for no token (GPT-OSS, 2025).

Against the dense implementation of ``tests/support/attention_cache.py``, by the fused product and written out.
"""

import random
from dataclasses import replace

import pytest
import torch

from backend_engine.attention import torch_scores
from backend_engine.attention.interface import AttentionBackend
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.attention.torch_scores import find_fused_with_sums
from backend_engine.ops.torch_ops import TorchOps
from tests.support.attention_cache import CPU, LATENT, LAYOUTS, SPEC, Cache

SINKS = replace(SPEC, has_sinks=True)
VARIANTS = {
    "plain": SINKS,
    "multi_head": replace(SINKS, num_kv_heads=6),
    "window": replace(SINKS, sliding_window=5),
    "softcap": replace(SINKS, logit_softcap=0.7),
    "latent": replace(LATENT, has_sinks=True),
    "latent_and_window_and_softcap": replace(LATENT, has_sinks=True, sliding_window=3, logit_softcap=0.7),
}


@pytest.fixture(params=["fused", "written_out", "written_out_in_parts"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """By each of the ways; the last with one query at a time."""
    if request.param == "fused":
        assert find_fused_with_sums() is not None
    else:
        monkeypatch.setattr("backend_engine.attention.torch_attention.find_fused_with_sums", lambda: None)
    if request.param == "written_out_in_parts":
        monkeypatch.setattr(torch_scores, "_MAX_SCORES", 1)
    return TorchAttention(TorchOps(), CPU)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_ragged_batches(
    layout: str, name: str, dtype: torch.dtype, tolerance: float, backend: AttentionBackend
) -> None:
    pick = random.Random(name)
    cache = Cache(4, VARIANTS[name], dtype, size=LAYOUTS[layout])
    cache.backend = backend
    for _ in range(6):
        requests = pick.sample(range(4), pick.randint(1, 4))
        counts = sorted((pick.choice([1, 1, 2, 3, 7, 9]) for _ in requests), reverse=True)
        found, expected = cache.step(list(zip(requests, counts, strict=True)))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_sinks_and_the_layer_that_has_them_come_together(backend: AttentionBackend) -> None:
    cache = Cache(1, SINKS, torch.float32)
    cache.backend = backend
    cache.step([(0, 3)])
    q, k, v = cache.draw([(0, 3)])
    with pytest.raises(AssertionError, match="layer 0: has_sinks is True"):
        backend.forward(q, k, v, SINKS, cache.kv)
    with pytest.raises(AssertionError, match="layer 0: has_sinks is False"):
        backend.forward(q, k, v, SPEC, cache.kv, torch.zeros(6))


def test_a_torch_without_the_fused_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def default(q: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
            return q, q[..., 0]

    class Packet:
        _scaled_dot_product_flash_attention_for_cpu = Wrong

    monkeypatch.setattr(torch.ops, "aten", Packet)
    assert find_fused_with_sums() is None
    monkeypatch.setattr(torch.ops, "aten", object())
    assert find_fused_with_sums() is None
