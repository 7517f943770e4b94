"""An attention backend: the one in torch, which also looks at what it returns. Chosen by ``attention_backend``."""

import torch
from torch import Tensor

from backend_engine.attention.interface import AttentionSpec
from backend_engine.attention.paged_kv import PagedKv
from backend_engine.attention.torch_attention import TorchAttention


class CheckedTorchAttention(TorchAttention):
    """Fails a step whose attention gives NaN, and names the layer. For finding where a model goes wrong."""

    name = "checked_torch"
    preference = -1  # below the others, so that only who names it gets it

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: PagedKv, sinks: Tensor | None = None
    ) -> Tensor:
        out = super().forward(q, k, v, spec, kv, sinks)
        if bool(torch.isnan(out).any()):
            raise FloatingPointError(f"the attention of layer {spec.layer_idx} gave NaN")
        return out
