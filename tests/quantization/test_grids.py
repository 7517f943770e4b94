"""What weights are rounded to and how it is stored: against the library of the format, and against our reader of it."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.quantization.grids.float8_grid import Float8Grid
from backend_engine.quantization.grids.int_grid import IntGrid
from backend_engine.quantization.grids.nvfp4_grid import Nvfp4Grid
from backend_engine.quantization.grids.weight_grid import WeightGrid
from backend_engine.quantization.schemes.rounding import round_tokens
from tests.support.compressed_layers import read_config
from tests.support.weight_grids import (
    bits_of,
    by_library,
    by_reader,
    config_of,
    drawn,
    each_grid,
    rounded_with,
    scheme_of,
)

# From numbers without all bits of a mantissa to the largest.
SPECIAL = (0.0, 1e-45, -3e-42, 1.2e-38, 1e-30, -6e-8, 1.0, -7.5, 448.0, 7e4, 1e20, 3.4e38, -3.4e38)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Of up to 3 groups of 32 columns, in which some numbers are far from the others; some groups are all zeros."""
    rows, columns = draw(st.integers(1, 9)), 32 * draw(st.integers(1, 3))
    weight = drawn(rows, columns, draw(st.integers(0, 2**16))) * 2.0 ** draw(
        st.sampled_from((-130, -116, -100, -15, 0, 12))
    )
    for start in draw(st.lists(st.integers(0, columns // 8 - 1), max_size=3)):
        weight[draw(st.integers(0, rows - 1)), start * 8 : start * 8 + 8] = 0
    if draw(st.booleans()):
        weight[draw(st.integers(0, rows - 1))].abs_()
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        weight[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = value
    return weight


@each_grid
@settings(max_examples=25, deadline=None)
@given(weight=weights())
def test_what_is_stored_is_what_was_rounded(grid: WeightGrid, weight: Tensor) -> None:
    scales = grid.fit(weight)
    assert bool((scales.scale > 0).all()) and bool(torch.isfinite(scales.scale).all())
    rounded = rounded_with(grid, weight, scales)
    assert bool(torch.isfinite(rounded).all())
    assert bits_of(rounded_with(grid, rounded, scales)) == bits_of(rounded)
    leaves = grid.leaves(rounded, scales)
    assert all(tensor.is_contiguous() for tensor in leaves.values())
    assert bits_of(by_reader(grid, leaves, (weight.shape[0], weight.shape[1]))) == bits_of(rounded)
    # The library multiplies in the dtype of the scales, and NVFP4 in bfloat16.
    decoded = by_library(grid, leaves)
    assert torch.equal(decoded, rounded.to(decoded.dtype))


@each_grid
def test_the_library_writes_the_same_tensors(grid: WeightGrid) -> None:
    weight = drawn(13, 96)
    weight[3, 5] = 2
    scales = grid.fit(weight)
    rounded = rounded_with(grid, weight, scales)
    leaves = grid.leaves(rounded, scales)
    state = {"weight": rounded, "weight_scale": leaves[".weight_scale"].float()}
    if scales.zero is not None:
        state["weight_zero_point"] = (scales.zero - 2 ** (grid.bits - 1)).to(torch.int8)
    if ".weight_global_scale" in leaves:
        state["weight_global_scale"] = leaves[".weight_global_scale"]
    compressor: Any = BaseCompressor.get_value_from_registry(grid.packing)
    written = compressor.compress(state, scheme_of(grid))
    assert {f".{name}" for name in written} == set(leaves)
    for name, tensor in written.items():
        stored = leaves[f".{name}"]
        if name == "weight_scale":
            tensor = tensor.to(stored.dtype)
        assert stored.dtype == tensor.dtype and stored.shape == tensor.shape, name
        if stored.dtype == torch.float8_e4m3fn:
            stored, tensor = stored.view(torch.uint8), tensor.view(torch.uint8)
        assert torch.equal(stored, tensor), name


@each_grid
def test_its_config_is_one_of_the_format(grid: WeightGrid) -> None:
    (group,) = QuantizationConfig.model_validate(config_of(grid)).config_groups.values()
    assert isinstance(group, QuantizationScheme) and group.weights is not None
    assert (group.weights.num_bits, group.weights.group_size) == (grid.bits, grid.group_size)
    assert group.weights.symmetric == getattr(grid, "is_symmetric", True)
    assert group.weights.dynamic is False


@each_grid
def test_zeros_stay_zeros(grid: WeightGrid) -> None:
    weight = torch.zeros(3, 64)
    scales = grid.fit(weight)
    assert bits_of(rounded_with(grid, weight, scales)) == [0] * weight.numel()
    # Neither too small for a device without denormal numbers nor an invitation to store what is added later.
    assert bool(((scales.scale >= 2**-9) & (scales.scale <= 1)).all())
    # A group of them leaves the others alone.
    weight[1:] = drawn(2, 64)
    mixed = grid.fit(weight)
    assert torch.equal(mixed.scale[1:], grid.fit(weight[1:]).scale)


@each_grid
@pytest.mark.parametrize("size", [2.0**-140, 2.0**-118, 2.0**-114, 3.4e38])
def test_the_ends_of_float32(grid: WeightGrid, size: float) -> None:
    weight = torch.rand(100, 32, generator=torch.Generator().manual_seed(1)).mul_(2).sub_(1) * size
    scales = grid.fit(weight)
    rounded = rounded_with(grid, weight, scales)
    assert bool(torch.isfinite(rounded).all())
    assert torch.equal(rounded_with(grid, rounded, scales), rounded)
    assert torch.equal(by_reader(grid, grid.leaves(rounded, scales), (100, 32)), rounded)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 6e4, 1e7, 1e38])
def test_float16_scales_neither_vanish_nor_overflow(is_symmetric: bool, size: float) -> None:
    grid = IntGrid(4, 16, is_symmetric, scale_dtype=torch.float16)
    weight = drawn(4, 32).sign() * size
    scales = grid.fit(weight)
    leaves = grid.leaves(rounded_with(grid, weight, scales), scales)
    stored = leaves[".weight_scale"]
    assert stored.dtype == torch.float16 and torch.equal(stored.float(), scales.scale)
    assert bool((stored > 0).all()) and bool(torch.isfinite(by_library(grid, leaves)).all())
    if 1e-6 <= size <= 6e4:
        torch.testing.assert_close(rounded_with(grid, weight, scales), weight, rtol=0.2, atol=0)


@pytest.mark.parametrize(
    ("grid", "columns", "problem"),
    [
        (IntGrid(4, 32), 80, "groups of 32 columns do not divide its 80"),
        (IntGrid(8, 3), 7, "groups of 3 columns do not divide its 7"),
        (IntGrid(4, 3), 9, "4 bits need an even number of columns, not 9"),
        (IntGrid(4, None, is_packed=False), 7, "4 bits need an even number of columns, not 7"),
        (Nvfp4Grid(), 40, "NVFP4 needs a multiple of 16 columns, not 40"),
        (IntGrid(8, None), 7, None),
        (IntGrid(8, 3), 9, None),
        (IntGrid(4, 6), 18, None),
        (Float8Grid(), 7, None),
        (Nvfp4Grid(), 48, None),
    ],
)
def test_rows_that_a_grid_cannot_have(grid: WeightGrid, columns: int, problem: str | None) -> None:
    assert grid.problem_with(columns) == problem
    if problem is None:
        weight = drawn(5, columns)
        scales = grid.fit(weight)
        rounded = rounded_with(grid, weight, scales)
        leaves = grid.leaves(rounded, scales)
        assert torch.equal(by_reader(grid, leaves, (5, columns)), rounded)
        assert torch.equal(by_library(grid, leaves).float(), rounded)
        return
    # The reader of such a checkpoint says the same.
    whole = grid.leaves(torch.zeros(2, 96), grid.fit(torch.zeros(2, 96)))
    packing = read_config(config_of(grid), {f"proj{ending}": t for ending, t in whole.items()}).format_of("proj")
    assert packing is not None
    with pytest.raises(ValueError, match=problem):
        packing.leaves((2, columns))


@each_grid
def test_what_was_not_rounded_cannot_be_stored(grid: WeightGrid) -> None:
    weight = drawn(5, 64)
    scales = grid.fit(weight)
    with pytest.raises(AssertionError, match="numbers that are not of the grid"):
        grid.leaves(weight, scales)


@each_grid
def test_a_column_is_rounded_as_in_the_whole(grid: WeightGrid) -> None:
    weight = drawn(7, 96)
    scales = grid.fit(weight)
    group = 40 // (grid.group_size or 96)
    zero = None if scales.zero is None else scales.zero[:, group]
    column = grid.round(weight[:, 40] * 3, scales.scale[:, group], zero)
    assert torch.equal(column, rounded_with(grid, weight * 3, scales)[:, 40])


def test_integers_are_rounded_to_the_nearest_of_sixteen() -> None:
    steps = torch.arange(-10, 10.25, 0.25)
    found = IntGrid(4, 8).round(steps * 0.5, torch.tensor(0.5), None)
    assert torch.equal(found, torch.tensor([float(min(7, max(-8, round(x)))) for x in steps.tolist()]) * 0.5)
    found = IntGrid(4, 8, is_symmetric=False).round(steps * 0.5, torch.tensor(0.5), torch.tensor(3.0))
    assert torch.equal(found, torch.tensor([float(min(12, max(-3, round(x + 3) - 3))) for x in steps.tolist()]) * 0.5)


def test_four_bit_floats_are_rounded_as_those_of_inputs() -> None:
    steps = torch.arange(-8, 8.0625, 0.0625)[None]
    scale = torch.tensor([[0.25]])
    found = Nvfp4Grid().round(steps * 0.25, scale, None)
    assert torch.equal(found, round_tokens(steps * 0.25, "mxfp4", scale))
    assert sorted(set((found / 0.25).abs().flatten().tolist())) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_eight_bit_floats_are_rounded_as_those_of_inputs() -> None:
    steps = torch.cat((torch.arange(-500, 500.5, 0.5), torch.arange(-1, 1, 1 / 1024)))[None]
    scale = torch.tensor([[0.25]])
    assert torch.equal(Float8Grid().round(steps * 0.25, scale, None), round_tokens(steps * 0.25, "fp8", scale))


@pytest.mark.parametrize("size", [1e-44, 1e-37, 3e-5, 1.0, 6.0, 1536.0, 5e20, 3.4e38])
def test_the_number_of_nvfp4_is_a_power_of_two(size: float) -> None:
    grid = Nvfp4Grid()
    weight = drawn(4, 64) / 0.3 * size
    weight[0, 0] = size
    weight.clamp_(-size, size)
    scales = grid.fit(weight)
    leaves = grid.leaves(rounded_with(grid, weight, scales), scales)
    number = leaves[".weight_global_scale"]
    assert number.shape == (1,) and number.dtype == torch.float32 and scales.tensor_scale is not None
    assert float(torch.frexp(number).mantissa) == 0.5 and float(number * scales.tensor_scale) == 1
    assert torch.equal(leaves[".weight_scale"].float() * scales.tensor_scale, scales.scale)
    if 1e-30 < size < 1e37:
        # Within a factor of four of the library's, which leaves no room above.
        of_library = float(generate_gparam(weight.amin(), weight.amax()))
        assert of_library / 4 < float(number) <= of_library
        assert 64 <= float(leaves[".weight_scale"].float().amax()) <= 448


def test_grids_are_data() -> None:
    assert IntGrid(4, 32) == IntGrid(4, 32) != IntGrid(4, 32, is_symmetric=False)
    assert len({Float8Grid(), Float8Grid(), Nvfp4Grid(), IntGrid(8), IntGrid(8, scale_dtype=torch.float16)}) == 4
    assert [(grid.group_size, grid.bits) for grid in (IntGrid(4, 32), IntGrid(8), Float8Grid(), Nvfp4Grid())] == [
        (32, 4), (None, 8), (None, 8), (16, 4),
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        IntGrid(3, 32)
