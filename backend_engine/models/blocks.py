"""Orders of operations within a transformer layer, one class each; ``ArchSpec.block`` names one.

Built and run by ``CausalLM``. A block takes the residual stream and the not yet added output of the sublayer
before it, so that the sum and the norm after it can be one operation.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from backend_engine.layers.attention_layer import AttentionDecl, AttentionLayer
from backend_engine.layers.latent_attention import LatentAttention, LatentAttentionDecl
from backend_engine.layers.mamba2 import Mamba2
from backend_engine.layers.mlp import GatedMlp, GatedMlpDecl, PlainMlp, PlainMlpDecl
from backend_engine.layers.moe import SparseMoe
from backend_engine.layers.norm import Norm, create_norm
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.layers.smoothing import Smoothing
from backend_engine.models.arch_spec import ArchSpec, MlpDecl

Mixer = AttentionLayer | LatentAttention | Mamba2
Mlp = GatedMlp | PlainMlp | SparseMoe


class Block(nn.Module, ABC):
    """What all orders share: the two sublayers of layer ``layer_idx``. ``mlp`` is ``None`` in a layer without one."""

    def __init__(self, spec: ArchSpec, layer_idx: int, parts: ModelParts) -> None:
        super().__init__()
        decl = spec.layers[layer_idx]
        self.mixer = _mixer(spec, layer_idx, parts)
        self.mlp = None if decl.mlp is None else _mlp(decl.mlp, spec.hidden_size, parts)
        self._residual_scale = spec.residual_scale
        self._ops = parts.ops

    @abstractmethod
    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor]:
        """``x``: the previous sublayer's output, ``residual``: the stream before it (``None`` in the first layer).

        Returns the same of this block.
        """

    @abstractmethod
    def input_norms(self) -> tuple[Norm | None, Norm | None]:
        """Whose output the mixer and ``mlp`` read and nothing else does; ``None`` where it is not a norm's."""

    def smoothable(self) -> list[Smoothing]:
        """See ``Smoothing``; those of the layer, in the order of the computation."""
        mixer_norm, mlp_norm = self.input_norms()
        found = [*_before(mixer_norm, self.mixer), *self.mixer.smoothable()]
        return found if self.mlp is None else [*found, *_before(mlp_norm, self.mlp), *self.mlp.smoothable()]

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._residual_scale == 1.0 else self._ops.scaled(x, self._residual_scale)


class PreNormBlock(Block):
    """``x += mixer(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, spec: ArchSpec, layer_idx: int, parts: ModelParts) -> None:
        super().__init__(spec, layer_idx, parts)
        self.mixer_norm = _norm(spec, parts)
        self.mlp_norm = None if self.mlp is None else _norm(spec, parts)

    def input_norms(self) -> tuple[Norm | None, Norm | None]:
        return self.mixer_norm, self.mlp_norm

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor]:
        x, residual = _norm_sum(self.mixer_norm, x, residual)
        x = self._scaled(self.mixer(x, step))
        if self.mlp is None or self.mlp_norm is None:
            return x, residual
        x, residual = self.mlp_norm.add(x, residual)
        return self._scaled(self.mlp(x)), residual


class SandwichNormBlock(Block):
    """``x += norm(mixer(norm(x))); x += norm(mlp(norm(x)))``, four norms."""

    def __init__(self, spec: ArchSpec, layer_idx: int, parts: ModelParts) -> None:
        super().__init__(spec, layer_idx, parts)
        assert self.mlp is not None, f"layer {layer_idx} has nothing between its second pair of norms"
        self.mixer_norm, self.mixer_out_norm, self.mlp_norm, self.mlp_out_norm = (_norm(spec, parts) for _ in range(4))

    def input_norms(self) -> tuple[Norm | None, Norm | None]:
        return self.mixer_norm, self.mlp_norm

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor]:
        x, residual = _norm_sum(self.mixer_norm, x, residual)
        x, residual = self.mlp_norm.add(self._scaled(self.mixer_out_norm(self.mixer(x, step))), residual)
        assert self.mlp is not None
        return self._scaled(self.mlp_out_norm(self.mlp(x))), residual


class PostNormBlock(Block):
    """``x += norm(mixer(x)); x += norm(mlp(x))``: the norms are on what is added."""

    def __init__(self, spec: ArchSpec, layer_idx: int, parts: ModelParts) -> None:
        super().__init__(spec, layer_idx, parts)
        assert self.mlp is not None, f"layer {layer_idx} has nothing before its second norm"
        self.mixer_out_norm, self.mlp_out_norm = (_norm(spec, parts) for _ in range(2))

    def input_norms(self) -> tuple[Norm | None, Norm | None]:
        return None, None

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor]:
        total = x if residual is None else self._ops.add(residual, x)
        total = self._ops.add(total, self._scaled(self.mixer_out_norm(self.mixer(total, step))))
        assert self.mlp is not None
        return self._scaled(self.mlp_out_norm(self.mlp(total))), total


class ParallelBlock(Block):
    """``x += mixer(norm(x)) + mlp(other_norm(x))``: both sublayers read the same stream."""

    def __init__(self, spec: ArchSpec, layer_idx: int, parts: ModelParts) -> None:
        super().__init__(spec, layer_idx, parts)
        assert self.mlp is not None, f"layer {layer_idx} has nothing beside its mixer"
        self.mixer_norm, self.mlp_norm = (_norm(spec, parts) for _ in range(2))

    def input_norms(self) -> tuple[Norm | None, Norm | None]:
        return self.mixer_norm, self.mlp_norm

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor]:
        normed, total = _norm_sum(self.mixer_norm, x, residual)
        assert self.mlp is not None
        return self._scaled(self._ops.add(self.mixer(normed, step), self.mlp(self.mlp_norm(total)))), total


BLOCKS: dict[str, type[Block]] = {
    "pre_norm": PreNormBlock,
    "sandwich_norm": SandwichNormBlock,
    "post_norm": PostNormBlock,
    "parallel": ParallelBlock,
}


def _norm(spec: ArchSpec, parts: ModelParts) -> Norm:
    return create_norm(spec.norm, spec.hidden_size, parts.ops, parts.options)


def _norm_sum(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of the stream, and the stream."""
    return (norm(x), x) if residual is None else norm.add(x, residual)


def _before(norm: Norm | None, reader: Mixer | Mlp) -> list[Smoothing]:
    """The norm of a sublayer's input."""
    return [] if norm is None else [Smoothing(norm, reader.readers())]


def _mixer(spec: ArchSpec, layer_idx: int, parts: ModelParts) -> Mixer:
    decl = spec.layers[layer_idx].mixer
    if not isinstance(decl, AttentionDecl | LatentAttentionDecl):
        return Mamba2(decl, layer_idx, spec.hidden_size, parts)
    attention = decl.attention_spec(layer_idx, spec.sliding_window(layer_idx))
    rope_index = None if decl.rope is None else spec.ropes.index(decl.rope)
    if isinstance(decl, AttentionDecl):
        return AttentionLayer(decl, attention, spec.hidden_size, rope_index, parts)
    assert rope_index is not None, "latent attention without rotation"
    return LatentAttention(decl, attention, spec.hidden_size, rope_index, parts)


def _mlp(decl: MlpDecl, hidden_size: int, parts: ModelParts) -> Mlp:
    if isinstance(decl, GatedMlpDecl):
        return GatedMlp(decl, hidden_size, parts)
    if isinstance(decl, PlainMlpDecl):
        return PlainMlp(decl, hidden_size, parts)
    return SparseMoe(decl, hidden_size, parts)
