"""``Mamba2``: the state space mixer (Dao and Gu, "Transformers are SSMs", 2024), and its declaration.

Its cache holds for each block the last inputs of the convolution and the state of the recurrence, both in float32;
``StatePlan`` says which blocks a step reads and writes. The maths between is that of ``ops/state_space.py``.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend_engine.core.kv_spec import StateSpec
from backend_engine.layers.linear import Linear
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.layers.smoothing import Smoothing
from backend_engine.layers.state_plan import LongRows, SingleRows
from backend_engine.ops.state_space import ScanInputs, advance, chunk_scan, shifted_sum
from backend_engine.ops.torch_activations import silu, softplus
from backend_engine.quantization.quant_method import TensorOptions


@dataclass(frozen=True)
class Mamba2Decl:
    """A Mamba-2 mixer of ``num_heads`` heads, each with a state of ``head_dim`` x ``state_size``.

    num_groups: groups of heads that share their B and C, and parts that the gated norm (with ``eps``) normalises apart.
    conv_kernel: tokens that the convolution sees. time_step_limit: bounds of the time step after its softplus. bias: of
    the two products; conv_bias: of the convolution.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    eps: float
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Width of what the convolution works on: x, B and C side by side."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def cache_spec(self) -> StateSpec:
        """Window of the convolution, ``[conv_kernel - 1, conv_size]``, and state, heads x head_dim x state_size."""
        return StateSpec(((self.conv_kernel - 1, self.conv_size), (self.num_heads, self.head_dim, self.state_size)))


class Mamba2(nn.Module):
    """One layer's mixer: ``x [num_tokens, hidden_size]`` -> the same shape.

    All between the two products is float32, so that a state does not lose what thousands of tokens have put into it.
    """

    def __init__(self, decl: Mamba2Decl, layer_idx: int, hidden_size: int, parts: ModelParts) -> None:
        super().__init__()
        self._decl = decl
        self._layer_idx = layer_idx
        exact = TensorOptions(torch.float32, parts.options.device)
        sizes = (decl.inner_size, decl.conv_size, decl.num_heads)
        self.in_proj = Linear(hidden_size, sizes, parts.quant, parts.options, decl.bias)
        self.conv1d = _Conv(decl, exact)
        self.dt_bias = _empty((decl.num_heads,), exact)
        self.a_log = _empty((decl.num_heads,), exact)
        self.d = _empty((decl.num_heads,), exact)
        self.norm = _GatedNorm(decl, exact)
        self.out_proj = Linear(decl.inner_size, (hidden_size,), parts.quant, parts.options, decl.bias)

    def readers(self) -> tuple[Linear, ...]:
        """The products that read the layer's input."""
        return (self.in_proj,)

    def smoothable(self) -> list[Smoothing]:
        """See ``Smoothing``; those within the layer."""
        return [Smoothing(self.norm, (self.out_proj,))]

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """Moves the states of the step's rows on, in the blocks that ``step.states`` names."""
        plan, cache = step.states, step.caches[self._layer_idx]
        assert plan is not None and isinstance(cache, tuple), f"layer {self._layer_idx} has no states"
        window, state = cache
        gate, xbc, dt = torch.split(self.in_proj(x), list(self.in_proj.out_sizes), -1)
        xbc = xbc.to(torch.float32)
        dt = softplus(dt.to(torch.float32) + self.dt_bias).clamp(*self._decl.time_step_limit)
        y = torch.empty(x.shape[0], self._decl.inner_size, dtype=torch.float32, device=x.device)
        if plan.single is not None:
            y.index_copy_(0, plan.single.tokens, self._advance(plan.single, xbc, dt, window, state))
        if plan.long is not None:
            y.index_copy_(0, plan.long.tokens, self._scan(plan.long, xbc, dt, window, state))
        out: Tensor = self.out_proj(self.norm(y, gate).to(x.dtype))
        return out

    def _advance(self, rows: SingleRows, xbc: Tensor, dt: Tensor, window: Tensor, state: Tensor) -> Tensor:
        """The rows of one token. Returns ``[n, inner_size]``."""
        seen = torch.cat((_read(window, rows.reads, rows.fresh), xbc[rows.tokens, None]), 1)
        window.index_copy_(0, rows.writes, seen[:, 1:])
        inputs = self._inputs(self.conv1d(seen.transpose(0, 1))[0], dt[rows.tokens])
        states = _read(state, rows.reads, rows.fresh)
        y = advance(inputs, states)
        state.index_copy_(0, rows.writes, states)
        return self._skip(y, inputs.x).flatten(1)

    def _scan(self, rows: LongRows, xbc: Tensor, dt: Tensor, window: Tensor, state: Tensor) -> Tensor:
        """The rows of several tokens. Returns ``[T, inner_size]``."""
        before = self._decl.conv_kernel - 1
        num_places, num_rows = rows.tokens.shape[0], rows.firsts.shape[0]
        # Each row's window and then its inputs, row after row.
        past = torch.arange(before, device=xbc.device)
        window_places = (rows.firsts + torch.arange(num_rows, device=xbc.device) * before)[:, None] + past
        places = torch.arange(num_places, device=xbc.device) + rows.rows * before
        seen = xbc.new_empty(num_places + num_rows * before, self._decl.conv_size)
        seen[window_places] = _read(window, rows.reads, rows.fresh)
        seen[places + before] = xbc[rows.tokens]
        window.index_copy_(0, rows.save_blocks, seen[(places[rows.save_places] + 1)[:, None] + past])

        mixed = self.conv1d(seen)[places[rows.chunk_places]]
        chunk_dt = dt[rows.tokens[rows.chunk_places]].masked_fill_(rows.is_padding[..., None], 0.0)
        inputs = self._inputs(mixed, chunk_dt)
        y, ends = chunk_scan(inputs, _read(state, rows.reads, rows.fresh), rows.chunk_sizes)
        state.index_copy_(0, rows.save_blocks, ends[rows.saves])
        return self._skip(y, inputs.x).reshape(-1, self._decl.inner_size)[rows.token_slots]

    def _inputs(self, mixed: Tensor, dt: Tensor) -> ScanInputs:
        """x, B and C out of the convolution's output ``[..., conv_size]``."""
        decl = self._decl
        x, b, c = torch.split(mixed, [decl.inner_size, *[decl.num_groups * decl.state_size] * 2], -1)
        return ScanInputs(
            x.view(*x.shape[:-1], decl.num_heads, decl.head_dim),
            dt,
            -self.a_log.exp(),
            b.view(*b.shape[:-1], decl.num_groups, decl.state_size),
            c.view(*c.shape[:-1], decl.num_groups, decl.state_size),
        )

    def _skip(self, y: Tensor, x: Tensor) -> Tensor:
        """``y + D x``."""
        return y.addcmul(x, self.d[:, None])


class _Conv(nn.Module):
    """Depthwise causal convolution and SiLU; the weight as checkpoints have it, ``[conv_size, 1, conv_kernel]``."""

    def __init__(self, decl: Mamba2Decl, options: TensorOptions) -> None:
        super().__init__()
        self.weight = _empty((decl.conv_size, 1, decl.conv_kernel), options)
        self.bias = _empty((decl.conv_size,), options) if decl.conv_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[length, ..., conv_size] -> [length - conv_kernel + 1, ..., conv_size]``."""
        return silu(shifted_sum(x, self.weight[:, 0].t().contiguous(), self.bias))


class _GatedNorm(nn.Module):
    """``norm(y * silu(gate)) * weight``, root mean square over each of ``num_groups`` equal parts."""

    def __init__(self, decl: Mamba2Decl, options: TensorOptions) -> None:
        super().__init__()
        self.weight = _empty((decl.inner_size,), options)
        self._num_groups = decl.num_groups
        self._eps = decl.eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        grouped = (y * silu(gate.to(torch.float32))).view(y.shape[0], self._num_groups, -1)
        return F.rms_norm(grouped, grouped.shape[-1:], eps=self._eps).flatten(-2) * self.weight


def _empty(shape: tuple[int, ...], options: TensorOptions) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=options.dtype, device=options.device), requires_grad=False)


def _read(cache: Tensor, blocks: Tensor, fresh: Tensor) -> Tensor:
    """Copy of the blocks' contents ``[len(blocks), ...]``, zeros for those of ``fresh``."""
    return cache.index_select(0, blocks).index_fill_(0, fresh, 0)
