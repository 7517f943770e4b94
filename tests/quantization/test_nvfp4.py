"""NVFP4 weights, written here by the published layout: numbers of four bits, scales of eight, one scale for all."""

import pytest
import torch
from torch import Tensor

from backend_engine.quantization.formats.nvfp4 import Nvfp4
from backend_engine.quantization.schemes.codebook4 import E2M1

SHAPE = (6, 64)


def e2m1(code: int) -> float:
    """The number that a code stands for: a bit for the sign, two for the exponent, one for the mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if code & 8 else size


def write(shape: tuple[int, ...], group_size: int, tensor_scale: float, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Packed codes, scales and the scale of the tensor, and the weight in float64."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=rng)
    scales = (torch.rand(*shape[:-1], shape[-1] // group_size, generator=rng) * 400).to(torch.float8_e4m3fn)
    packed = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.int64)
    for column in range(shape[-1]):
        packed[..., column // 2] += codes[..., column] << (4 * (column % 2))
    values = torch.tensor([e2m1(code) for code in codes.flatten().tolist()], dtype=torch.float64).view(shape)
    columns = torch.arange(shape[-1]) // group_size
    weight = values * scales.double()[..., columns] * tensor_scale
    return [packed.to(torch.uint8), scales], weight


def test_the_table_is_that_of_the_format() -> None:
    assert [str(value) for value in E2M1] == [str(e2m1(code)) for code in range(16)]


@pytest.mark.parametrize("scale_shape", [(), (1,)])
@pytest.mark.parametrize(("is_divisor", "stored"), [(False, 0.0078125), (True, 128.0)])
@pytest.mark.parametrize("group_size", [16, 32])
def test_a_weight_is_code_times_both_scales(
    scale_shape: tuple[int, ...], is_divisor: bool, stored: float, group_size: int
) -> None:
    (codes, scales), expected = write(SHAPE, group_size, 0.0078125)
    packing = Nvfp4(".c", ".s", ".g", is_divisor, scale_shape, group_size=group_size)
    leaves = {".c": codes, ".s": scales, ".g": torch.full(scale_shape, stored)}
    described = packing.leaves(SHAPE)
    assert {name: leaf.shape for name, leaf in described.items()} == {n: tuple(t.shape) for n, t in leaves.items()}
    parts = packing.unpack(leaves, SHAPE)
    for name, component in packing.scheme.components(SHAPE[-1]).items():
        assert (parts[name].shape, parts[name].dtype) == ((SHAPE[0], *component.shape), component.dtype), name
    weight = packing.scheme.decode(parts)
    # A power of two as the tensor's scale: nothing is rounded.
    assert torch.equal(weight.double(), expected)
    x = torch.randn(3, SHAPE[1], generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(packing.scheme.multiply(packing.scheme.prepare(parts), x), x @ expected.float().t())


def test_any_scale_of_the_tensor_is_rounded_once() -> None:
    (codes, scales), expected = write(SHAPE, 16, 0.0)
    scale = torch.tensor(0.00123456)
    _, expected = write(SHAPE, 16, float(scale))
    parts = Nvfp4().unpack({".weight": codes, ".weight_scale": scales, ".weight_scale_2": scale}, SHAPE)
    assert torch.equal(Nvfp4().scheme.decode(parts), expected.float())


def test_a_stack_of_weights_shares_the_scale_of_the_tensor() -> None:
    shape = (2, *SHAPE)
    (codes, scales), expected = write(shape, 16, 0.5)
    parts = Nvfp4().unpack({".weight": codes, ".weight_scale": scales, ".weight_scale_2": torch.tensor(0.5)}, shape)
    assert parts["row_scale"].shape == (2, 6, 1)
    assert torch.equal(Nvfp4().scheme.decode(parts).double(), expected)


def test_tensors_that_are_not_needed_may_be_there() -> None:
    leaves = Nvfp4(unused=((".input_scale", ()),)).leaves(SHAPE)
    assert leaves[".input_scale"].is_optional and leaves[".input_scale"].shape == ()
    assert [leaf.is_optional for leaf in leaves.values()] == [False, False, False, True]


def test_columns_have_to_come_in_groups() -> None:
    with pytest.raises(ValueError, match="NVFP4 needs a multiple of 16 columns, not 40"):
        Nvfp4().leaves((6, 40))


@pytest.mark.parametrize(("is_divisor", "scale"), [(True, 0.0), (False, float("nan")), (True, float("inf"))])
def test_a_scale_that_makes_no_sense_is_refused(is_divisor: bool, scale: float) -> None:
    (codes, scales), _ = write(SHAPE, 16, 1.0)
    leaves = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": torch.tensor(scale)}
    with pytest.raises(ValueError, match=r"\.weight_scale_2 is (0\.0|nan|inf)"):
        Nvfp4(is_divisor=is_divisor).unpack(leaves, SHAPE)
