"""MXFP4 against the format's definition, value by value, and against transformers."""

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backend_engine.quantization.mxfp4 import dequantize_mxfp4


def e2m1(code: int) -> float:
    """A four-bit float by its definition: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))


def test_every_value_at_every_scale_is_exact() -> None:
    # A block of all sixteen codes, each as the lower and as the upper half of a byte.
    low = torch.arange(16, dtype=torch.uint8)
    blocks = (low | low.flip(0) << 4).expand(1, 255, 16).contiguous()
    found = dequantize_mxfp4(blocks, torch.arange(255, dtype=torch.uint8).unsqueeze(0)).view(255, 32)
    for scale, row in enumerate(found.tolist()):
        values = [half for code in range(16) for half in (e2m1(code), e2m1(15 - code))]
        expected = [math.ldexp(value, scale - 127) for value in values]
        # 6 * 2 ** 127 is beyond float32.
        assert row == torch.tensor(expected, dtype=torch.float64).float().tolist()


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_it_is_what_transformers_reads(num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(256, (5, 6, num_blocks, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (5, 6, num_blocks), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(5):
        found = dequantize_mxfp4(blocks[expert], scales[expert])
        assert found.dtype == torch.float32 and torch.equal(found, expected[expert].T)


def test_the_scale_that_stands_for_no_number_gives_none() -> None:
    scales = torch.tensor([[255, 127]], dtype=torch.uint8)
    found = dequantize_mxfp4(torch.zeros(1, 2, 16, dtype=torch.uint8), scales)
    assert found[0, :32].isnan().all() and torch.equal(found[0, 32:], torch.zeros(32))
