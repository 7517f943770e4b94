"""Any weight scheme, and components for it, for tests that hold for all of them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.quantization.schemes.codebook4 import SCALES, Codebook4
from backend_engine.quantization.schemes.flat_blocks import FlatBlocks
from backend_engine.quantization.schemes.float8 import Float8
from backend_engine.quantization.schemes.groupwise_int import ZEROS, GroupwiseInt
from backend_engine.quantization.schemes.inputs import FactoredInput, ReorderedInput, RoundedInput
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.schemes.rounding import KINDS
from backend_engine.quantization.weight_scheme import WeightScheme

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
GROUPS = (1, 2, 3, 4, 6, 8, 16)


def leaf_schemes(group_sizes: tuple[int, ...] = GROUPS) -> st.SearchStrategy[WeightScheme]:
    """Schemes that are within no other."""
    groups = st.sampled_from(group_sizes)
    values = st.tuples(*[st.floats(-4, 4, width=32) | st.just(-0.0)] * 16)
    floats = st.sampled_from(FLOATS)
    return st.one_of(
        st.builds(GroupwiseInt, st.sampled_from((4, 8)), st.none() | groups, st.sampled_from(ZEROS), floats),
        st.builds(Codebook4, values, groups, st.sampled_from(sorted(SCALES)), st.booleans()),
        st.builds(Float8, st.sampled_from(FLOAT8S), st.none() | groups),
        st.builds(Plain, floats),
        st.builds(FlatBlocks, values, groups, floats),
    )


@st.composite
def schemes(draw: st.DrawFn, group_sizes: tuple[int, ...] = GROUPS) -> WeightScheme:
    """Schemes with any treatments of the input around them, in any order."""
    scheme = draw(leaf_schemes(group_sizes))
    for wrapper in draw(st.lists(st.sampled_from((ReorderedInput, FactoredInput, RoundedInput)), unique=True)):
        if wrapper is RoundedInput:
            kind = draw(st.sampled_from(sorted(KINDS)))
            is_static = kind == "nvfp4" or draw(st.booleans())
            group_size = draw(st.none() | st.sampled_from(group_sizes))
            is_int = KINDS[kind].grid == "int"
            is_symmetric = group_size is not None or not (is_int or is_static) or draw(st.booleans())
            scheme = RoundedInput(scheme, kind, is_static, group_size, is_symmetric)
        else:
            scheme = wrapper(scheme)
    return scheme


def random_components(
    scheme: WeightScheme, num_rows: int, columns: int, seed: int, order_within: int | None = None
) -> dict[str, Tensor]:
    """Finite ones. order_within: an order keeps each so many columns among themselves; ``None`` = it mixes all."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, component in scheme.components(columns).items():
        shape = (num_rows, *component.shape) if component.per_row else component.shape
        if component.dtype == torch.int64:
            starts = range(0, columns, order_within or columns)
            sizes = [min(order_within or columns, columns - start) for start in starts]
            orders = [start + torch.randperm(n, generator=generator) for start, n in zip(starts, sizes, strict=True)]
            found[name] = torch.cat(orders)
        elif component.dtype == torch.uint8:
            low, high = (120, 130) if name == "scales" else (0, 256)
            found[name] = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        else:
            numbers = torch.rand(shape, generator=generator) + 0.25
            signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
            found[name] = (numbers if name == "input_scale" else numbers * signs).to(component.dtype)
    return found
