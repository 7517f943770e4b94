"""The scales that weights are rounded with: the search for them, and what it does not depend on."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.quantization.grids.float8_grid import Float8Grid
from backend_engine.quantization.grids.int_grid import IntGrid
from backend_engine.quantization.grids.scale_search import Candidate, search_scales
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid
from tests.support.weight_grids import (
    GRIDS,
    drawn,
    each_grid,
    rounded_with,
)


def errors(grid: WeightGrid, weight: Tensor, scales: Scales, importance: Tensor | None = None) -> Tensor:
    """Of each group, float64, in the norm of the search."""
    found = (rounded_with(grid, weight, scales).double() - weight.double()).abs().pow(2.5)
    if importance is not None:
        found *= importance
    return found.view(weight.shape[0], -1, grid.group_size or weight.shape[1]).sum(-1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 32])
def test_the_whole_range_is_that_of_the_library(bits: int, is_symmetric: bool, group_size: int | None) -> None:
    grid = IntGrid(bits, group_size, is_symmetric, clip_search=False)
    weight = drawn(40, 128)
    weight[5].abs_()
    weight[6].abs_().neg_()
    grouped = weight.view(40, -1, group_size or 128)
    args = QuantizationArgs(**grid.weights_config())
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    found = grid.fit(weight)
    assert torch.equal(found.scale, scale)
    assert (found.zero is None) == is_symmetric
    if found.zero is not None:
        assert torch.equal(found.zero, zero.float() + 2 ** (bits - 1))


def whole_range(grid: WeightGrid, weight: Tensor) -> Scales:
    """Scales without a search."""
    if isinstance(grid, IntGrid):
        return dataclasses.replace(grid, clip_search=False).fit(weight)
    largest = weight.abs().view(weight.shape[0], -1, grid.group_size or weight.shape[1]).amax(-1)
    if isinstance(grid, Float8Grid):
        return Scales(largest / 448)
    number = grid.fit(weight).tensor_scale
    assert number is not None
    scale, _ = calculate_qparams(-largest, largest, QuantizationArgs(**grid.weights_config()), 1 / number)
    return Scales(scale.float() * number, tensor_scale=number)


@each_grid
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), exponent=st.integers(-8, 6), has_importance=st.booleans())
def test_a_search_never_does_worse(grid: WeightGrid, seed: int, exponent: int, has_importance: bool) -> None:
    weight = drawn(6, 96, seed) * 2.0**exponent
    weight[2, 7] *= 40
    weight[4].pow_(3)
    importance = torch.rand(96, generator=torch.Generator().manual_seed(seed)) + 0.01 if has_importance else None
    found = errors(grid, weight, grid.fit(weight, importance), importance)
    assert bool((found <= errors(grid, weight, whole_range(grid, weight), importance) * (1 + 1e-3)).all())


@pytest.mark.parametrize(
    ("name", "part"), [("int4_groups", 0.95), ("int4_groups_asymmetric", 0.95), ("fp8", 0.95), ("nvfp4", 0.8)]
)
def test_a_search_finds_something(name: str, part: float) -> None:
    grid, weight = GRIDS[name], drawn(64, 256)
    found = errors(grid, weight, grid.fit(weight)).sum()
    assert found < errors(grid, weight, whole_range(grid, weight)).sum() * part


@pytest.mark.parametrize("factor", [0.975, 0.85, 0.75, 0.6, 0.525])
def test_no_range_that_is_tried_is_better(factor: float) -> None:
    grid, weight = IntGrid(4, 32), drawn(16, 64)
    whole = whole_range(grid, weight)
    other = Scales(whole.scale * factor)
    assert bool((errors(grid, weight, grid.fit(weight)) <= errors(grid, weight, other) * (1 + 1e-3)).all())


@pytest.mark.parametrize("name", ["int4_groups", "int4_groups_asymmetric", "nvfp4"])
def test_important_columns_count_more(name: str) -> None:
    grid, weight = GRIDS[name], drawn(20, 96)
    importance = torch.full((96,), 0.001)
    importance[::8] = 1
    plain, weighted = grid.fit(weight), grid.fit(weight, importance)
    of_columns = [
        float((rounded_with(grid, weight, scales) - weight)[:, ::8].abs().pow(2.5).sum())
        for scales in (plain, weighted)
    ]
    assert of_columns[1] < of_columns[0] * 0.7
    # Only ratios count, and columns that do not count at all leave the range whole.
    assert torch.equal(grid.fit(weight, importance * 2.0**70).scale, weighted.scale)
    assert torch.equal(grid.fit(weight, torch.zeros(96)).scale, whole_range(grid, weight).scale)
    assert torch.equal(grid.fit(weight, torch.full((96,), 3.0)).scale, plain.scale)


@each_grid
@pytest.mark.parametrize(("rows", "columns"), [(7, 96), (250, 480)])
def test_rows_are_independent(grid: WeightGrid, rows: int, columns: int) -> None:
    weight = drawn(rows, columns)
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(9))
    # What NVFP4 has for the whole weight is then the same for each part of it.
    weight[:, 3] = 0.4
    whole = grid.fit(weight, importance)
    for chosen in (slice(0, 1), slice(rows - 1, rows), slice(1, rows, 2)):
        part = grid.fit(weight[chosen], importance)
        assert torch.equal(part.scale, whole.scale[chosen])
        assert (part.zero is None) == (whole.zero is None)
        if part.zero is not None and whole.zero is not None:
            assert torch.equal(part.zero, whole.zero[chosen])
        assert torch.equal(rounded_with(grid, weight[chosen], part), rounded_with(grid, weight, whole)[chosen])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "columns"), [(200, 15), (16, 40000)])
def test_near_ties_are_decided_alike_in_any_part(rows: int, columns: int, two_threads: None) -> None:
    """Two candidates whose errors are the same numbers in the opposite order: the last bit of their sum decides."""

    def propose(grouped: Tensor) -> Iterator[Candidate]:
        ones = torch.ones(*grouped.shape[:-1], 1)
        yield Candidate(ones, ones * 0)
        yield Candidate(ones, ones)

    def nearest(steps: Tensor, zero: Tensor | None) -> Tensor:
        assert zero is not None
        return steps + torch.where(zero == 0, steps, steps.flip(-1))

    weight = drawn(rows, columns)
    whole = search_scales(weight, None, None, propose, nearest).zero
    assert whole is not None and 2 < int(whole.sum()) < rows - 2
    alone = [search_scales(weight[row : row + 1], None, None, propose, nearest).zero for row in range(rows)]
    assert [float(zero) for zero in alone if zero is not None] == whole.flatten().tolist()


@each_grid
def test_a_weight_of_any_size_is_rounded_as_well(grid: WeightGrid) -> None:
    weight = drawn(8, 64)
    weight[2, 3] = 0
    scale = grid.fit(weight).scale
    for exponent in (-20, 20):
        if getattr(grid, "scale_dtype", None) != torch.float16:
            assert torch.equal(grid.fit(weight * 2.0**exponent).scale, scale * 2.0**exponent)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@each_grid
def test_numbers_that_are_not_finite_are_refused(grid: WeightGrid, value: float) -> None:
    weight = drawn(5, 64)
    weight[3, 9] = value
    with pytest.raises(ValueError, match="the weight has numbers that are not finite"):
        grid.fit(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_an_importance_that_makes_no_sense_is_refused(value: float) -> None:
    importance = torch.ones(64)
    importance[5] = value
    with pytest.raises(ValueError, match=r"importance is between .*; expected numbers from 0 on"):
        IntGrid(4, 32).fit(drawn(5, 64), importance)
