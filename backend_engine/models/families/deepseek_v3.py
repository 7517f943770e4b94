"""DeepSeek-V3 and R1, and Kimi K2: latent attention, and experts whose choice a learned correction balances."""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.decoder_config import decoder_spec
from backend_engine.models.family import Family
from backend_engine.models.latent_config import RULES, read_groups, read_latent_attention, read_layers


def _build(config: HfConfig) -> ArchSpec:
    config.require_neutral({"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    num_groups, top_groups = read_groups(config, 2)
    routing = RoutingDecl(
        num_experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", "norm_topk_prob" not in config),
        scale=config.number("routed_scaling_factor"),
        has_correction=True,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="top2",
    )
    is_interleaved = config.flag("rope_interleave", "rope_interleave" not in config)
    mixer = read_latent_attention(config, is_interleaved=is_interleaved)
    return decoder_spec(config, read_layers(config, mixer, routing))


FAMILY = Family(_build, RULES)
