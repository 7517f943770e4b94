"""MXFP4 experts of GPT-OSS: what is loaded is what the published layout says, and what transformers decodes it to."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.mxfp4 import read
from backend_engine.quantization.weight_format import Quantization, StoredTensors
from tests.support.weight_formats import WHERE, decoded, described, load

STACK = "model.layers.0.mlp.experts.gate_up_proj"
SHAPE = (3, 8, 96)
NUMBERS = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def quantization(tensors: dict[str, Tensor], **config: Any) -> Quantization:
    return read(HfConfig({"quant_method": "mxfp4", **config}, WHERE), described(tensors))


def packed(shape: tuple[int, ...] = SHAPE) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(110, 130, (*shape[:-1], shape[-1] // 32), generator=rng, dtype=torch.uint8)
    return {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}


def test_a_stack_is_decoded_number_by_number() -> None:
    tensors = packed()
    weight = decoded(quantization(tensors), tensors, STACK, SHAPE)
    blocks, scales = tensors[f"{STACK}_blocks"].tolist(), tensors[f"{STACK}_scales"].tolist()
    for expert, row, column in ((0, 0, 0), (0, 1, 1), (2, 7, 95), (1, 3, 32), (1, 4, 63), (2, 0, 17)):
        byte = blocks[expert][row][column // 32][column % 32 // 2]
        code = byte >> 4 if column % 2 else byte & 15
        number = NUMBERS[code & 7] * 2.0 ** (scales[expert][row][column // 32] - 127)
        assert float(weight[expert, row, column]) == (-number if code & 8 else number), (expert, row, column)


def test_every_code_at_every_scale_is_exact() -> None:
    shape = (1, 255, 32)
    blocks = torch.arange(16, dtype=torch.uint8) * 16 + torch.arange(15, -1, -1, dtype=torch.uint8)
    tensors = {
        f"{STACK}_blocks": blocks.expand(1, 255, 1, 16).contiguous(),
        f"{STACK}_scales": torch.arange(255, dtype=torch.uint8).view(1, 255, 1),
    }
    packing, parts = load(quantization(tensors), tensors, STACK, shape)
    codes = [code for byte in range(16) for code in (15 - byte, byte)]
    numbers = torch.tensor([-NUMBERS[code & 7] if code & 8 else NUMBERS[code & 7] for code in codes])
    expected = numbers.double() * torch.pow(2.0, torch.arange(255, dtype=torch.float64) - 127).unsqueeze(1)
    # What is beyond the largest float32 is infinite.
    assert torch.equal(packing.scheme.decode(parts)[0], expected.float())


def test_transformers_decodes_a_stack_to_the_same_numbers() -> None:
    tensors = packed()
    weight = decoded(quantization(tensors), tensors, STACK, SHAPE)
    theirs = convert_moe_packed_tensors(tensors[f"{STACK}_blocks"], tensors[f"{STACK}_scales"], dtype=torch.float32)
    assert torch.equal(weight, theirs.transpose(1, 2))


def test_an_expert_multiplies_as_its_weight_does() -> None:
    tensors = packed()
    packing, parts = load(quantization(tensors), tensors, STACK, SHAPE)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    for expert in range(3):
        own = {name: part[expert] for name, part in parts.items()}
        product = packing.scheme.multiply(packing.scheme.prepare(own), x)
        torch.testing.assert_close(product, x @ packing.scheme.decode(parts)[expert].t(), rtol=1e-5, atol=1e-4)


def test_the_largest_byte_of_a_scale_is_not_a_number() -> None:
    tensors = packed()
    tensors[f"{STACK}_scales"][1, 2, 0] = 255
    packing, parts = load(quantization(tensors), tensors, STACK, SHAPE)
    weight = packing.scheme.decode(parts)
    assert weight[1, 2, :32].isnan().all() and not weight[1, 2, 32:].isnan().any()


def test_only_experts_that_nobody_left_alone_are_packed() -> None:
    down = "model.layers.1.mlp.experts.down_proj"
    tensors = {
        **packed(),
        f"{STACK}_bias": torch.zeros(3, 8),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16),
        down: torch.zeros(3, 8, 8, dtype=torch.bfloat16),
    }
    listed = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.2.mlp.experts", "lm_head"]}
    found = quantization(tensors, **listed)
    assert found.format_of(STACK) is not None
    left_alone = (f"{STACK}_bias", down, "model.layers.0.self_attn.q_proj", "lm_head", "model.layers.0.mlp.router")
    for module in (*left_alone, "model.layers.2.mlp.experts.down_proj"):
        assert found.format_of(module) is None, module


def test_a_stack_with_a_tensor_missing_keeps_its_format() -> None:
    tensors = packed()
    del tensors[f"{STACK}_blocks"]
    packing = quantization(tensors).format_of(STACK)
    assert packing is not None
    leaves = packing.leaves(SHAPE)
    assert {name: (leaf.shape, leaf.is_optional) for name, leaf in leaves.items()} == {
        "_blocks": ((3, 8, 3, 16), False),
        "_scales": ((3, 8, 3), False),
    }


def test_columns_have_to_come_in_blocks() -> None:
    packing = quantization(packed()).format_of(STACK)
    assert packing is not None
    with pytest.raises(ValueError, match="MXFP4 needs a multiple of 32 columns, not 80"):
        packing.leaves((3, 8, 80))


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="modules_to_not_convert is 7; expected a list of names of modules"):
        read(HfConfig({"modules_to_not_convert": 7}, WHERE), StoredTensors({}, WHERE))
