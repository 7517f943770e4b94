"""``KvSpec``: what one layer stores for a token. Pure numbers; sizing, pool and attention all read it."""

from typing import NamedTuple


class KvSpec(NamedTuple):
    """Keys and values of one layer and one token: ``num_kv_heads`` heads of ``head_dim`` elements each, twice."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that K and V of one token take in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * element_bytes
