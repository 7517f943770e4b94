"""``CausalLM``: the one decoder-only model, built from an ``ArchSpec``.

``ModelEngine`` runs it, ``post_training/block_walk.py`` layer by layer; ``checkpoint/loader.py`` fills its parameters.
It knows neither requests nor files, and no model by name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backend_engine.core.kv_spec import StateSpec
from backend_engine.layers.embedding import Embedding
from backend_engine.layers.linear import Linear
from backend_engine.layers.norm import create_norm
from backend_engine.layers.parts import LayerCache, LayerStep, ModelParts
from backend_engine.layers.rotary import Rotary
from backend_engine.layers.state_plan import StatePlan
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.blocks import BLOCKS
from backend_engine.models.model_inputs import ModelInputs
from backend_engine.models.model_traits import ModelTraits
from backend_engine.models.weight_rules import LoadTarget
from backend_engine.quantization.quant_method import WeightedLayer

# See ``CausalLM.run_layers``.
LayerRunner = Callable[[Tensor, LayerStep], tuple[Tensor, Tensor]]


class CausalLM(nn.Module):
    """Embed, blocks, norm, logits of chosen tokens. Parameters are empty until loaded.

    With ``tie_embeddings`` the head reads the embedding's table; where a library packs the head's weight, that is a
    second copy, since the lookup needs the plain table.
    """

    def __init__(self, spec: ArchSpec, parts: ModelParts) -> None:
        super().__init__()
        self.spec = spec
        options = parts.options
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, options)
        self.embed_positions: Embedding | None = None
        if spec.learned_positions is not None:
            self.embed_positions = Embedding(spec.learned_positions, spec.hidden_size, options)
        self.rotaries = nn.ModuleList(Rotary(rope, parts.ops, options) for rope in spec.ropes)
        block = BLOCKS[spec.block]
        self.layers = nn.ModuleList(block(spec, i, parts) for i in range(spec.num_layers))
        self.norm = create_norm(spec.norm, spec.hidden_size, parts.ops, options)
        head_options = options._replace(device=torch.device("meta")) if spec.tie_embeddings else options
        head_quant = parts.head_quant or parts.quant
        self.lm_head = Linear(spec.hidden_size, (spec.vocab_size,), head_quant, head_options, bias=False)
        # Rounded to the weights' dtype, as those who train models do it.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=options.dtype).item()
        self._layer_runner: LayerRunner = self.run_layers
        self._has_states = any(isinstance(cache, StateSpec) for cache in spec.cache_specs)

    @property
    def traits(self) -> ModelTraits:
        """What the engine has to know of the model."""
        spec = self.spec
        return ModelTraits(
            vocab_size=spec.vocab_size,
            cache_specs=spec.cache_specs,
            attention_specs=spec.attention_specs(),
            exact_up_to=spec.exact_up_to,
            positions_switch_at=spec.positions_switch_at,
        )

    def load_targets(self) -> dict[str, LoadTarget]:
        """Every parameter to fill, by name, with the rows of its fused parts."""
        targets = {}
        for path, module in self.named_modules():
            prefix = path + "." if path else ""
            sizes, head_dim = (module.out_sizes, module.head_dim) if isinstance(module, Linear) else (None, 1)
            if isinstance(module, WeightedLayer) and not (module is self.lm_head and self.spec.tie_embeddings):
                targets[prefix + "weight"] = LoadTarget(None, sizes or module.weight_shape[:1], head_dim, module)
            for name, parameter in module.named_parameters(recurse=False):
                if not (isinstance(module, WeightedLayer) and name == "weight"):
                    targets[prefix + name] = LoadTarget(parameter.data, sizes or (parameter.shape[0],), head_dim)
        return targets

    def after_loading(self) -> None:
        """Let every layer prepare its weights, inner ones first; called once, when all targets are filled."""
        if self.spec.tie_embeddings:
            self.lm_head.share_weight(self.embed_tokens)
        for module in reversed(list(self.modules())):
            prepare: Any = getattr(module, "after_loading", None)
            if module is not self and prepare is not None:
                prepare()

    def forward(self, inputs: ModelInputs, caches: Sequence[LayerCache]) -> Tensor:
        """The step's tokens -> float32 logits ``[num_logits, vocab_size]`` of those at ``inputs.logits_indices``.

        The attention backend must have been prepared for this step. ``caches``: the pool, layer by layer.
        """
        x, residual = self._layer_runner(self.embed(inputs), self.layer_step(inputs, caches))
        return self.logits_of(x, residual, inputs.logits_indices)

    def run_by(self, runner: LayerRunner) -> None:
        """Let ``runner`` do in ``forward`` what ``run_layers`` does."""
        self._layer_runner = runner

    def run_layers(self, x: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
        """The last layer's output, and the stream that it is to be added to; both ``[num_tokens, hidden_size]``."""
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        assert residual is not None, "a model without layers"
        return x, residual

    def embed(self, inputs: ModelInputs) -> Tensor:
        """The step's tokens as the first layer takes them, ``[num_tokens, hidden_size]``."""
        x: Tensor = self.embed_tokens(inputs.input_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(inputs.position_ids)
        return x

    def layer_step(self, inputs: ModelInputs, caches: Sequence[LayerCache]) -> LayerStep:
        """What all layers are run with in the step."""
        return LayerStep(
            ropes=tuple(rotary(inputs.position_ids, inputs.text_lens) for rotary in self.rotaries),
            caches=caches,
            metadata=inputs.attention,
            states=StatePlan.of(inputs.attention) if self._has_states else None,
        )

    def logits_of(self, x: Tensor, residual: Tensor, wanted: Tensor) -> Tensor:
        """Float32 logits ``[len(wanted), vocab_size]`` of the tokens at ``wanted`` (int32), of what the last layer
        gives.
        """
        spec = self.spec
        if wanted.shape[0] == 0:
            return torch.empty(0, spec.vocab_size, device=x.device)
        x, _ = self.norm.add(x.index_select(0, wanted), residual.index_select(0, wanted))
        logits: Tensor = self.lm_head(x).to(torch.float32)
        if spec.logits_scale != 1.0:
            logits = logits * spec.logits_scale
        if spec.logits_softcap is not None:
            logits = torch.tanh(logits / spec.logits_softcap) * spec.logits_softcap
        return logits
