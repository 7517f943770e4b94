"""The declarative vocabulary of models: a family says what a model is, ``CausalLM`` builds it.

Frozen data, and what follows from it. Variants are objects, never model names; a field that nothing reads does not
exist.
"""

from dataclasses import dataclass

from backend_engine.layers.rotary import RopeScaling


@dataclass(frozen=True)
class RmsNormDecl:
    """Root mean square norm with ``eps`` inside the root."""

    eps: float


@dataclass(frozen=True)
class AttentionDecl:
    """Attention of every layer; see ``AttentionSpec`` for ``scale``, ``sliding_window`` and ``logit_softcap``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    sliding_window: int | None = None
    logit_softcap: float | None = None


@dataclass(frozen=True)
class GatedMlpDecl:
    """``down(silu(gate(x)) * up(x))`` of inner width ``size``."""

    size: int
    bias: bool = False


@dataclass(frozen=True)
class RopeDecl:
    """Rotary positions over the whole head. ``exact_up_to``: the position from which the scheme is no longer what
    the model was given, ``None`` when it holds at any length.
    """

    theta: float
    scaling: RopeScaling
    exact_up_to: int | None = None


@dataclass(frozen=True)
class ArchSpec:
    """A decoder-only transformer. ``block`` names the order of operations in ``models/blocks.py``;
    ``max_positions`` is the longest text the model was made for. ``max_windows``: upper bounds of the layers' sliding
    windows that the user set, repeated over the layers.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    norm: RmsNormDecl
    attention: AttentionDecl
    mlp: GatedMlpDecl
    positions: RopeDecl
    block: str = "pre_norm"
    tie_embeddings: bool = False
    max_windows: tuple[int, ...] = ()

    def sliding_window(self, layer_idx: int) -> int | None:
        """Most recent tokens that a layer sees: the smaller of its own window and the user's; ``None`` = all."""
        windows = [self.attention.sliding_window]
        if self.max_windows:
            windows.append(self.max_windows[layer_idx % len(self.max_windows)])
        return min((window for window in windows if window is not None), default=None)
