"""The native library's operations against those of torch: the same numbers, the same bits wherever a token stands."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.ops.native_ops import NativeOps
from backend_engine.ops.native_runtime import native_runtime
from backend_engine.ops.torch_ops import TorchOps

NATIVE, TORCH = NativeOps(), TorchOps()
Run = Callable[[TorchOps, Tensor], Tensor]

ROW_OPS: dict[str, Run] = {
    "rms_norm": lambda ops, x: ops.rms_norm(x, row(x.shape[1]), 1e-5),
    "layer_norm": lambda ops, x: ops.layer_norm(x, row(x.shape[1]), row(x.shape[1], 2), 1e-5),
    "layer_norm without bias": lambda ops, x: ops.layer_norm(x, row(x.shape[1]), None, 1e-5),
    "silu": lambda ops, x: ops.silu(x),
    "gelu": lambda ops, x: ops.gelu(x, "none"),
    "gelu tanh": lambda ops, x: ops.gelu(x, "tanh"),
    "relu": lambda ops, x: ops.relu(x),
    "scaled": lambda ops, x: ops.scaled(x, 0.22),
    "add": lambda ops, x: ops.add(x, x.roll(1, 1)),
    "silu_and_mul": lambda ops, x: ops.silu_and_mul(x),
    "gelu_and_mul": lambda ops, x: ops.gelu_and_mul(x, "none"),
    "gelu_and_mul tanh": lambda ops, x: ops.gelu_and_mul(x, "tanh"),
    "relu_and_mul": lambda ops, x: ops.relu_and_mul(x),
    "clamped_swiglu": lambda ops, x: ops.clamped_swiglu(x, 1.7, 2.0),
}


def row(width: int, seed: int = 1) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def exact(name: str, x: Tensor) -> Tensor:
    """By torch; activations in float64, since with AVX-512 the last bits of its float32 exponentials are off."""
    return ROW_OPS[name](TORCH, x) if "norm" in name else ROW_OPS[name](TORCH, x.double()).float()


def rows(num_tokens: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_library_is_there() -> None:
    assert native_runtime() is not None, "the machine that runs the tests has a C compiler"


@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("width", [2, 6, 64, 130, 576, 3072])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 100])
def test_the_same_numbers_as_torch(name: str, width: int, num_tokens: int) -> None:
    x = rows(num_tokens, width)
    result, expected = ROW_OPS[name](NATIVE, x), exact(name, x)
    assert result.shape == expected.shape and result.is_contiguous()
    torch.testing.assert_close(result, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("width", [6, 130, 576])
def test_a_token_has_the_same_bits_wherever_it_stands(name: str, width: int) -> None:
    x = rows(300, width)
    together = ROW_OPS[name](NATIVE, x)
    torch.set_num_threads(1)
    for place in (0, 1, 7, 150, 299):
        assert torch.equal(ROW_OPS[name](NATIVE, x[place : place + 1]), together[place : place + 1]), place


@pytest.mark.parametrize("name", ROW_OPS)
def test_tokens_with_gaps_between_them(name: str) -> None:
    wide = rows(9, 200)
    x = wide[:, 20:84]
    assert torch.equal(ROW_OPS[name](NATIVE, x), ROW_OPS[name](NATIVE, x.contiguous()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ROW_OPS)
def test_what_is_no_number_stays_in_its_token(name: str, bad: float) -> None:
    x = rows(3, 64)
    before = ROW_OPS[name](NATIVE, x)
    x[1, 5] = bad
    after, expected = ROW_OPS[name](NATIVE, x), exact(name, x)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    assert torch.equal(after[1].isnan(), expected[1].isnan()), (after[1], expected[1])


def test_activations_over_the_whole_range() -> None:
    x = torch.cat((torch.linspace(-120, 120, 4001), torch.tensor([1e-38, -1e-38, 3e38, -3e38, 0.0, -0.0])))
    x = x.unsqueeze(0)
    for name in ("silu", "gelu", "gelu tanh", "relu"):
        torch.testing.assert_close(ROW_OPS[name](NATIVE, x), exact(name, x), rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(num_tokens=st.integers(1, 70), width=st.integers(1, 700), seed=st.integers(0, 5))
def test_add_rms_norm(num_tokens: int, width: int, seed: int) -> None:
    x, residual, weight = rows(num_tokens, width, seed), rows(num_tokens, width, seed + 1), row(width)
    (out, total), expected = NATIVE.add_rms_norm(x, residual, weight, 1e-6), residual + x
    assert torch.equal(total, expected)
    torch.testing.assert_close(out, TORCH.rms_norm(expected, weight, 1e-6), rtol=3e-6, atol=3e-6)
    assert torch.equal(out, NATIVE.rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("dim", [64, 32, 12, 2])
@pytest.mark.parametrize("num_tokens", [1, 200])
def test_rope(dim: int, num_tokens: int) -> None:
    heads = rows(num_tokens, 15 * 64).view(num_tokens, 15, 64)[:, :12]
    cos, sin = TORCH.rope_tables(torch.arange(num_tokens), torch.rand(dim // 2), 1.3)
    result = NATIVE.apply_rope(heads, cos, sin)
    torch.testing.assert_close(result, TORCH.apply_rope(heads, cos, sin), rtol=1e-6, atol=1e-6)
    last = slice(num_tokens - 1, num_tokens)
    assert torch.equal(NATIVE.apply_rope(heads[last], cos[last], sin[last]), result[last])


def test_norms_of_each_head() -> None:
    heads, weight = rows(5, 15 * 64).view(5, 15, 64)[:, :12], row(64)
    torch.testing.assert_close(NATIVE.rms_norm(heads, weight, 1e-5), TORCH.rms_norm(heads, weight, 1e-5))
    torch.testing.assert_close(
        NATIVE.layer_norm(heads, weight, None, 1e-5), TORCH.layer_norm(heads, weight, None, 1e-5)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    x = rows(3, 64).to(dtype)
    for name in ("silu", "gelu", "relu_and_mul", "silu_and_mul"):
        assert torch.equal(ROW_OPS[name](NATIVE, x), ROW_OPS[name](TORCH, x)), name
    assert torch.equal(NATIVE.rms_norm(x, row(64).to(dtype), 1e-5), TORCH.rms_norm(x, row(64).to(dtype), 1e-5))


def test_numbers_that_do_not_lie_side_by_side_are_left_to_torch() -> None:
    x = rows(64, 5).T
    assert torch.equal(NATIVE.silu(x), TORCH.silu(x))
