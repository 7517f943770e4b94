"""The maths of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024) in plain torch, float32 on any device.

The recurrence of one head, with a state ``h [head_dim, state_size]``: ``h = exp(dt * a) * h + dt * x (outer) b`` and
``y = h c``. Called by ``layers/mamba2.py``; knows no cache. Shapes: x ``[..., num_heads, head_dim]``, dt
``[..., num_heads]`` (after its softplus), a ``[num_heads]`` (negative), b and c ``[..., num_groups, state_size]``; a
group serves ``num_heads / num_groups`` heads in a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ScanInputs(NamedTuple):
    """What the recurrence takes for each token, see the module."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


def shifted_sum(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Depthwise causal convolution over the first axis: ``y[i] = bias + sum_j weight[j] * x[i + j]``.

    ``x [length, ..., width]``, ``weight [kernel, width]`` -> ``[length - kernel + 1, ..., width]``.
    """
    length = x.shape[0] - weight.shape[0] + 1
    y = x[:length] * weight[0]
    for j in range(1, weight.shape[0]):
        y.addcmul_(x[j : j + length], weight[j])
    return y if bias is None else y.add_(bias)


def advance(inputs: ScanInputs, state: Tensor) -> Tensor:
    """One token for each of ``n`` requests: ``state [n, num_heads, head_dim, state_size]`` moves on in place.

    ``inputs`` with a leading ``[n]``. Returns y ``[n, num_heads, head_dim]``.
    """
    x, dt, a, b, c = inputs
    state.mul_((dt * a).exp_()[..., None, None])
    by_group = state.view(*b.shape[:2], -1, b.shape[-1])  # [n, num_groups, heads of a group * head_dim, state_size]
    x_dt = (x * dt[..., None]).view(by_group.shape[:-1])
    by_group.addcmul_(x_dt[..., None], b[:, :, None])
    # The vector on the left: torch's product of many rows and one column is several times slower on a CPU.
    y = torch.matmul(c[:, :, None], by_group.transpose(-1, -2))
    return y.view(x.shape)


def chunk_scan(inputs: ScanInputs, initial: Tensor, chunk_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks of tokens: within a chunk as matrix products, from chunk to chunk one after another.

    ``inputs`` with leading ``[num_chunks, chunk_len]``; a token with dt = 0 changes no state. ``initial [num_rows,
    num_heads, head_dim, state_size]``: states that the rows start from. ``chunk_sizes``: number of rows that have a
    first, a second, ... chunk; chunks come in this order, rows with more chunks first. Returns y ``[num_chunks,
    chunk_len, num_heads, head_dim]`` and the states after each chunk ``[num_chunks, num_heads, head_dim, state_size]``.
    """
    x, dt, a, b, c = inputs
    (num_chunks, chunk_len, num_heads, head_dim), num_groups = x.shape, b.shape[-2]
    group_rows = num_heads // num_groups * head_dim
    # Logarithms of the decay since the chunk's beginning. In float64, since what counts is the difference of two of
    # them, which may be small where they are large.
    decay_log = (dt * a).to(torch.float64).cumsum(1)
    x_dt = x * dt[..., None]
    b, c = b.transpose(1, 2), c.transpose(1, 2)  # [num_chunks, num_groups, chunk_len, state_size]

    # What each chunk adds to the state, and from chunk to chunk what is left of the states before.
    to_end = (decay_log[:, -1:] - decay_log).to(x.dtype).exp_()
    added = (x_dt * to_end[..., None]).view(num_chunks, chunk_len, num_groups, group_rows)
    ends = torch.matmul(added.permute(0, 2, 3, 1), b).view(num_chunks, num_heads, head_dim, -1)
    chunk_decay = decay_log[:, -1].to(x.dtype).exp_()[..., None, None]
    begins = torch.empty_like(ends)
    state, first = initial, 0
    for num_rows in chunk_sizes:
        chunks = slice(first, first + num_rows)
        begins[chunks] = state[:num_rows]
        state = ends[chunks].addcmul_(begins[chunks], chunk_decay[chunks])
        first += num_rows

    # A token takes what is left of the state at the chunk's beginning, and of what tokens before it in the chunk add.
    from_begin = torch.matmul(c, begins.view(num_chunks, num_groups, group_rows, -1).transpose(-1, -2))
    y = from_begin.transpose(1, 2).reshape(x.shape).mul_(decay_log.to(x.dtype).exp_()[..., None])
    weights = _decay_between(decay_log.transpose(1, 2))
    by_group = weights.view(num_chunks, num_groups, -1, chunk_len, chunk_len)
    by_group.mul_(torch.matmul(c, b.transpose(-1, -2)).unsqueeze(2))
    return y.add_(torch.matmul(weights, x_dt.transpose(1, 2)).transpose(1, 2)), ends


def _decay_between(decay_log: Tensor) -> Tensor:
    """``[..., len] -> [..., len, len]``: float32 decay from token j to token i, 0 where j comes after i."""
    length = decay_log.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=decay_log.device).triu_(1)
    between = (decay_log[..., :, None] - decay_log[..., None, :]).to(torch.float32)
    return between.masked_fill_(later, float("-inf")).exp_()
