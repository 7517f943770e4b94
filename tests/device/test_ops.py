"""``TorchOps`` against plain formulas written with Python numbers and loops."""

import math

import pytest
import torch

from backend_engine.ops.torch_ops import TorchOps

OPS = TorchOps()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_divides_by_the_root_mean_square(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = randn(5, 16, dtype=dtype), randn(16, dtype=dtype)
    result = OPS.rms_norm(x, weight, 1e-2)
    assert result.dtype == dtype
    for row, out in zip(x.double().tolist(), result.double().tolist(), strict=True):
        root = math.sqrt(sum(v * v for v in row) / 16 + 1e-2)
        expected = [v / root * w for v, w in zip(row, weight.double().tolist(), strict=True)]
        assert out == pytest.approx(expected, abs=tolerance, rel=tolerance)


def test_add_rms_norm_returns_norm_and_sum_and_leaves_its_inputs() -> None:
    x, residual, weight = randn(3, 8), randn(3, 8) * 2, randn(8)
    before = x.clone(), residual.clone()
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, before[0] + before[1])
    torch.testing.assert_close(normed, OPS.rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_silu_and_mul_takes_gate_first() -> None:
    gate_up = randn(4, 6)
    before = gate_up.clone()
    result = OPS.silu_and_mul(gate_up)
    for row, out in zip(before.tolist(), result.tolist(), strict=True):
        gates, ups = row[:3], row[3:]
        assert out == pytest.approx([g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups, strict=True)], abs=1e-6)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rope_rotates_pairs_of_halves_by_position_times_frequency(scale: float) -> None:
    x = randn(4, 3, 8)
    positions = torch.tensor([0, 1, 7, 100], dtype=torch.int32)
    frequencies = torch.tensor([1.0, 0.5, 0.1, 0.01])
    result = OPS.apply_rope(x, *OPS.rope_tables(positions, frequencies, scale))
    for t, position in enumerate(positions.tolist()):
        for head in range(3):
            for i, frequency in enumerate(frequencies.tolist()):
                a, b = float(x[t, head, i]), float(x[t, head, i + 4])
                angle = position * frequency
                expected = (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle))
                found = (float(result[t, head, i]), float(result[t, head, i + 4]))
                assert found == pytest.approx([scale * v for v in expected], abs=1e-5)


def test_append_kv_writes_each_token_into_its_slot_and_nothing_else() -> None:
    kv = torch.full((5, 2, 4, 2, 3), -1.0)
    k, v = randn(3, 2, 3), randn(3, 2, 3) + 10
    slots = torch.tensor([19, 0, 6], dtype=torch.int32)
    OPS.append_kv(k, v, kv, OPS.kv_rows(slots, 4))
    expected = torch.full_like(kv, -1.0)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 4, 0, slot % 4] = k[token]
        expected[slot // 4, 1, slot % 4] = v[token]
    assert torch.equal(kv, expected)


def test_append_kv_into_a_pool_of_one_plane_writes_keys_alone() -> None:
    kv = torch.full((5, 1, 4, 1, 3), -1.0)
    k = randn(3, 1, 3)
    slots = torch.tensor([19, 0, 6], dtype=torch.int32)
    OPS.append_kv(k, k[..., :2], kv, OPS.kv_rows(slots, 4, 1))
    expected = torch.full_like(kv, -1.0)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 4, 0, slot % 4] = k[token]
    assert torch.equal(kv, expected)
