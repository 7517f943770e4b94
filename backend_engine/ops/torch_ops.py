"""``TorchOps``: the reference for every operation the layers use, in plain torch, on any device and dtype.

Injected into layers and attention backends; a faster class may override single methods. Holds no state and
never looks at requests or caches beyond the tensors it is given.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchOps:
    """Operations on flat batches: the leading dimension is always ``num_tokens``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019)."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(residual + x), residual + x)``; neither input is changed."""
        total = residual + x
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``[num_tokens, 2 * size]`` holding gate and up side by side -> ``silu(gate) * up``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

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

        ``cos`` and ``sin`` are those of ``rope_tables`` in the dtype of ``x``.
        """
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def kv_rows(self, slot_mapping: Tensor, tokens_per_block: int) -> tuple[Tensor, Tensor]:
        """Rows of K and of V in a layer's pool seen as ``[num_blocks * 2 * tokens_per_block, ...]``, int64."""
        slots = slot_mapping.to(torch.int64)
        keys = slots + slots.div(tokens_per_block, rounding_mode="floor") * tokens_per_block
        return keys, keys + tokens_per_block

    def append_kv(self, k: Tensor, v: Tensor, kv: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        """Write ``k, v [num_tokens, num_kv_heads, head_dim]`` into the pool ``kv`` at ``rows`` of ``kv_rows``."""
        flat = kv.view(-1, kv.shape[-2], kv.shape[-1])
        flat.index_copy_(0, rows[0], k)
        flat.index_copy_(0, rows[1], v)
