"""``TorchOps``: the reference for every operation the layers use, in plain torch, on any device and dtype.

Injected into layers and attention backends; a faster class may override single methods. Holds no state and
never looks at requests or caches beyond the tensors it is given.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.ops.torch_activations import gelu, sigmoid, silu


class TorchOps:
    """Operations on flat batches: the leading dimension is always ``num_tokens``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019)."""
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (Ba et al., 2016)."""
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(residual + x), residual + x)``; neither input is changed."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``[num_tokens, 2 * size]`` holding gate and up side by side -> ``silu(gate) * up``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: Tensor, approximate: str) -> Tensor:
        """``[num_tokens, 2 * size]`` holding gate and up side by side -> ``gelu(gate) * up``; see ``gelu``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate, approximate).mul_(up)

    def relu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``[num_tokens, 2 * size]`` holding gate and up side by side -> ``relu(gate) * up``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.relu(gate).mul_(up)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """``[num_tokens, 2 * size]`` holding gate and up side by side -> ``(up + 1) * gate * sigmoid(alpha * gate)``.

        Before that the gate is cut at ``limit`` and up at ``+-limit``.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1).mul_(gate * sigmoid(gate * alpha))

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """Gaussian error linear unit (Hendrycks and Gimpel, 2016); ``approximate``: ``none`` or ``tanh``."""
        return gelu(x, approximate)

    def relu(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        return F.relu(x)

    def silu(self, x: Tensor) -> Tensor:
        """``x * sigmoid(x)``."""
        return silu(x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``, of one shape."""
        return x + y

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor``."""
        return x * factor

    def rope_tables(self, positions: Tensor, inverse_frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine for ``apply_rope``, both ``[num_tokens, 1, head_dim]`` in float32.

        The first half of the sine is negated, so that a rotation is ``x * cos + roll(x, head_dim / 2) * sin``.
        ``scale`` multiplies both (attention temperature of YaRN).
        """
        angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``x [num_tokens, num_heads, head_dim]``, halves paired (the layout of Hugging Face checkpoints).

        ``cos`` and ``sin`` are those of ``rope_tables`` in the dtype of ``x``; where they are narrower than a head,
        only its first elements are rotated.
        """
        dim = cos.shape[-1]
        if dim < x.shape[-1]:
            return torch.cat((self.apply_rope(x[..., :dim], cos, sin), x[..., dim:]), -1)
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)

    def pair_halves(self, x: Tensor, dim: int) -> Tensor:
        """Reorder the first ``dim`` elements of heads from neighbours that are rotated together (0 with 1, 2 with 3)
        to halves, as ``apply_rope`` takes them. Scores of queries and keys that are both reordered stay the same.
        """
        pairs = x[..., :dim].reshape(*x.shape[:-1], dim // 2, 2).transpose(-1, -2).flatten(-2)
        return pairs if dim == x.shape[-1] else torch.cat((pairs, x[..., dim:]), -1)

    def kv_rows(self, slot_mapping: Tensor, tokens_per_block: int, num_planes: int = 2) -> tuple[Tensor, ...]:
        """Rows of the tokens in a layer's pool seen as ``[num_blocks * num_planes * tokens_per_block, ...]``, int64,
        for each plane: K and V, or the one vector that a layer stores.
        """
        slots = slot_mapping.to(torch.int64)
        if num_planes > 1:
            blocks = slots.div(tokens_per_block, rounding_mode="floor")
            slots = slots + blocks * ((num_planes - 1) * tokens_per_block)
        return tuple(slots + plane * tokens_per_block if plane else slots for plane in range(num_planes))

    def append_kv(self, k: Tensor, v: Tensor, kv: Tensor, rows: tuple[Tensor, ...]) -> None:
        """Write ``k, v [num_tokens, num_kv_heads, head_dim]`` into the pool ``kv`` at ``rows`` of ``kv_rows``; a pool
        of one plane takes k alone.
        """
        flat = kv.view(-1, kv.shape[-2], kv.shape[-1])
        flat.index_copy_(0, rows[0], k)
        if len(rows) > 1:
            flat.index_copy_(0, rows[1], v)
