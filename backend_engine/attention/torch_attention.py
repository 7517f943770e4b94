"""``TorchAttention``: the reference backend, any device and dtype; accepts all that the interface can express.

Rows with one new token are gathered from their blocks and computed in a few padded groups; rows with more
are computed one by one. Long blocks, as a contiguous cache has, are read and zeroed in parts. Used by layers through
``AttentionBackend``; never sees requests.
"""

import torch
from torch import Tensor

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec
from backend_engine.attention.paged_kv import PagedKv
from backend_engine.attention.torch_pieces import Piece, PoolRows, fresh_parts, make_pieces, part_len
from backend_engine.attention.torch_scores import attend, find_fused_with_sums
from backend_engine.ops.torch_ops import TorchOps


class TorchAttention(AttentionBackend):
    """See the module. ``ops`` appends keys and values; ``device`` is where the pool lies."""

    name = "torch"
    preference = 0

    def __init__(self, ops: TorchOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._fused_with_sums = find_fused_with_sums() if device.type == "cpu" else None
        self._metadata: AttentionMetadata | None = None
        self._pieces: list[Piece] = []
        # Where this step's tokens go, by the number of planes of a layer's pool.
        self._new_rows: dict[int, tuple[Tensor, ...]] = {}
        self._part_len = 1
        self._fresh_parts: PoolRows | None = None

    @classmethod
    def unsupported(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[str]:
        if not dtype.is_floating_point:
            return [f"dtype {dtype} is not a floating point type"]
        return []

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._new_rows = {}
        self._part_len = part_len(metadata.tokens_per_block)
        self._fresh_parts = fresh_parts(metadata, self._device)
        self._pieces = make_pieces(metadata, self._device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: PagedKv, sinks: Tensor | None = None
    ) -> Tensor:
        assert (sinks is not None) == spec.has_sinks, f"layer {spec.layer_idx}: has_sinks is {spec.has_sinks}"
        self._append(k, v, spec, kv)
        if len(self._pieces) == 1:
            return self._attend(self._pieces[0], q, k, v, spec, kv, sinks)
        width = spec.head_dim if spec.value_dim is None else spec.value_dim
        out = torch.empty((*q.shape[:2], width), dtype=q.dtype, device=q.device)
        for piece in self._pieces:
            out[piece.tokens] = self._attend(piece, q[piece.tokens], k, v, spec, kv, sinks)
        return out

    def _append(self, k: Tensor, v: Tensor, spec: AttentionSpec, kv: PagedKv) -> None:
        """Write this step's tokens into the pool."""
        assert self._metadata is not None, "forward before prepare"
        num_planes = kv.num_planes
        assert num_planes == (2 if spec.value_dim is None else 1), f"layer {spec.layer_idx}: {num_planes} planes"
        if self._fresh_parts is not None:
            kv.clear(self._fresh_parts.of(num_planes), self._part_len)
        if num_planes not in self._new_rows:
            slots, tokens_per_block = self._metadata.slot_mapping, self._metadata.tokens_per_block
            self._new_rows[num_planes] = self._ops.kv_rows(slots, tokens_per_block, num_planes)
        kv.append(self._ops, k, v, self._new_rows[num_planes])

    def _attend(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: PagedKv, sinks: Tensor | None
    ) -> Tensor:
        """q ``[n * q_len, num_heads, head_dim]`` of this piece against its keys -> the same number of values."""
        num_rows, heads, dim = len(piece.kv_lens), spec.num_kv_heads, spec.head_dim
        if piece.is_whole and kv.is_exact(k.dtype):
            keys = k[piece.tokens].unsqueeze(0)
            values = v[piece.tokens].unsqueeze(0) if spec.value_dim is None else keys
        else:
            gathered = kv.gather(piece.pool_rows.of(kv.num_planes), self._part_len, q.dtype)
            planes = gathered.view(kv.num_planes, num_rows, -1, heads, dim)[:, :, : piece.kv_len].unbind(0)
            keys, values = planes[0], planes[-1]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        mask = piece.mask(spec.sliding_window, q.dtype)
        if piece.q_len == 1:
            # The heads that share keys stand where a sequence of queries would: keys are read once for all.
            query = q.view(num_rows, heads, -1, dim) if q.is_contiguous() else q.reshape(num_rows, heads, -1, dim)
            sinks = None if sinks is None else sinks.view(1, heads, -1)
            result = attend(query, keys, values, mask, False, spec, sinks, self._fused_with_sums)
            return result.reshape(num_rows, spec.num_heads, -1)
        sinks = None if sinks is None else sinks.view(1, -1, 1)
        query = q.transpose(0, 1).unsqueeze(0)
        result = attend(query, keys, values, mask, mask is None, spec, sinks, self._fused_with_sums)
        return result.squeeze(0).transpose(0, 1)
