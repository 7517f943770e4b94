"""What one layer stores in the cache: for every token (``KvSpec``, ``LatentSpec``) or for every block (``StateSpec``).

Pure numbers; sizing, pool, layers and attention all read them.
"""

import math
from typing import NamedTuple

_STATE_ELEMENT_BYTES = 4


class KvSpec(NamedTuple):
    """Keys and values of one layer and one token: ``num_kv_heads`` heads of ``head_dim`` elements each, twice."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, tokens_per_block: int, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes that K and V of a block's tokens take in this layer; ``scale_bytes``: of each head and token beside
        its elements.
        """
        return 2 * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes) * tokens_per_block


class LatentSpec(NamedTuple):
    """One compressed vector of ``dim`` elements a token, from which keys and values of all heads are made
    (multi-head latent attention; DeepSeek-V2, 2024).
    """

    dim: int

    def bytes_per_block(self, tokens_per_block: int, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes that the vectors of a block's tokens take in this layer; ``scale_bytes``: of each vector's scale."""
        return (self.dim * element_bytes + scale_bytes) * tokens_per_block


class StateSpec(NamedTuple):
    """Recurrent state of one layer, float32 tensors of these ``shapes``. Each block holds the state after the last of
    its tokens that is computed, so that whoever reuses a full block can go on from it.
    """

    shapes: tuple[tuple[int, ...], ...]

    def bytes_per_block(self, tokens_per_block: int, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes that one state takes; neither the number of tokens nor the cache's dtype matters."""
        return _STATE_ELEMENT_BYTES * sum(math.prod(shape) for shape in self.shapes)


CacheSpec = KvSpec | LatentSpec | StateSpec
