"""FP8 checkpoints, written here by the published layout: what is loaded is what they stand for, number by number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.plugins.catalog import QUANT_METHODS
from backend_engine.quantization.formats.fp8 import read, read_fbgemm
from backend_engine.quantization.weight_format import Quantization, StoredTensors
from tests.support.weight_formats import WHERE, decoded, described, load

MODULE = "model.layers.0.mlp.down_proj"
CONFIG: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def quantization(tensors: dict[str, Tensor], **config: Any) -> Quantization:
    return read(HfConfig({**CONFIG, **config}, WHERE), described(tensors))


def random_codes(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def random_scales(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


def times(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """``codes [rows, columns]`` times the scale of their block, one number at a time."""
    rows, columns = codes.shape
    wide = codes.float()
    expected = [
        [wide[r, c] * scales[r // block[0], c // block[1]].float() for c in range(columns)] for r in range(rows)
    ]
    return torch.tensor(expected)


@pytest.mark.parametrize("shape", [(8, 32), (10, 37), (3, 5)])
@pytest.mark.parametrize("block", [(4, 16), (5, 7), (1, 8), (128, 128)])
def test_blocks_of_rows_and_columns_share_a_scale(shape: tuple[int, int], block: tuple[int, int]) -> None:
    codes = random_codes(shape)
    scales = random_scales((-(-shape[0] // block[0]), -(-shape[1] // block[1])))
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale_inv": scales}
    weight = decoded(quantization(tensors, weight_block_size=list(block)), tensors, MODULE, shape)
    assert torch.equal(weight, times(codes, scales, block))


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_a_config_without_a_block_size_means_128_where_the_scales_do(scale_fmt: str) -> None:
    shape = (130, 257)
    codes, scales = random_codes(shape), random_scales((2, 3))
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale_inv": scales}
    weight = decoded(quantization(tensors, scale_fmt=scale_fmt), tensors, MODULE, shape)
    assert torch.equal(weight, times(codes, scales, (128, 128)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_may_have_any_dtype(dtype: torch.dtype) -> None:
    codes = random_codes((4, 16))
    powers = torch.tensor([[0.5, 2.0], [1.0, 0.0625]])
    stored = {
        torch.uint8: torch.tensor([[126, 128], [127, 123]], dtype=torch.uint8),
        torch.float8_e8m0fnu: torch.tensor([[126, 128], [127, 123]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }.get(dtype, powers.to(dtype))
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale_inv": stored}
    weight = decoded(quantization(tensors, weight_block_size=[2, 8]), tensors, MODULE, (4, 16))
    assert torch.equal(weight, times(codes, powers, (2, 8)))


@pytest.mark.parametrize("ending", [".weight_scale", ".weight_scale_inv"])
@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1), (6,), (6, 1)])
@pytest.mark.parametrize("block", [None, [128, 128]])
def test_a_scale_for_the_tensor_or_for_each_row_is_known_by_its_shape(
    ending: str, scale_shape: tuple[int, ...], block: list[int] | None
) -> None:
    codes, scales = random_codes((6, 8)), random_scales(scale_shape)
    tensors = {f"{MODULE}.weight": codes, MODULE + ending: scales}
    weight = decoded(quantization(tensors, weight_block_size=block), tensors, MODULE, (6, 8))
    assert torch.equal(weight, codes.float() * scales.reshape(-1, 1))


def test_weights_may_have_five_bits_of_exponent() -> None:
    codes, scale = random_codes((6, 8), torch.float8_e5m2), random_scales((1,))
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": scale}
    weight = decoded(quantization(tensors, weight_block_size=None, fmt="e5m2"), tensors, MODULE, (6, 8))
    assert torch.equal(weight, codes.float() * scale)


@pytest.mark.parametrize(("weight", "scale"), [("", "_scale_inv"), (".weight", ".weight_scale_inv")])
def test_experts_in_one_stack_have_their_own_scales(weight: str, scale: str) -> None:
    stack, shape = "model.layers.0.mlp.experts.gate_up_proj", (3, 6, 16)
    codes, scales = random_codes(shape), random_scales((3, 2, 2))
    tensors = {stack + weight: codes, stack + scale: scales}
    loaded = decoded(quantization(tensors, weight_block_size=[4, 8]), tensors, stack, shape)
    for expert in range(3):
        assert torch.equal(loaded[expert], times(codes[expert], scales[expert], (4, 8)))


@pytest.mark.parametrize("scale_shape", [(3,), (3, 1, 1), (3, 6), (3, 6, 1)])
def test_experts_in_one_stack_may_have_a_scale_each_or_one_for_each_row(scale_shape: tuple[int, ...]) -> None:
    stack, shape = "model.layers.0.mlp.experts.down_proj", (3, 6, 16)
    codes, scales = random_codes(shape), random_scales(scale_shape)
    tensors = {stack: codes, f"{stack}_scale_inv": scales}
    loaded = decoded(quantization(tensors, weight_block_size=None), tensors, stack, shape)
    assert torch.equal(loaded, codes.float() * scales.reshape(3, -1, 1))


@pytest.mark.parametrize("scale_shape", [(), (1,)])
@pytest.mark.parametrize("ending", [".input_scale", ".activation_scale"])
def test_a_static_scheme_rounds_the_input_with_the_stored_scale(ending: str, scale_shape: tuple[int, ...]) -> None:
    codes, scale, input_scale = random_codes((6, 8)), random_scales(()), torch.full(scale_shape, 0.003)
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": scale, MODULE + ending: input_scale}
    found = quantization(tensors, weight_block_size=None, activation_scheme="static")
    packing, parts = load(found, tensors, MODULE, (6, 8))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)) * 2
    assert (x.abs() > 448 * 0.003).any()
    rounded = (x / 0.003).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.003
    expected = rounded @ (codes.float() * scale).t()
    product = packing.scheme.multiply(packing.scheme.prepare(parts), x)
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(product, x @ (codes.float() * scale).t(), rtol=1e-3)


def test_a_dynamic_scheme_leaves_the_input_alone_and_fbgemm_rounds_every_token_with_its_own_scale() -> None:
    codes, scales = random_codes((6, 8)), random_scales((6, 1))
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": scales}
    weight = codes.float() * scales
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 5).unsqueeze(1)
    steps = x.abs().amax(1, keepdim=True) / 448
    rounded = (x / steps).to(torch.float8_e4m3fn).float() * steps
    config = HfConfig({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, WHERE)
    for found, expected in (
        (quantization(tensors, weight_block_size=None), x @ weight.t()),
        (read_fbgemm(config, described(tensors)), rounded @ weight.t()),
    ):
        packing, parts = load(found, tensors, MODULE, (6, 8))
        product = packing.scheme.multiply(packing.scheme.prepare(parts), x)
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-4)


def test_parts_of_a_fused_layer_keep_their_own_scales() -> None:
    tensors: dict[str, Tensor] = {}
    for seed, name in enumerate(("q", "k", "v")):
        tensors[f"attn.{name}_proj.weight"] = random_codes((4, 8), seed=seed)
        tensors[f"attn.{name}_proj.weight_scale"] = random_scales((), seed)
    found = quantization(tensors, weight_block_size=None)
    loaded = [load(found, tensors, f"attn.{name}_proj", (4, 8)) for name in ("q", "k", "v")]
    schemes = {packing.scheme for packing, _ in loaded}
    assert len(schemes) == 1
    fused = {name: torch.cat([parts[name].view(4, -1) for _, parts in loaded]) for name in ("codes", "scales")}
    expected = [tensors[f"attn.{n}_proj.weight"].float() * tensors[f"attn.{n}_proj.weight_scale"] for n in "qkv"]
    assert torch.equal(schemes.pop().decode(fused), torch.cat(expected))


def test_modules_that_are_listed_or_plain_are_not_packed() -> None:
    tensors = {
        "lm_head.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.zeros(4, 8),
        "model.layers.0.mlp.gate.weight": random_codes((4, 8)),
        "model.layers.0.mlp.gate_proj.weight": random_codes((4, 8)),
        "model.layers.1.self_attn.q_proj.weight": random_codes((4, 8)),
        "model.layers.11.self_attn.q_proj.weight": random_codes((4, 8)),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(2, 4, 8),
    }
    for key in ("modules_to_not_convert", "ignored_layers"):
        found = quantization(tensors, **{key: ["mlp.gate", "model.layers.1"]})
        packed = {name for name in tensors if found.format_of(name.removesuffix(".weight")) is not None}
        assert packed == {"model.layers.0.mlp.gate_proj.weight", "model.layers.11.self_attn.q_proj.weight"}


def test_patterns_may_have_wildcards_and_regular_expressions() -> None:
    names = ["model.layers.0.mlp.router", "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj"]
    tensors = {f"{name}.weight": random_codes((4, 8)) for name in names}
    found = quantization(tensors, modules_to_not_convert=["model.layers.*.self_attn", "re:.*router$"])
    assert [found.format_of(name) is None for name in names] == [True, False, True]


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_a_weight_with_a_tensor_missing_keeps_its_format(scheme: str) -> None:
    tensors = {f"{MODULE}.weight": random_codes((256, 256)), "x.weight_scale_inv": random_scales((2, 2))}
    found = quantization(tensors, activation_scheme=scheme)
    leaves = {name: packing.leaves((256, 256)) for name in (MODULE, "x") if (packing := found.format_of(name))}
    assert leaves[MODULE][".weight_scale_inv"].shape == (2, 2)
    assert not any(leaf.is_optional for of_one in leaves.values() for leaf in of_one.values())
    assert (".input_scale" in leaves[MODULE]) == (scheme == "static")
    assert ".weight" in leaves["x"]


def test_tensors_that_do_not_fit_are_asked_for_as_they_should_be() -> None:
    tensors = {f"{MODULE}.weight": torch.zeros(256, 256, dtype=torch.int8), f"{MODULE}.weight_scale_inv": torch.ones(7)}
    packing = quantization(tensors, weight_block_size=[128, 64]).format_of(MODULE)
    assert packing is not None
    leaves = packing.leaves((256, 256))
    assert leaves[".weight"].dtypes == ("F8_E4M3",)
    assert leaves[".weight_scale_inv"].shape == (2, 4)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({".input_scale": torch.zeros(())}, "input_scale is 0.0, and must be above 0"),
        ({".input_scale": torch.tensor(float("nan"))}, "input_scale is nan"),
        ({".weight_scale": torch.tensor(float("inf"))}, "weight_scale has numbers that are not finite"),
        ({".weight_scale": torch.tensor(255, dtype=torch.uint8)}, "weight_scale has numbers that are not finite"),
    ],
)
def test_scales_that_make_no_sense_are_refused(changed: dict[str, Tensor], match: str) -> None:
    leaves = {".weight": random_codes((4, 8)), ".weight_scale": torch.ones(()), ".input_scale": torch.ones(())}
    leaves |= changed
    tensors = {MODULE + ending: tensor for ending, tensor in leaves.items()}
    with pytest.raises(ValueError, match=match):
        load(quantization(tensors, activation_scheme="static", weight_block_size=None), tensors, MODULE, (4, 8))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("activation_scheme", "blockwise", "one of dynamic, static"),
        ("weight_block_size", [128], "two integers of at least 1"),
        ("weight_block_size", [0, 128], "two integers of at least 1"),
        ("weight_block_size", 128, "two integers of at least 1"),
        ("expert_dtype", "fp4", "one of fp8"),
        ("scale_fmt", "e4m3", "one of float, ue8m0"),
        ("fmt", "e3m4", "one of e4m3"),
        ("modules_to_not_convert", "lm_head", "a list of names"),
        ("ignored_layers", ["re:("], "a list of names"),
    ],
)
def test_values_that_are_not_known_are_refused_in_one_line(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(HfConfig({**CONFIG, key: value}, WHERE), StoredTensors({}, WHERE))
    assert str(refused.value).startswith(f"{WHERE}: {key} is {value!r}; expected {allowed}")
    assert "\n" not in str(refused.value)


def test_fbgemm_is_in_the_catalog_and_checks_its_bound() -> None:
    assert QUANT_METHODS.get("fbgemm_fp8") is read_fbgemm
    with pytest.raises(ModelLoadError, match="activation_scale_ub is -1; expected a number above 0"):
        read_fbgemm(HfConfig({"activation_scale_ub": -1}, WHERE), StoredTensors({}, WHERE))
