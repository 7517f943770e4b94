"""``CausalLM``: the one decoder-only transformer, built from an ``ArchSpec``.

``ModelEngine`` runs it, ``checkpoint/loader.py`` fills its parameters. It knows neither requests nor files, and
no model by name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backend_engine.attention.interface import AttentionSpec
from backend_engine.core.kv_spec import KvSpec
from backend_engine.layers.embedding import Embedding
from backend_engine.layers.linear import Linear
from backend_engine.layers.norm import RMSNorm
from backend_engine.layers.rotary import Rotary
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.blocks import BLOCKS, ModelParts
from backend_engine.models.weight_rules import LoadTarget


def attention_specs(spec: ArchSpec) -> tuple[AttentionSpec, ...]:
    """Attention of each layer."""
    decl = spec.attention
    return tuple(
        AttentionSpec(
            layer_idx=i,
            num_heads=decl.num_heads,
            num_kv_heads=decl.num_kv_heads,
            head_dim=decl.head_dim,
            scale=decl.scale,
            sliding_window=spec.sliding_window(i),
            logit_softcap=decl.logit_softcap,
        )
        for i in range(spec.num_layers)
    )


class CausalLM(nn.Module):
    """Embed, blocks, norm, logits of chosen tokens. Parameters are empty until loaded.

    With ``tie_embeddings`` the head reads the embedding's table; a weight scheme that stores it in another form
    makes a second copy, since the lookup needs the plain table.
    """

    def __init__(self, spec: ArchSpec, parts: ModelParts) -> None:
        super().__init__()
        self.spec = spec
        options = parts.options
        block = BLOCKS[spec.block]
        rope = spec.positions
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, options)
        self.rotary = Rotary(rope.theta, spec.attention.head_dim, rope.scaling, parts.ops, options)
        self.layers = nn.ModuleList(block(spec, attention, parts) for attention in attention_specs(spec))
        self.norm = RMSNorm(spec.hidden_size, spec.norm.eps, parts.ops, options)
        head_options = options._replace(device=torch.device("meta")) if spec.tie_embeddings else options
        self.lm_head = Linear(spec.hidden_size, (spec.vocab_size,), parts.quant, head_options, bias=False)
        if spec.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """What each layer stores for a token."""
        decl = self.spec.attention
        return (KvSpec(decl.num_kv_heads, decl.head_dim),) * self.spec.num_layers

    def load_targets(self) -> dict[str, LoadTarget]:
        """Every parameter to fill, by name, with the rows of its fused parts."""
        targets = {}
        for name, parameter in self.named_parameters():
            owner = self.get_submodule(name.rpartition(".")[0])
            parts = owner.out_sizes if isinstance(owner, Linear) else (parameter.shape[0],)
            targets[name] = LoadTarget(parameter.data, parts)
        return targets

    def after_loading(self) -> None:
        """Let every weight scheme prepare its weights; called once, when all targets are filled."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.after_loading()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_indices: Tensor, kv_layers: Sequence[Tensor]
    ) -> Tensor:
        """Tokens ``[num_tokens]`` -> float32 logits ``[num_logits, vocab_size]`` of those at ``logits_indices``.

        The attention backend must have been prepared for this step. ``kv_layers``: the pool, layer by layer.
        """
        x: Tensor = self.embed_tokens(input_ids)
        rope = self.rotary(position_ids)
        residual: Tensor | None = None
        for layer, kv in zip(self.layers, kv_layers, strict=True):
            x, residual = layer(x, residual, rope, kv)
        assert residual is not None, "a model without layers"
        if logits_indices.shape[0] == 0:
            return torch.empty(0, self.spec.vocab_size, device=x.device)
        x, _ = self.norm.add(x.index_select(0, logits_indices), residual.index_select(0, logits_indices))
        logits: Tensor = self.lm_head(x)
        return logits.to(torch.float32)
