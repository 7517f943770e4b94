"""Groups of columns that share a scale: the arithmetic that grouped schemes have in common.

A row of ``n`` columns has ``num_groups(n, size)`` groups of ``size`` columns, of which the last may be shorter.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def num_groups(num_columns: int, group_size: int | None) -> int:
    """Groups of a row; ``None`` = the whole row is one."""
    return 1 if group_size is None else -(-num_columns // group_size)


def per_column(groups: Tensor, group_size: int | None, num_columns: int) -> Tensor:
    """``[..., num_groups] -> [..., num_columns]`` or something that broadcasts to it."""
    if group_size is None or groups.shape[-1] == 1:
        return groups
    return groups.repeat_interleave(group_size, -1)[..., :num_columns]


def scale_groups(values: Tensor, scales: Tensor, group_size: int | None) -> Tensor:
    """``values [..., num_columns]`` times the scale of their group, in place where shapes allow."""
    if group_size is None or values.shape[-1] % group_size:
        return values.mul_(per_column(scales, group_size, values.shape[-1]))
    grouped = values.view(*values.shape[:-1], -1, group_size)
    grouped.mul_(scales.unsqueeze(-1))
    return values


def unpack_nibbles(codes: Tensor) -> Tensor:
    """uint8 ``[..., n]``, two values a byte, the first in the lower half -> uint8 ``[..., 2 * n]``."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 ``[..., 2 * n]`` below 16 -> uint8 ``[..., n]``; the other way round."""
    return values[..., ::2] | (values[..., 1::2] << 4)


def check_borders(start: int, stop: int, num_columns: int, size: int, what: str) -> None:
    """Raise ``ValueError`` where a border of columns ``start`` to ``stop`` of a row lies within a ``what`` of ``size``
    columns. The end of the row is a border of the last one.
    """
    assert 0 <= start < stop <= num_columns, f"columns {start} to {stop} of {num_columns}"
    if start % size or (stop % size and stop != num_columns):
        raise ValueError(f"columns {start} to {stop} of {num_columns} begin or end within a {what} of {size} columns")


def cut_groups(
    tensors: Mapping[str, Tensor], start: int, stop: int, group_size: int | None, names: Sequence[str]
) -> dict[str, Tensor]:
    """Components ``names``, of which there is one for each group, of those groups; borders have been checked."""
    if group_size is None:
        return {name: tensors[name] for name in names}
    groups = slice(start // group_size, -(-stop // group_size))
    return {name: tensors[name][..., groups] for name in names}
