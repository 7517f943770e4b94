"""``Packed``: linear layers and tables whose weights stay in the checkpoint's form.

A layer holds one or several ``PackedPart``s, each some of its rows in one scheme: one for all rows where the fused
parts share a scheme, one for each of them where they do not. Created and filled while a checkpoint is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend_engine.ops.packed_products import add_bias
from backend_engine.quantization.quant_method import QuantMethod, WeightedLayer
from backend_engine.quantization.weight_scheme import WeightScheme


@dataclass
class PackedPart:
    """Rows ``start`` to ``start + num_rows`` of a weight. ``tensors``: components; once prepared, what multiplies."""

    scheme: WeightScheme
    start: int
    num_rows: int
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Packed(QuantMethod):
    """``schemes``: of the fused parts, whose widths are ``part_sizes``."""

    def __init__(self, schemes: Sequence[WeightScheme], part_sizes: Sequence[int]) -> None:
        assert len(schemes) == len(part_sizes), (schemes, part_sizes)
        self._schemes = tuple(schemes)
        self._part_sizes = tuple(part_sizes)

    def create_weights(self, layer: WeightedLayer) -> None:
        out_features, in_features = layer.weight_shape
        assert sum(self._part_sizes) == out_features, (self._part_sizes, out_features)
        layer.weight = layer.packed_weight = layer.dense_weight = None
        device = layer.options.device
        layer.packed_parts = [self._create(*part, in_features, device) for part in self._parts(in_features)]

    def _parts(self, in_features: int) -> list[tuple[WeightScheme, int, int]]:
        """Scheme, first row and number of rows."""
        first = self._schemes[0]
        has_rows_only = all(component.per_row for component in first.components(in_features).values())
        if has_rows_only and len(set(self._schemes)) == 1:
            return [(first, 0, sum(self._part_sizes))]
        starts = [sum(self._part_sizes[:i]) for i in range(len(self._part_sizes))]
        return list(zip(self._schemes, starts, self._part_sizes, strict=True))

    def _create(
        self, scheme: WeightScheme, start: int, num_rows: int, in_features: int, device: torch.device
    ) -> PackedPart:
        part = PackedPart(scheme, start, num_rows)
        for name, component in scheme.components(in_features).items():
            shape = (num_rows, *component.shape) if component.per_row else component.shape
            part.tensors[name] = torch.empty(shape, dtype=component.dtype, device=device)
        return part

    def after_loading(self, layer: WeightedLayer) -> None:
        for part in layer.packed_parts:
            part.tensors = part.scheme.prepare(part.tensors)

    def apply(self, layer: WeightedLayer, x: Tensor) -> Tensor:
        parts = layer.packed_parts
        if len(parts) == 1:
            out = parts[0].scheme.multiply(parts[0].tensors, x)
        else:
            out = torch.cat([part.scheme.multiply(part.tensors, x) for part in parts], -1)
        return out if layer.bias is None else add_bias(out, layer.bias)

    def dequantize(self, layer: WeightedLayer) -> Tensor:
        return torch.cat([part.scheme.decode(part.tensors) for part in layer.packed_parts])


def packed_rows(layer: WeightedLayer, rows: Tensor) -> Tensor:
    """Rows ``rows [n]`` (int64) of a layer's packed weight, float32 ``[n, in_features]``; it must be one part."""
    (part,) = layer.packed_parts
    components = part.scheme.components(layer.weight_shape[1])
    chosen = {name: t.index_select(0, rows) if components[name].per_row else t for name, t in part.tensors.items()}
    return part.scheme.decode(chosen)
