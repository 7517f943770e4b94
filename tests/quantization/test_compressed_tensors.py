"""Checkpoints of compressed-tensors: every form of weights and inputs, against the library that wrote them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import Tensor, nn

from backend_engine.quantization.schemes.inputs import RoundedInput
from backend_engine.quantization.schemes.plain import Plain
from tests.support.compressed_layers import compress, read_config, reference_weight, unpack

OUT, IN = 24, 96
INT: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CHANNEL: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
FP4: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
NV: dict[str, Any] = {**FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
MX: dict[str, Any] = {
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": torch.uint8,
}

WEIGHTS: dict[str, dict[str, Any]] = {
    **{f"int{bits}_groups": {**INT, "num_bits": bits} for bits in range(1, 9)},
    **{f"int{bits}_groups_asymmetric": {**INT, "num_bits": bits, "symmetric": False} for bits in (2, 3, 4, 7, 8)},
    "int4_rows": {**CHANNEL, "num_bits": 4},
    "int8_rows": CHANNEL,
    "int5_rows_asymmetric": {**CHANNEL, "num_bits": 5, "symmetric": False},
    "int8_rows_asymmetric": {**CHANNEL, "symmetric": False},
    "int4_one_scale": {**CHANNEL, "num_bits": 4, "strategy": "tensor"},
    "int8_one_scale_asymmetric": {**CHANNEL, "symmetric": False, "strategy": "tensor"},
}
STORED_ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "int3_groups": {**INT, "num_bits": 3},
    "int4_groups_asymmetric": {**INT, "symmetric": False},
    "int8_rows": CHANNEL,
    "int8_rows_asymmetric": {**CHANNEL, "symmetric": False},
    "int8_one_scale": {**CHANNEL, "strategy": "tensor"},
    "int8_one_scale_asymmetric": {**CHANNEL, "symmetric": False, "strategy": "tensor"},
    "int8_blocks": {**CHANNEL, "strategy": "block", "block_structure": [16, 40]},
    "int8_blocks_asymmetric": {**CHANNEL, "symmetric": False, "strategy": "block", "block_structure": [8, 32]},
}
FLOATS: dict[str, dict[str, Any]] = {
    "fp8_rows": FP8,
    "fp8_one_scale": {**FP8, "strategy": "tensor"},
    "fp8_groups": {**FP8, "strategy": "group", "group_size": 48},
    "fp8_blocks": {**FP8, "strategy": "block", "block_structure": [16, 40]},
}
INPUTS: dict[str, dict[str, Any]] = {
    "int8_tokens": TOKEN,
    "int8_tokens_asymmetric": {**TOKEN, "symmetric": False},
    "int8_static": STATIC,
    "int8_static_asymmetric": {**STATIC, "symmetric": False},
    "int4_tokens": {**TOKEN, "num_bits": 4},
    "int8_groups": {**TOKEN, "strategy": "group", "group_size": 24},
    "fp8_tokens": {**TOKEN, "type": "float"},
    "fp8_static": {**STATIC, "type": "float"},
    "fp8_groups": {**TOKEN, "type": "float", "strategy": "group", "group_size": 48},
    "nvfp4": {**NV, "dynamic": "local"},
    "mxfp4": {**MX, "num_bits": 4, "dynamic": True},
    "mxfp8": {**MX, "num_bits": 8, "dynamic": True},
}


class Holder(nn.Module):
    """A layer with a name; its weight has a row of zeros and some numbers far off."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = OUT, columns: int = IN) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, rows, bias=True)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            self.proj.weight.copy_(torch.randn(rows, columns, generator=generator) * 0.3 + 0.05)
            self.proj.weight[1] = 0
            self.proj.weight[2, 3] = 4
        self.to(dtype)


def tokens(columns: int = IN) -> Tensor:
    """Inputs of which one is all zeros, one has only positive numbers, one is tiny and one has a number far off."""
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(4))
    x[1] = 0
    x[2].abs_()
    x[3] *= 1e-4
    x[4, 7] = 90
    x[5, : columns // 2] = 0
    return x


def group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}}


def check(
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    format: str | None = None,
    dtype: torch.dtype = torch.float32,
    exact: bool = True,
    stored_as: str | None = None,
) -> None:
    """Weight and product are those of the library."""
    found = compress(Holder(dtype), group(weights, inputs), format=format)
    assert stored_as is None or found.config["format"] == stored_as
    packing = read_config(found.config, found.tensors).format_of("proj")
    assert packing is not None
    components = unpack(packing, "proj", found.tensors, (OUT, IN))
    proj: Any = found.model.proj
    expected = reference_weight(proj)
    decoded = packing.scheme.decode(components)
    if exact:
        assert torch.equal(decoded.to(expected.dtype), expected)
    else:
        torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0)
    if dtype != torch.float32:
        return
    x = tokens()
    product = packing.scheme.multiply(packing.scheme.prepare(components), x)
    proj.weight = nn.Parameter(expected.to(x.dtype), requires_grad=False)
    proj.quantization_status = QuantizationStatus.DECOMPRESSED
    # The library tells tokens apart by the second dimension.
    torch.testing.assert_close(product, proj(x[None])[0] - proj.bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WEIGHTS)
def test_packed_integers(name: str) -> None:
    check(WEIGHTS[name], stored_as="pack-quantized")


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_integers_with_scales_of_two_bytes(name: str, dtype: torch.dtype) -> None:
    check(WEIGHTS[name], dtype=dtype)


@pytest.mark.parametrize("name", STORED_ONE_BY_ONE)
@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
def test_integers_one_by_one(name: str, format: str) -> None:
    check(STORED_ONE_BY_ONE[name], format=format, stored_as=format)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_floats(name: str, format: str, dtype: torch.dtype) -> None:
    check(FLOATS[name], format=format, stored_as=format, dtype=dtype)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_rounded_to_the_same_numbers(name: str) -> None:
    found = compress(Holder(), group(CHANNEL, INPUTS[name]))
    packing = read_config(found.config, found.tensors).format_of("proj")
    assert packing is not None and isinstance(packing.scheme, RoundedInput)
    components = unpack(packing, "proj", found.tensors, (OUT, IN))
    proj: Any = found.model.proj
    x = tokens()
    expected = forward_quantize(proj, x[None], "input", proj.quantization_scheme.input_activations)[0]
    identity = dataclasses.replace(packing.scheme, weight=Plain(torch.float32))
    rounded = identity.multiply({**components, "weight": torch.eye(IN)}, x)
    assert torch.equal(rounded, expected)
    assert not torch.equal(rounded, x)
    # A token is rounded the same whatever it is computed with.
    assert torch.equal(identity.multiply({**components, "weight": torch.eye(IN)}, x[3:5]), expected[3:5])


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_integers(name: str) -> None:
    check(CHANNEL, INPUTS[name])


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_floats(name: str) -> None:
    check(FP8, INPUTS[name])


def test_nvfp4() -> None:
    check(NV, exact=False, stored_as="nvfp4-pack-quantized")
    check(NV, INPUTS["nvfp4"], exact=False)
    check(NV, INPUTS["fp8_tokens"], exact=False)


def test_mxfp4() -> None:
    weights = {**MX, "num_bits": 4}
    check(weights, stored_as="mxfp4-pack-quantized")
    check(weights, INPUTS["mxfp4"])
    check(weights, INPUTS["fp8_groups"])


def test_mxfp8() -> None:
    weights = {**MX, "num_bits": 8}
    check(weights, stored_as="mxfp8-quantized")
    check(weights, INPUTS["mxfp8"])


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_a_weight_that_is_unpacked_some_rows_at_a_time(format: str) -> None:
    rows, columns = 2060, 512
    codes = torch.randint(-4, 4, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(6))
    scale = torch.rand(rows, 1, generator=torch.Generator().manual_seed(7)) + 0.1
    weights = {**CHANNEL, "num_bits": 3}
    config = {"format": format, "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    tensors = {"proj.weight_scale": scale}
    if format == "pack-quantized":
        tensors["proj.weight_packed"] = pack_to_int32(codes, 3)
    else:
        tensors["proj.weight"] = codes
    packing = read_config(config, tensors).format_of("proj")
    assert packing is not None
    decoded = packing.scheme.decode(unpack(packing, "proj", tensors, (rows, columns)))
    assert torch.equal(decoded, codes * scale)
