"""Columns of a packed weight: cut out, they are what they were; where they would not be, they are not cut."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
from backend_engine.quantization.schemes.flat_blocks import FlatBlocks
from backend_engine.quantization.schemes.float8 import Float8
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.schemes.inputs import FactoredInput, ReorderedInput, RoundedInput
from backend_engine.quantization.weight_scheme import WeightScheme
from tests.support.weight_schemes import GROUPS, random_components, schemes

ROWS, UNIT = 5, 48
assert all(UNIT % size == 0 for size in GROUPS)


def rounds_whole_tokens(scheme: WeightScheme) -> bool:
    """Whether somewhere in ``scheme`` a token is rounded with a scale of all its columns."""
    while not isinstance(scheme, RoundedInput):
        if not isinstance(scheme, ReorderedInput | FactoredInput):
            return False
        scheme = scheme.weight
    return scheme.group_size is None and (not scheme.is_static or scheme.kind == "nvfp4")


def check_piece(scheme: WeightScheme, tensors: dict[str, Any], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Cut it; what is cut has the components, and the values, of such a weight."""
    piece = scheme.columns(tensors, start, stop)
    described = scheme.components(stop - start)
    assert piece.keys() == described.keys()
    for name, component in described.items():
        assert piece[name].shape == ((ROWS, *component.shape) if component.per_row else component.shape), name
        assert piece[name].dtype == component.dtype, name
    assert scheme.num_columns(piece) == stop - start
    expected = scheme.decode({name: tensor.clone() for name, tensor in tensors.items()})[:, start:stop]
    assert torch.equal(scheme.decode(piece).view(torch.int32), expected.contiguous().view(torch.int32))
    return piece


@settings(max_examples=100, deadline=None)
@given(schemes(), st.integers(0, 999), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_pieces_of_whole_groups_decode_and_multiply_as_the_whole(
    scheme: WeightScheme, seed: int, widths: list[int]
) -> None:
    columns = UNIT * sum(widths)
    tensors = random_components(scheme, ROWS, columns, seed, UNIT)
    assert scheme.num_columns(tensors) == columns
    borders = [UNIT * sum(widths[:i]) for i in range(len(widths) + 1)]
    ranges = list(itertools.pairwise(borders))
    if len(widths) > 1 and rounds_whole_tokens(scheme):
        for start, stop in ranges:
            with pytest.raises(ValueError, match=f"a token's scale is that of all {columns} columns, not of columns "):
                scheme.columns(tensors, start, stop)
        return
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(seed))
    total = torch.zeros(3, ROWS, dtype=torch.float64)
    for start, stop in ranges:
        piece = check_piece(scheme, tensors, start, stop)
        total += scheme.multiply(scheme.prepare(piece), x[:, start:stop].contiguous()).double()
    whole = scheme.multiply(scheme.prepare(tensors), x).double()
    size = float(scheme.decode(tensors).abs().max()) * columns
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-5 * size)


@settings(max_examples=100, deadline=None)
@given(schemes(), st.integers(0, 999), st.integers(1, 40), st.integers(0, 39), st.integers(1, 40))
def test_any_columns_are_right_or_refused(
    scheme: WeightScheme, seed: int, half: int, half_start: int, half_len: int
) -> None:
    columns = 2 * half
    start = min(half_start, columns - 1)
    stop = min(start + half_len, columns)
    tensors = random_components(scheme, ROWS, columns, seed)
    try:
        scheme.columns(tensors, start, stop)
    except ValueError as error:
        assert (start, stop) != (0, columns), "the whole can always be had"
        assert "columns" in str(error) and "\n" not in str(error)
    else:
        check_piece(scheme, tensors, start, stop)


MIXED = ReorderedInput(Float8())


@pytest.mark.parametrize(
    ("scheme", "start", "stop", "message"),
    [
        (GroupwiseInt(8, 32), 16, 64, "columns 16 to 64 of 96 begin or end within a group of 32 columns"),
        (GroupwiseInt(8, 32, "offsets"), 0, 48, "columns 0 to 48 of 96 begin or end within a group of 32 columns"),
        (GroupwiseInt(4, None), 0, 47, "columns 0 to 47 of 96 begin or end within a byte of 2 columns"),
        (GroupwiseInt(4, 128), 0, 48, "columns 0 to 48 of 96 begin or end within a group of 128 columns"),
        (Codebook4(E2M1, 16), 8, 96, "columns 8 to 96 of 96 begin or end within a group of 16 columns"),
        (Codebook4(E2M1, 3), 3, 96, "columns 3 to 96 of 96 begin or end within a byte of 2 columns"),
        (Float8(group_size=40), 50, 96, "columns 50 to 96 of 96 begin or end within a group of 40 columns"),
        (FlatBlocks(E2M1, 64), 32, 96, "columns 32 to 96 of 96 would have other groups of their blocks of 64"),
        (MIXED, 0, 48, "the order of columns moves some across the borders of columns 0 to 48"),
        (RoundedInput(Float8(), "int8", False), 0, 48, "a token's scale is that of all 96 columns"),
        (RoundedInput(Float8(), "int8", False, is_symmetric=False), 0, 48, "a token's scale is that of all 96 columns"),
        (RoundedInput(Float8(), "nvfp4", True), 0, 48, "a token's scale is that of all 96 columns"),
        (RoundedInput(Float8(), "mxfp8", False, 32), 48, 96, "begin or end within a group of the input of 32 columns"),
        (FactoredInput(GroupwiseInt(8, 32)), 16, 64, "columns 16 to 64 of 96 begin or end within a group of 32"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_told(scheme: WeightScheme, start: int, stop: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        scheme.columns(random_components(scheme, ROWS, 96, 7), start, stop)
    assert message in str(caught.value)


def test_a_last_group_that_is_shorter_is_cut_out() -> None:
    scheme = GroupwiseInt(8, 40, "codes")
    check_piece(scheme, random_components(scheme, ROWS, 96, 0), 80, 96)
    with pytest.raises(ValueError, match="within a group"):
        scheme.columns(random_components(scheme, ROWS, 96, 0), 80, 90)


def test_rows_scales_and_static_scales_stay_whole() -> None:
    scheme = RoundedInput(Codebook4(E2M1, 16, "e4m3", has_row_scale=True), "nvfp4", is_static=True, group_size=16)
    tensors = random_components(scheme, ROWS, 96, 0)
    piece = check_piece(scheme, tensors, 32, 64)
    for name in ("row_scale", "input_scale"):
        assert torch.equal(piece[name], tensors[name])
    assert math.prod(piece["scales"].shape) == ROWS * 2
