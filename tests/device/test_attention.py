"""Attention backends against a dense implementation that knows nothing of blocks, over random ragged batches.

The pool starts full of NaN, so reading a place that nobody wrote is seen at once.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.attention.select import select_backend
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.errors import ConfigError
from backend_engine.plugins.registry import Registry
from tests.support.attention_cache import CPU, LATENT, LAYOUTS, MAX_LEN, SPEC, Cache

VARIANTS = {
    "plain": SPEC,
    "multi_head": replace(SPEC, num_kv_heads=6),
    "multi_query": replace(SPEC, num_kv_heads=1),
    "window": replace(SPEC, sliding_window=5),
    "window_of_one": replace(SPEC, sliding_window=1),
    "softcap": replace(SPEC, logit_softcap=0.7),
    "window_and_softcap": replace(SPEC, sliding_window=9, logit_softcap=0.7),
    "latent": LATENT,
    "latent_as_wide_as_the_key": replace(LATENT, value_dim=8),
    "latent_and_window": replace(LATENT, sliding_window=5),
    "latent_and_softcap": replace(LATENT, logit_softcap=0.7),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_ragged_batches(layout: str, name: str, dtype: torch.dtype, tolerance: float) -> None:
    pick = random.Random(name)
    cache = Cache(5, VARIANTS[name], dtype, size=LAYOUTS[layout])
    for _ in range(8):
        requests = pick.sample(range(5), pick.randint(1, 5))
        counts = sorted((pick.choice([1, 1, 2, 3, 4, 7, 9]) for _ in requests), reverse=True)
        found, expected = cache.step(list(zip(requests, counts, strict=True)))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("spec", [replace(SPEC, head_dim=2), LATENT, replace(SPEC, has_sinks=True)])
@pytest.mark.parametrize("size", LAYOUTS.values())
def test_rows_of_very_different_length_are_computed_in_groups_and_come_back_in_order(
    size: int, spec: AttentionSpec
) -> None:
    cache = Cache(24, spec, torch.float32, size=size)
    lengths = [3, 90, 5, 88, 2, 7] * 4
    for request, length in enumerate(lengths):
        cache.step([(request, length)])
    found, expected = cache.step([(request, 1) for request in range(24)])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert len(cache.backend._pieces) > 1  # type: ignore[attr-defined]


def test_layers_of_one_step_may_have_different_windows() -> None:
    cache = Cache(3, SPEC, torch.float32)
    cache.step([(0, 9), (1, 4), (2, 6)])
    cache.spec = replace(SPEC, sliding_window=3)
    found, expected = cache.step([(0, 5), (1, 1), (2, 1)])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    q, k, v = cache.draw([(0, 5), (1, 1), (2, 1)])
    narrow = cache.backend.forward(q, k, v, cache.spec, cache.paged)
    wide = cache.backend.forward(q, k, v, SPEC, cache.paged)
    assert not torch.allclose(narrow, wide)
    again = cache.backend.forward(q, k, v, cache.spec, cache.paged)
    assert torch.equal(narrow, again)


def test_layers_of_one_step_may_store_keys_and_values_or_one_vector() -> None:
    pair, latent = Cache(3, SPEC, torch.float32), Cache(3, LATENT, torch.float32)
    latent.backend = pair.backend
    for rows in ([(0, 9), (1, 4), (2, 6)], [(1, 5), (0, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)]):
        for is_first, layer in ((True, pair), (False, latent)):
            found, expected = layer.step(rows, is_first)
            assert found.shape == (len(expected), 6, 8 if is_first else 5)
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone, crowd = Cache(4, SPEC, torch.float32), Cache(4, SPEC, torch.float32)
    crowd.step([(0, 5), (1, 9)])
    first, _ = alone.step([(2, 13)])
    mixed, _ = crowd.step([(2, 13), (0, 3), (3, 2)])
    torch.testing.assert_close(mixed[:13], first, atol=1e-6, rtol=1e-6)
    for _ in range(4):
        single, _ = alone.step([(2, 1)])
        mixed, _ = crowd.step([(1, 1), (2, 1), (0, 1)])
        torch.testing.assert_close(mixed[1:2], single, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("spec", [SPEC, LATENT, replace(SPEC, has_sinks=True)])
@pytest.mark.parametrize("size", LAYOUTS.values())
def test_what_an_earlier_owner_left_in_a_block_does_not_leak(size: int, spec: AttentionSpec) -> None:
    cache = Cache(2, spec, torch.float32, size=size)
    cache.step([(0, 11), (1, 3)])
    cache.keys[0] = cache.keys[0][:0]
    cache.values[0] = cache.values[0][:0]
    cache.kv[torch.from_numpy(cache.tables[0]).long()] = math.inf
    for count in (5, 1, 1, 1, 1, 2):
        found, expected = cache.step([(0, count), (1, 1)])
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_new_request_costs_the_part_of_a_long_block_that_it_uses_and_not_all_of_it() -> None:
    cache = Cache(3, SPEC, torch.float32, size=MAX_LEN)
    cache.step([(0, 11), (1, 30), (2, 1)])
    cache.step([(0, 1), (1, 1), (2, 1)])
    # The block of 96 is read and zeroed in parts of 48: what lies behind the first is as it was.
    (piece,) = cache.backend._pieces  # type: ignore[attr-defined]
    assert piece.pool_rows.of(2).tolist() == [4 * block for block in cache.tables[:, 0]] + [
        4 * block + 2 for block in cache.tables[:, 0]
    ]
    is_nan = cache.kv.isnan().flatten(3).all(-1).all(1)  # [num_blocks, size]
    assert is_nan.int().argmax(1).tolist() == [48, 48, 48] and is_nan.sum(1).tolist() == [48, 48, 48]


class Picky(TorchAttention):
    name = "picky"
    preference = 9

    @classmethod
    def unsupported(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[str]:
        return ["no windows"] if spec.sliding_window is not None else []


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[type[AttentionBackend]] = Registry(
        "attention backend", {"torch": TorchAttention, "picky": Picky}
    )
    monkeypatch.setattr("backend_engine.attention.select.ATTENTION_BACKENDS", registry)


@pytest.mark.usefixtures("two_backends")
def test_auto_takes_the_preferred_backend_that_serves_every_layer() -> None:
    windowed = replace(SPEC, sliding_window=3)
    assert select_backend("auto", [SPEC], torch.float32, CPU) is Picky
    assert select_backend("auto", [SPEC, windowed], torch.float32, CPU) is TorchAttention
    assert select_backend("torch", [SPEC], torch.float32, CPU) is TorchAttention


@pytest.mark.usefixtures("two_backends")
def test_a_refusal_prints_the_reasons_of_every_candidate() -> None:
    windowed = replace(SPEC, sliding_window=3)
    with pytest.raises(ConfigError, match=r"^no attention backend can serve this model \(picky: no windows\)$"):
        select_backend("picky", [windowed], torch.float32, CPU)
    with pytest.raises(
        ConfigError, match=r"\(picky: no windows; torch: dtype torch\.int8 is not a floating point type\)$"
    ):
        select_backend("auto", [windowed], torch.int8, CPU)
    with pytest.raises(ConfigError, match=r"unknown attention backend 'torhc'; known: picky, torch; .*'torch'\?$"):
        select_backend("torhc", [SPEC], torch.float32, CPU)
