"""``KVPool``: tensors as the specs say, and a size that sizing foresaw to the byte."""

import pytest
import torch

from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.core.kv_spec import CacheSpec, KvSpec, LatentSpec, StateSpec
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.kv_cache.sizing import bytes_per_block

CPU = torch.device("cpu")
SPECS: list[CacheSpec] = [KvSpec(2, 8), StateSpec(((3, 20), (2, 4, 5))), LatentSpec(12), KvSpec(1, 4)]


def test_every_layer_has_the_tensors_of_its_spec_zeroed() -> None:
    pool = KVPool(SPECS, 5, 16, torch.bfloat16, CPU)
    keys, states, latent, more_keys = pool.layers
    assert isinstance(keys, torch.Tensor) and isinstance(latent, torch.Tensor) and isinstance(more_keys, torch.Tensor)
    assert isinstance(states, tuple)
    assert [tuple(t.shape) for t in (keys, latent, more_keys)] == [
        (5, 2, 16, 2, 8),
        (5, 1, 16, 1, 12),
        (5, 2, 16, 1, 4),
    ]
    assert [tuple(t.shape) for t in states] == [(5, 3, 20), (5, 2, 4, 5)]
    assert {t.dtype for t in (keys, latent, more_keys)} == {torch.bfloat16} and {t.dtype for t in states} == {
        torch.float32
    }
    assert [id(t) for t in pool.tensors] == [id(t) for t in (keys, *states, latent, more_keys)]
    assert not any(tensor.any() for tensor in pool.tensors)


def test_int8_comes_with_a_scale_for_each_head_of_each_token() -> None:
    pool = KVPool(SPECS, 5, 16, torch.int8, CPU)
    keys, states, latent, _ = pool.layers
    assert [(tuple(t.shape), t.dtype) for layer in (keys, latent) for t in layer] == [
        ((5, 2, 16, 2, 8), torch.int8),
        ((5, 2, 16, 2), torch.float32),
        ((5, 1, 16, 1, 12), torch.int8),
        ((5, 1, 16, 1), torch.float32),
    ]
    assert [(tuple(t.shape), t.dtype) for t in states] == [
        ((5, 3, 20), torch.float32),
        ((5, 2, 4, 5), torch.float32),
    ]
    assert not any(tensor.any() for tensor in pool.tensors)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("tokens_per_block", [1, 16])
def test_sizing_is_exact(name: str, tokens_per_block: int) -> None:
    assert KV_DTYPES.keys() == KV_FORMATS.keys()
    dtype = KV_DTYPES[name]
    pool = KVPool(SPECS, 7, tokens_per_block, dtype, CPU)
    per_token = (2 * 2 * 8 + 12 + 2 * 1 * 4) * dtype.itemsize + (4 * (2 * 2 + 1 + 2 * 1) if name == "int8" else 0)
    assert pool.num_bytes == 7 * (tokens_per_block * per_token + 4 * (3 * 20 + 2 * 4 * 5))
    assert pool.num_bytes == 7 * bytes_per_block(SPECS, KV_FORMATS[name], tokens_per_block)
    regions = pool.memory_regions()
    assert regions == [(t.data_ptr(), t.numel() * t.element_size()) for t in pool.tensors] and len(regions) == (
        8 if name == "int8" else 5
    )
