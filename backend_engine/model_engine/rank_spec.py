"""``rank_of``: what one rank of a tensor-parallel group would hold of a model, as a model of its own.

Arithmetic for ``memory_plan.py`` and ``rank_shards.py``: the engine runs on one device. Heads, inner widths and the
vocabulary are divided; heads of keys and values and groups of a state space that are fewer than the ranks are on
several of them; experts go to the ranks whole; norms, routers and compressed vectors are on all.
"""

import dataclasses
from functools import cache

from backend_engine.errors import ConfigError
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.latent_attention import LatentAttentionDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl, MixerDecl, MlpDecl


def rank_of(spec: ArchSpec, tp: int, setting: str = "tp") -> ArchSpec:
    """The share of rank 0 of ``tp``, no other's is larger. A layer of experts keeps its number of them, of
    which the rank holds ``per_rank``. Raises ``ConfigError``, which calls the number ``setting``, for a ``tp`` that
    does not divide the heads.
    """
    if tp == 1:
        return spec
    mixers = {layer.mixer for layer in spec.layers}
    if not all(_divides(tp, mixer) for mixer in mixers):
        most = max(mixer.num_heads for mixer in mixers)
        allowed = [str(n) for n in range(1, most + 1) if all(_divides(n, mixer) for mixer in mixers)]
        raise ConfigError(f"{setting} {tp} does not divide the heads of the model; use {', '.join(allowed)}")

    @cache
    def divided(layer: LayerDecl) -> LayerDecl:
        return LayerDecl(_rank_mixer(layer.mixer, tp), _rank_mlp(layer.mlp, tp))

    layers = tuple(divided(layer) for layer in spec.layers)
    return dataclasses.replace(spec, vocab_size=per_rank(spec.vocab_size, tp), layers=layers)


def per_rank(count: int, tp: int) -> int:
    """The largest of ``tp`` shares of ``count``."""
    return -(-count // tp)


def _divides(tp: int, mixer: MixerDecl) -> bool:
    if isinstance(mixer, AttentionDecl):
        groups = mixer.num_kv_heads
    elif isinstance(mixer, LatentAttentionDecl):
        groups = 1
    else:
        groups = mixer.num_groups
    return mixer.num_heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)


def _rank_mixer(mixer: MixerDecl, tp: int) -> MixerDecl:
    num_heads = mixer.num_heads // tp
    if isinstance(mixer, AttentionDecl):
        return dataclasses.replace(mixer, num_heads=num_heads, num_kv_heads=per_rank(mixer.num_kv_heads, tp))
    if isinstance(mixer, LatentAttentionDecl):
        return dataclasses.replace(mixer, num_heads=num_heads)
    return dataclasses.replace(mixer, num_heads=num_heads, num_groups=per_rank(mixer.num_groups, tp))


def _rank_mlp(mlp: MlpDecl | None, tp: int) -> MlpDecl | None:
    if mlp is None:
        return None
    if isinstance(mlp, MoeDecl):
        return dataclasses.replace(mlp, shared_size=per_rank(mlp.shared_size, tp))
    return dataclasses.replace(mlp, size=per_rank(mlp.size, tp))
