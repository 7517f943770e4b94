"""What models with experts share: their number, the choice of them, and the weight rules of common spellings.

Used by the model families. Refusals name key, value and expectation.
"""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.decoder_config import read_mlp
from backend_engine.models.weight_rules import Fuse, Rename, Rule, Unstack

_COUNTS = ("num_local_experts", "num_experts")


def read_num_experts(config: HfConfig, default: int, at_least: int = 1) -> int:
    """The number of experts, which has two names; ``at_least``: 0 where a model without experts may be stated."""
    stated = [key for key in _COUNTS if config.get(key) is not None]
    if not stated:
        return default
    num_experts = config.count(stated[0]) if at_least == 0 else config.integer(stated[0])
    config.require_neutral(dict.fromkeys(stated, (num_experts,)))
    return num_experts


def read_top_k(config: HfConfig, num_experts: int, default: int) -> int:
    """How many of them a token goes to."""
    top_k = config.integer("num_experts_per_tok", default)
    if top_k > num_experts:
        raise config.refuse("num_experts_per_tok", f"at most the number of experts, {num_experts}")
    return top_k


def read_sparse_mlps(
    config: HfConfig, default_size: int, defaults: tuple[int, int], shared_size: int = 0
) -> tuple[GatedMlpDecl | MoeDecl, ...]:
    """The feed-forward layer of each layer: experts in every ``decoder_sparse_step``-th that ``mlp_only_layers`` does
    not name. default_size: of an expert; defaults: number of experts and how many a token goes to.
    """
    config.require_neutral({"mlp_bias": (False,)})
    dense = read_mlp(config)
    num_experts = read_num_experts(config, defaults[0], at_least=0)
    step, size = config.integer("decoder_sparse_step", 1), config.integer("moe_intermediate_size", default_size)
    num_layers = config.num_layers()
    names = config.get("mlp_only_layers")
    dense_layers = [] if names is None else names
    if not isinstance(dense_layers, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense_layers):
        raise config.refuse("mlp_only_layers", f"a list of layers, each from 0 to {num_layers - 1}")
    normalize = config.flag("norm_topk_prob", False)
    if not num_experts:
        return (dense,) * num_layers
    routing = RoutingDecl(num_experts, read_top_k(config, num_experts, defaults[1]), normalize=normalize)
    sparse = MoeDecl(routing, size, dense.act, shared_size=shared_size, shared_gate=shared_size > 0)
    return tuple(sparse if i not in dense_layers and (i + 1) % step == 0 else dense for i in range(num_layers))


def stacked_expert_rules() -> tuple[Rule, ...]:
    """Weights of all experts in one tensor, as transformers holds them in memory."""
    return tuple(
        Unstack(f"model.layers.{{i}}.mlp.experts.{name}", f"layers.{{i}}.mlp.experts.{{e}}.{name}.weight")
        for name in ("gate_up_proj", "down_proj")
    )


def transposed_expert_rules(name: str, *, is_interleaved: bool = False) -> tuple[Rule, ...]:
    """Product ``name`` of all experts in one tensor, transposed, and their biases in another."""
    source, ours = f"model.layers.{{i}}.mlp.experts.{name}", f"layers.{{i}}.mlp.experts.{{e}}.{name}."
    return (
        Unstack(source, ours + "weight", is_transposed=True, is_interleaved=is_interleaved),
        Unstack(source + "_bias", ours + "bias", is_interleaved=is_interleaved),
    )


def numbered_expert_rules(block: str = "block_sparse_moe") -> tuple[Rule, ...]:
    """Experts of products ``w1`` (gate), ``w3`` (up) and ``w2`` (down), each a tensor; and the router beside them."""
    source, ours = f"model.layers.{{i}}.{block}.", "layers.{i}.mlp."
    gate_and_up = tuple(source + f"experts.{{e}}.{name}.weight" for name in ("w1", "w3"))
    return (
        Fuse(gate_and_up, ours + "experts.{e}.gate_up_proj.weight"),
        Rename(source + "experts.{e}.w2.weight", ours + "experts.{e}.down_proj.weight"),
        Rename(source + "gate.weight", ours + "router.weight"),
        Rename(source + "e_score_correction_bias", ours + "router.correction_bias"),
    )
