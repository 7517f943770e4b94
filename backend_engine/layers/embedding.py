"""``Embedding``: token ids to vectors. The table stays plain even when the head that shares it is packed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend_engine.quantization.quant_method import TensorOptions


class Embedding(nn.Module):
    """``ids [num_tokens]`` (any integer dtype) -> ``[num_tokens, hidden_size]``."""

    def __init__(self, vocab_size: int, hidden_size: int, options: TensorOptions) -> None:
        super().__init__()
        table = torch.empty(vocab_size, hidden_size, dtype=options.dtype, device=options.device)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
