"""What models with Mamba-2 layers share: reading such a layer from config.json, and the weight rules for it.

Used by the model families, which say what the keys are called. Refusals name key, value and expectation.
"""

import math
from typing import NamedTuple

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.models.weight_rules import Rename, Rule

# What a kind of layer is called, by its authors and by transformers 5.
_MAMBA = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")


class Mamba2Keys(NamedTuple):
    """Keys of config.json, each with the value when it is not stated; ``None`` as that of ``head_dim``: what fits."""

    num_heads: tuple[str, int]
    head_dim: tuple[str, int | None]
    state_size: tuple[str, int]
    num_groups: tuple[str, int]
    conv_kernel: tuple[str, int]
    expand: tuple[str, int]
    bias: tuple[str, bool]
    conv_bias: tuple[str, bool]


def read_mamba2(config: HfConfig, keys: Mamba2Keys, eps: float) -> Mamba2Decl:
    """The mixer; its heads fill ``expand`` times the hidden size."""
    inner_size = config.integer(*keys.expand) * config.integer("hidden_size")
    num_heads = config.integer(*keys.num_heads)
    if inner_size % num_heads:
        raise config.refuse(keys.num_heads[0], f"a divisor of {keys.expand[0]} * hidden_size, {inner_size}")
    num_groups = config.integer(*keys.num_groups)
    if num_heads % num_groups:
        raise config.refuse(keys.num_groups[0], f"a divisor of {keys.num_heads[0]}, {num_heads}")
    key, default = keys.head_dim
    # Some checkpoints leave it to the reader.
    is_given = config.get(key) not in (None, "auto") or default is not None
    head_dim = config.integer(key, default) if is_given else inner_size // num_heads
    if head_dim * num_heads != inner_size:
        raise config.refuse(key, f"{inner_size // num_heads}, so that {num_heads} heads are {inner_size} wide")
    config.choice("hidden_act", ("silu", "swish"), "silu")
    return Mamba2Decl(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.integer(*keys.state_size),
        num_groups=num_groups,
        conv_kernel=config.integer(*keys.conv_kernel),
        eps=eps,
        time_step_limit=_time_step_limit(config),
        bias=config.flag(*keys.bias),
        conv_bias=config.flag(*keys.conv_bias),
    )


def _time_step_limit(config: HfConfig) -> tuple[float, float]:
    """Bounds of the time step, which may be infinite; transformers 5 writes that as an object."""
    key = "time_step_limit"
    values = config.get(key)
    if values is None:
        return 0.0, math.inf
    expected = "two numbers, the second not below the first, and none below 0"
    if not isinstance(values, list) or len(values) != 2:
        raise config.refuse(key, expected)
    plain = [math.inf if value == {"__float__": "Infinity"} else value for value in values]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in plain):
        raise config.refuse(key, expected)
    low, high = float(plain[0]), float(plain[1])
    if not 0 <= low <= high or low == math.inf:
        raise config.refuse(key, expected)
    return low, high


def read_mamba_layers(config: HfConfig) -> list[bool]:
    """Of each layer of a model that also has attention, whether it is a Mamba-2 layer; all are when not stated."""
    num_layers = config.num_layers()
    key = "layers_block_type" if config.get("layer_types") is None else "layer_types"
    types = config.get(key)
    if types is None:
        return [True] * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.refuse(key, f"a list of {num_layers} names, one for each of num_hidden_layers")
    if any(name not in (*_MAMBA, *_ATTENTION) for name in types):
        raise config.refuse(key, "mamba or attention for each layer")
    return [name in _MAMBA for name in types]


def mamba2_rules(source: str) -> tuple[Rule, ...]:
    """``source``: what the checkpoint calls the mixer of layer ``{i}``, with a dot at the end."""
    mixer = "layers.{i}.mixer."
    return (
        *(Rename(source + part + ".{leaf}", mixer + part + ".{leaf}") for part in ("in_proj", "conv1d", "out_proj")),
        Rename(source + "norm.weight", mixer + "norm.weight"),
        Rename(source + "dt_bias", mixer + "dt_bias"),
        Rename(source + "A_log", mixer + "a_log"),
        Rename(source + "D", mixer + "d"),
    )
