"""What is refused of a compressed-tensors config: by group, key and value, in one line."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_engine.errors import ModelLoadError
from tests.support.compressed_layers import config, int4_tensors, read_config

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def refusal(declared: dict[str, Any], stored: Mapping[str, Tensor] | None = None) -> str:
    """The error, one line."""
    with pytest.raises(ModelLoadError) as error:
        quantization = read_config(declared, int4_tensors() if stored is None else stored)
        quantization.format_of("proj")
    message = str(error.value)
    assert "\n" not in message
    return message


WHERE = "config.json: quantization_config"
GROUP = f"{WHERE}: config_groups: group_0"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format is 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is {'config_groups': {'R1': {}}}"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config is"),
        (
            {"quantization_status": "calibration"},
            "quantization_status is 'calibration'; expected one of compressed, frozen",
        ),
        ({"config_groups": ["Linear"]}, "config_groups is ['Linear']; expected an object"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups: W4A16 is ['Linear']; expected an object"),
        ({"config_groups": {"group_0": {}}}, "config_groups: group_0 is {}; expected an object"),
        ({"format": "marlin-24"}, "format is 'marlin-24'; expected one of float-quantized, int-quantized"),
        ({"format": "mxfp6-pack-quantized"}, "format is 'mxfp6-pack-quantized'"),
        ({"format": "mixed-precision"}, "format is 'mixed-precision'"),
        ({"format": "dense"}, "format is 'dense'"),
        ({"format": None}, "format is missing"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'"),
        ({"ignore": ["re:("]}, "ignore is ['re:(']"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme: num_bits is 4; expected 8"),
        (
            {"kv_cache_scheme": {"num_bits": 8, "symmetric": False}},
            "kv_cache_scheme: symmetric is False; expected true",
        ),
        ({"kv_cache_scheme": {"strategy": "attn_head"}}, "kv_cache_scheme: strategy is 'attn_head'; expected tensor"),
    ],
)
def test_refused_beside_the_groups(values: dict[str, Any], message: str) -> None:
    assert refusal(config(**values)).startswith(f"{WHERE}: {message}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": None}, "targets is missing"),
        ({"targets": "Linear"}, "targets is 'Linear'"),
        ({"weights": None}, "weights is missing"),
        ({"output_activations": {"num_bits": 8}}, "output_activations is {'num_bits': 8}; expected null"),
        ({"format": "fakequant"}, "format is 'fakequant'"),
        ({"block": 3}, "block is 3; expected no such key"),
    ],
)
def test_refused_in_a_group(values: dict[str, Any], message: str) -> None:
    assert refusal(config(values)).startswith(f"{GROUP}: {message}")


@pytest.mark.parametrize(
    ("format", "values", "message"),
    [
        ("pack-quantized", {"type": "float"}, "type is 'float'; expected int with format pack-quantized"),
        ("pack-quantized", {"type": "uint"}, "type is 'uint'; expected one of float, int"),
        ("pack-quantized", {"num_bits": 9}, "num_bits is 9; expected 1 to 8 with format pack-quantized"),
        ("float-quantized", {"type": "float", "num_bits": 4}, "num_bits is 4; expected 8 with format float-quantized"),
        ("naive-quantized", {"type": "float", "num_bits": 6}, "num_bits is 6; expected 8"),
        ("float-quantized", {"type": "int"}, "type is 'int'; expected float"),
        ("pack-quantized", {"strategy": "token", "group_size": None}, "strategy is 'token'; expected one of tensor"),
        ("pack-quantized", {"strategy": "rows"}, "strategy is 'rows'; expected one of"),
        ("pack-quantized", {"strategy": "channel"}, "group_size is 16; expected an integer with strategy group only"),
        ("pack-quantized", {"group_size": None}, "group_size is missing; expected an integer"),
        ("pack-quantized", {"group_size": 0}, "group_size is 0; expected an integer of at least 1"),
        (
            "pack-quantized",
            {"block_structure": [8, 8]},
            "block_structure is [8, 8]; expected two integers with strategy",
        ),
        ("int-quantized", {"strategy": "block", "group_size": None}, "block_structure is missing"),
        (
            "int-quantized",
            {"strategy": "block", "group_size": None, "block_structure": [0, 4]},
            "block_structure is [0, 4]",
        ),
        ("pack-quantized", {"dynamic": True}, "dynamic is True; expected false for weights"),
        ("pack-quantized", {"dynamic": "never"}, "dynamic is 'never'; expected true, false or 'local'"),
        ("pack-quantized", {"actorder": "columns"}, "actorder is 'columns'"),
        ("int-quantized", {"actorder": "group"}, "actorder is 'group'; expected weight, static or null, unless"),
        ("pack-quantized", {"scale_dtype": "torch.int4"}, "scale_dtype is 'torch.int4'"),
        ("pack-quantized", {"clip": 0.5}, "clip is 0.5; expected no such key"),
        (
            "nvfp4-pack-quantized",
            {"type": "float", "strategy": "tensor_group", "group_size": 32},
            "group_size is 32; expected 16 with format nvfp4-pack-quantized",
        ),
        ("mxfp4-pack-quantized", {"type": "float"}, "group_size is 16; expected 32 with format mxfp4-pack-quantized"),
        (
            "mxfp8-quantized",
            {"type": "float", "num_bits": 8, "group_size": 32, "symmetric": False},
            "symmetric is False; expected true for floats",
        ),
    ],
)
def test_refused_weights(format: str, values: dict[str, Any], message: str) -> None:
    weights = {key: value for key, value in {**INT4, **values}.items() if value is not None}
    assert refusal(config({"weights": weights}, format=format)).startswith(f"{GROUP}: weights: {message}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"strategy": "tensor"},
            "dynamic is True; expected false with strategy tensor: a request would depend on others",
        ),
        ({"strategy": "token", "dynamic": False}, "dynamic is False; expected true with strategy token"),
        ({"strategy": "channel", "dynamic": False}, "strategy is 'channel'; expected token, tensor or group"),
        (
            {"strategy": "group", "group_size": 16, "dynamic": False},
            "dynamic is False; expected true with strategy group",
        ),
        (
            {"strategy": "group", "group_size": 16, "symmetric": False},
            "symmetric is False; expected true with strategy",
        ),
        ({"num_bits": 16}, "num_bits is 16; expected 4 or 8"),
        ({"type": "float", "num_bits": 6}, "num_bits is 6; expected 4 or 8"),
        ({"type": "float", "symmetric": False}, "symmetric is False; expected true for floats"),
        ({"actorder": "group"}, "actorder is 'group'; expected null for inputs"),
        ({"scale_dtype": "torch.uint8"}, "scale_dtype is 'torch.uint8'; expected one of torch.float16"),
        ({"type": "float", "num_bits": 4}, "strategy is 'token'; expected tensor_group or group"),
        (
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False},
            "dynamic is False; expected 'local' with strategy tensor_group",
        ),
        (
            {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 16},
            "group_size is 16; expected 32 with strategy group and floats of 4 bits",
        ),
    ],
)
def test_refused_inputs(values: dict[str, Any], message: str) -> None:
    declared = config({"weights": INT8, "input_activations": {**TOKEN, **values}}, format="int-quantized")
    assert refusal(declared).startswith(f"{GROUP}: input_activations: {message}")


def test_weights_that_are_still_floats_are_refused() -> None:
    stored = {"proj.weight": torch.ones(16, 64).bfloat16(), "proj.weight_scale": torch.ones(16, 4)}
    message = refusal(config(quantization_status="frozen"), stored)
    assert message == f"{WHERE}: quantization_status is 'frozen'; expected compressed weights, but proj.weight is BF16"
