"""Grids of every kind, weights for them, and both ways back from what they store: the library's and ours."""

import json
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from backend_engine.quantization.grids.float8_grid import Float8Grid
from backend_engine.quantization.grids.int_grid import IntGrid
from backend_engine.quantization.grids.nvfp4_grid import Nvfp4Grid
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid, per_group
from tests.support.compressed_layers import read_config, unpack

GRIDS: dict[str, WeightGrid] = {
    "int4_groups": IntGrid(4, 32),
    "int4_groups_asymmetric": IntGrid(4, 32, is_symmetric=False),
    "int4_rows_asymmetric": IntGrid(4, None, is_symmetric=False),
    "int4_groups_float16": IntGrid(4, 16, is_symmetric=False, scale_dtype=torch.float16),
    "int8_rows": IntGrid(8, None),
    "int8_rows_bfloat16": IntGrid(8, None, scale_dtype=torch.bfloat16),
    "int8_rows_asymmetric": IntGrid(8, None, is_symmetric=False),
    "int8_groups_float16": IntGrid(8, 8, scale_dtype=torch.float16),
    "int8_unpacked": IntGrid(8, None, is_packed=False),
    "int8_unpacked_asymmetric": IntGrid(8, None, is_symmetric=False, is_packed=False),
    "int4_unpacked_asymmetric": IntGrid(4, 8, is_symmetric=False, is_packed=False),
    "fp8": Float8Grid(),
    "nvfp4": Nvfp4Grid(),
}
each_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.01


def spread(scales: Scales, grid: WeightGrid, columns: int) -> tuple[Tensor, Tensor | None]:
    zero = None if scales.zero is None else per_group(scales.zero, grid.group_size, columns)
    return per_group(scales.scale, grid.group_size, columns), zero


def rounded_with(grid: WeightGrid, weight: Tensor, scales: Scales) -> Tensor:
    return grid.round(weight, *spread(scales, grid, weight.shape[1]))


def scheme_of(grid: WeightGrid) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**grid.weights_config()))


def config_of(grid: WeightGrid) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": grid.weights_config()}
    config = {"quant_method": "compressed-tensors", "format": grid.packing, "config_groups": {"group_0": group}}
    written: dict[str, Any] = json.loads(json.dumps(config))
    return written


def by_library(grid: WeightGrid, leaves: dict[str, Tensor]) -> Tensor:
    compressor: Any = BaseCompressor.get_value_from_registry(grid.packing)
    weight: Tensor = compressor.decompress({name[1:]: t for name, t in leaves.items()}, scheme_of(grid))["weight"]
    return weight


def by_reader(grid: WeightGrid, leaves: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    tensors = {f"proj{ending}": tensor for ending, tensor in leaves.items()}
    packing = read_config(config_of(grid), tensors).format_of("proj")
    assert packing is not None
    return packing.scheme.decode(unpack(packing, "proj", tensors, shape))


def bits_of(values: Tensor) -> list[int]:
    """Tells -0 from 0."""
    return values.contiguous().view(torch.int32).flatten().tolist()
