"""The door between layers and attention: ``AttentionSpec``, ``AttentionMetadata``, ``AttentionBackend``.

Layers hand over q, k, v and never learn which backend they are in. Shapes are the contract:
q ``[num_tokens, num_heads, head_dim]``, k and v ``[num_tokens, num_kv_heads, head_dim]``, kv the layer's ``PagedKv``,
whose tensors are ``[num_blocks, 2, tokens_per_block, num_kv_heads, width]`` (index 0 of the second axis is K; the width
is head_dim, or 1 for scales). With ``AttentionSpec.value_dim`` keys and values are one: k ``[num_tokens, 1,
head_dim]``, v its first ``value_dim`` elements, tensors ``[num_blocks, 1, tokens_per_block, 1, width]``.

Where the cache's form is not exact (``PagedKv.is_exact``), every token is attended as the cache holds it, those of this
step too: what a token sees depends neither on chunks nor on reuse.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from backend_engine.attention.paged_kv import PagedKv
from backend_engine.ops.native_runtime import NativeStep
from backend_engine.ops.torch_ops import TorchOps

IntArray = npt.NDArray[Any]


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention. ``scale`` multiplies q·k; ``sliding_window`` w: a token sees itself and w - 1 before it;
    ``logit_softcap`` c: scores become ``c * tanh(score / c)``. ``num_heads`` is a multiple of ``num_kv_heads``.
    ``value_dim``: the cache holds one vector a token, whose first ``value_dim`` elements are the value (``None`` = keys
    and values are stored apart). ``has_sinks``: every head has a learned score that takes part in the softmax and
    stands for no token.
    """

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
    value_dim: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class AttentionMetadata:
    """What one step attends to. Rows are requests, context rows first; tokens are rows one after another.

    Row r brings the last ``q_lens[r]`` of its ``kv_lens[r]`` tokens; earlier ones lie in its blocks.
    Device tensors: ``q_lens, kv_lens [B]`` and ``block_tables [B, max_blocks]`` int32, ``slot_mapping [num_tokens]``
    int32 (block id * tokens_per_block + offset: where each token's K and V go). ``*_host`` are the same in numpy.
    Entries of a block table past ``ceil(kv_len / tokens_per_block)`` are not read.
    """

    num_contexts: int
    num_ctx_tokens: int
    tokens_per_block: int
    q_lens: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    q_lens_host: IntArray
    kv_lens_host: IntArray
    block_tables_host: IntArray


class AttentionBackend(ABC):
    """``prepare`` once a step, then ``forward`` once a layer. Serves one thread; keeps nothing between steps."""

    name: ClassVar[str]
    # When nobody names a backend, the supported one with the highest preference is taken.
    preference: ClassVar[int]
    # Whether keys and values are written by the ``ops`` that it was made with.
    appends_by_ops: ClassVar[bool] = True
    # What ``prepare`` fills for the native library, at one address; ``None`` where the backend does not run on it.
    native_step: NativeStep | None = None

    @abstractmethod
    def __init__(self, ops: TorchOps, device: torch.device) -> None:
        """``ops``: the maths it may use; ``device``: where q, k, v and the pool lie."""

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Reasons why this backend cannot serve such a layer; empty when it can."""

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> None:
        """Plan the step."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: PagedKv, sinks: Tensor | None = None
    ) -> Tensor:
        """Write k and v into the blocks, then attend. ``sinks [num_heads]``: the learned scores of ``has_sinks``.

        Returns ``[num_tokens, num_heads, width of a value]``.
        """
