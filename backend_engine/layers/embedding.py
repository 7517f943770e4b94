"""``Embedding``: token ids to vectors. The table stays plain even when the head that shares it is packed by a library;
in the checkpoint's own form both read the same tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.quantization.packed import packed_rows
from backend_engine.quantization.quant_method import TensorOptions, WeightedLayer
from backend_engine.quantization.unquantized import Unquantized


class Embedding(WeightedLayer):
    """``ids [num_tokens]`` (any integer dtype) -> ``[num_tokens, hidden_size]``."""

    def __init__(self, vocab_size: int, hidden_size: int, options: TensorOptions) -> None:
        super().__init__((vocab_size, hidden_size), options)
        self.store_as(Unquantized(pack=False))

    def forward(self, ids: Tensor) -> Tensor:
        if self.weight is None:
            return packed_rows(self, ids.to(torch.int64)).to(self.options.dtype)
        return F.embedding(ids, self.weight)
