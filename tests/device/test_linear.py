"""``Linear`` with ``Unquantized``, packed and not, and the pool's shapes."""

import pytest
import torch
import torch.nn.functional as F

from backend_engine.layers.linear import Linear
from backend_engine.quantization import unquantized
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized

CPU = torch.device("cpu")


def loaded_linear(
    method: Unquantized, bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    """A layer with random weights, after loading, and copies of weight and bias."""
    layer = Linear(24, (16, 8, 8), method, TensorOptions(dtype, CPU), bias)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert layer.weight is not None
    weight, bias_values = layer.weight.detach().clone(), None if layer.bias is None else layer.bias.detach().clone()
    layer.after_loading()
    return layer, weight, bias_values


@pytest.fixture(params=["native", "onednn", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How weights are kept: as this machine would have them, as one without a compiler, and as they are."""
    if request.param != "native":
        monkeypatch.setattr(unquantized, "native_runtime", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_the_product_is_that_of_the_plain_weight(num_tokens: int, form: str, bias: bool) -> None:
    layer, weight, bias_values = loaded_linear(Unquantized(False if form == "plain" else None), bias)
    x = torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(num_tokens))
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias_values), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.quant.dequantize(layer), weight)
    assert (layer.weight is not None) == (form == "plain")
    assert (layer.packed_weight is not None) == (form == "onednn")
    assert (layer.dense_weight is not None) == (form == "native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_never_packed(dtype: torch.dtype) -> None:
    layer, weight, _ = loaded_linear(Unquantized(), False, dtype)
    x = torch.ones(2, 24, dtype=dtype)
    assert layer.packed_weight is None and layer.dense_weight is None
    assert torch.equal(layer(x), F.linear(x, weight))
    assert layer.quant.dequantize(layer).dtype == torch.float32


def test_a_torch_without_the_packing_operator_is_served_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(unquantized, "_pack", absent)
    monkeypatch.setattr(unquantized, "native_runtime", lambda: None)
    assert not unquantized.packing_works()
    layer, weight, _ = loaded_linear(Unquantized(), False)
    x = torch.randn(3, 24)
    assert layer.packed_weight is None and layer.dense_weight is None
    assert torch.equal(layer(x), F.linear(x, weight))


def test_packing_that_gives_wrong_answers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = unquantized._pack
    monkeypatch.setattr(unquantized, "_pack", lambda weight: real(weight + 1))
    assert not unquantized.packing_works()


def test_products_of_any_number_of_rows_need_few_kernels() -> None:
    rounded = [unquantized.num_product_rows(num_rows) for num_rows in range(1, 2049)]
    assert all(num_rows <= product for num_rows, product in enumerate(rounded, 1))
    assert rounded[:16] == list(range(1, 17)) and len(set(rounded[:512])) <= 50 and len(set(rounded)) <= 62
    assert all(product - num_rows < max(8, num_rows // 2) for num_rows, product in enumerate(rounded, 1))


@pytest.mark.parametrize("bias", [True, False])
def test_padding_changes_no_row(form: str, bias: bool) -> None:
    layer, _, _ = loaded_linear(Unquantized(False if form == "plain" else None), bias)
    x = torch.randn(70, 24, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([layer(row.unsqueeze(0)) for row in x])
    for num_rows in (1, 16, 17, 33, 65, 70):
        result = layer(x[:num_rows])
        assert result.shape == (num_rows, 32)
        exactness = {"atol": 1e-5, "rtol": 1e-5} if form == "plain" else {"atol": 0.0, "rtol": 0.0}
        torch.testing.assert_close(result, alone[:num_rows], **exactness)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_may_be_taken_as_the_file_has_it(form: str, dtype: torch.dtype) -> None:
    """Without a plain copy of it, where it is packed by the native library; elsewhere it is to be copied."""
    method = Unquantized(False if form == "plain" else None)
    weight = torch.randn(32, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    layer = Linear(24, (16, 8, 8), method, TensorOptions(torch.float32, CPU), True)
    assert layer.bias is not None
    layer.bias.copy_(torch.arange(32.0))
    assert method.take(layer, weight) == (form == "native")
    if form != "native":
        assert layer.weight is not None and layer.dense_weight is None
        layer.weight.copy_(weight)
    kept = weight.float().clone()
    weight.zero_()
    layer.after_loading()
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(layer(x), F.linear(x, kept, torch.arange(32.0)), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.quant.dequantize(layer), kept)


def test_a_weight_is_not_taken_in_another_dtype_than_float32() -> None:
    layer = Linear(24, (32,), Unquantized(), TensorOptions(torch.bfloat16, CPU), False)
    assert not layer.quant.take(layer, torch.zeros(32, 24))
