"""DeepSeek-V2: latent attention, and experts of which the best groups are chosen from."""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.decoder_config import decoder_spec
from backend_engine.models.family import Family
from backend_engine.models.latent_config import RULES, read_groups, read_latent_attention, read_layers


def _build(config: HfConfig) -> ArchSpec:
    # How normalised scores are scaled is understood in different ways, and no published model normalises them.
    config.require_neutral({"norm_topk_prob": (False,), "scoring_func": ("softmax",), "rope_interleave": (True,)})
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    num_groups, top_groups = read_groups(config, 1) if method == "group_limited_greedy" else (1, 1)
    routing = RoutingDecl(
        num_experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        score="softmax",
        normalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="max",
    )
    mixer = read_latent_attention(config, is_interleaved=True)
    return decoder_spec(config, read_layers(config, mixer, routing))


FAMILY = Family(_build, RULES)
