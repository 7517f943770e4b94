"""``KVPool``: the tensors behind the KV cache's block ids, layer by layer. The room's only torch file.

Built once by the composition root; written and read by the attention backend and by layers with a recurrent state.
Knows no request and no table.
"""

from collections.abc import Sequence

import torch

from backend_engine.core.kv_spec import CacheSpec, KvSpec, LatentSpec
from backend_engine.ops.huge_pages import HugePages

LayerTensors = torch.Tensor | tuple[torch.Tensor, ...]

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""Types of ``config/kv_formats.py``, the cache's formats by name."""


class KVPool:
    """``num_blocks`` blocks of ``tokens_per_block`` tokens in every layer, zeroed; ids from 0."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``dtype``: of keys and values, one of ``KV_DTYPES``; states are float32."""
        assert num_blocks > 0 and tokens_per_block > 0, (num_blocks, tokens_per_block)
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._dtype = dtype
        self._device = device
        self._memory = HugePages() if device.type == "cpu" else None
        self._layers = [self._create(spec) for spec in specs]

    @property
    def layers(self) -> Sequence[LayerTensors]:
        """All layers in order.

        Keys and values: ``[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]``, index 0 of the second axis is K.
        Latent vectors: ``[num_blocks, 1, tokens_per_block, 1, dim]``. In int8 either is a pair, the codes and a float32
        tensor of scales, one for each head of each token: the same axes without the last. States: one ``[num_blocks,
        *shape]`` for each of ``StateSpec.shapes``.
        """
        return self._layers

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of all layers."""
        return [tensor for layer in self._layers for tensor in (layer if isinstance(layer, tuple) else (layer,))]

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(num_bytes for _, num_bytes in self.memory_regions())

    def memory_regions(self) -> list[tuple[int, int]]:
        """Address and number of bytes of each tensor."""
        return [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in self.tensors]

    def _create(self, spec: CacheSpec) -> LayerTensors:
        num_blocks, size = self.num_blocks, self.tokens_per_block
        if isinstance(spec, KvSpec):
            return self._vectors((num_blocks, 2, size, spec.num_kv_heads), spec.head_dim)
        if isinstance(spec, LatentSpec):
            return self._vectors((num_blocks, 1, size, 1), spec.dim)
        return tuple(self._zeros((num_blocks, *shape), torch.float32) for shape in spec.shapes)

    def _vectors(self, shape: tuple[int, ...], width: int) -> LayerTensors:
        vectors = self._zeros((*shape, width), self._dtype)
        return (vectors, self._zeros(shape, torch.float32)) if self._dtype == torch.int8 else vectors

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On a CPU the pages come from the system zeroed, each when it is first written: a large pool costs neither
        time nor memory until it is used.
        """
        return (
            self._memory.empty(shape, dtype) if self._memory else torch.zeros(shape, dtype=dtype, device=self._device)
        )
