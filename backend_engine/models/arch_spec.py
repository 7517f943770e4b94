"""The declarative vocabulary of models: a family says what a model is, ``CausalLM`` builds it.

Frozen data, and what follows from it. Variants are objects, never model names; a field that nothing reads does not
exist.
"""

from dataclasses import dataclass

from backend_engine.attention.interface import AttentionSpec
from backend_engine.core.kv_spec import CacheSpec
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.latent_attention import LatentAttentionDecl
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.layers.mlp import GatedMlpDecl, PlainMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.norm import NormDecl
from backend_engine.layers.rotary import RopeDecl

MixerDecl = AttentionDecl | LatentAttentionDecl | Mamba2Decl
MlpDecl = GatedMlpDecl | PlainMlpDecl | MoeDecl


@dataclass(frozen=True)
class LayerDecl:
    """One layer: what mixes tokens, and what then works on each alone (``None`` = nothing)."""

    mixer: MixerDecl
    mlp: MlpDecl | None


@dataclass(frozen=True)
class ArchSpec:
    """A decoder-only model. ``block`` names the order of operations in ``models/blocks.py``; ``max_positions`` is the
    longest text the model was made for, ``None`` = not stated; ``learned_positions``: rows of a position table that is
    added to the embedding.

    ``embedding_scale`` multiplies the embeddings, ``residual_scale`` what a sublayer adds, ``logits_scale`` the logits;
    ``logits_softcap`` c: logits become ``c * tanh(logits / c)``. ``max_windows``: upper bounds of the layers' sliding
    windows that the user set, repeated over the layers.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int | None
    norm: NormDecl
    layers: tuple[LayerDecl, ...]
    block: str = "pre_norm"
    tie_embeddings: bool = False
    learned_positions: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    max_windows: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeDecl, ...]:
        """The distinct rotary schemes of the layers, in the order of their first use."""
        ropes = (getattr(layer.mixer, "rope", None) for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def exact_up_to(self) -> int | None:
        """Length of text up to which all position schemes are what the model was given; ``None`` = any."""
        limits = [rope.exact_up_to for rope in self.ropes if rope.exact_up_to is not None]
        return min([*limits, *([self.learned_positions] if self.learned_positions else [])], default=None)

    @property
    def positions_switch_at(self) -> int | None:
        """Length of text beyond which a position scheme changes; ``None`` = none does."""
        return min((rope.switches_at for rope in self.ropes if rope.switches_at is not None), default=None)

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer stores in the cache."""
        return tuple(layer.mixer.cache_spec() for layer in self.layers)

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Every layer that attends, as an attention backend sees it."""
        return tuple(
            layer.mixer.attention_spec(i, self.sliding_window(i))
            for i, layer in enumerate(self.layers)
            if not isinstance(layer.mixer, Mamba2Decl)
        )

    def sliding_window(self, layer_idx: int) -> int | None:
        """Most recent tokens that a layer sees: the smaller of its own window and the user's; ``None`` = all."""
        windows = [getattr(self.layers[layer_idx].mixer, "sliding_window", None)]
        if self.max_windows:
            windows.append(self.max_windows[layer_idx % len(self.max_windows)])
        return min((window for window in windows if window is not None), default=None)
