"""``KVPool``: the tensors behind the KV cache's block ids, one per layer. The room's only torch file.

Built once by the composition root; written and read by the attention backend. Knows no request and no table.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from backend_engine.core.kv_spec import KvSpec


class KVPool:
    """``num_blocks`` blocks of ``tokens_per_block`` tokens in every layer, zeroed; ids from 0."""

    def __init__(
        self,
        specs: Sequence[KvSpec],
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_blocks > 0 and tokens_per_block > 0, (num_blocks, tokens_per_block)
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._layers = [
            _zeros((num_blocks, 2, tokens_per_block, spec.num_kv_heads, spec.head_dim), dtype, device) for spec in specs
        ]

    @property
    def layers(self) -> Sequence[torch.Tensor]:
        """All layers in order."""
        return self._layers

    def layer(self, index: int) -> torch.Tensor:
        """``[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]``; index 0 of the second axis is K."""
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    def memory_regions(self) -> list[tuple[int, int]]:
        """Address and number of bytes of each layer."""
        return [(layer.data_ptr(), layer.numel() * layer.element_size()) for layer in self._layers]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor. On a CPU the pages come from the system zeroed, each when it is first written (numpy asks for
    them so, torch would write them all): a large pool costs neither time nor memory until it is used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
