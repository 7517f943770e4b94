"""A model family: Llama whose logits are bent to stay below ``logit_cap``. Read docs/adding-a-model.md beside it."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_rules, decoder_spec, read_attention, read_mlp
from backend_engine.models.family import Family


def _build(config: HfConfig) -> ArchSpec:
    """From config.json to a description of the model. ``config`` refuses what is missing or wrong, by its key."""
    layer = LayerDecl(read_attention(config), read_mlp(config))
    spec = decoder_spec(config, (layer,) * config.num_layers())
    return dataclasses.replace(spec, logits_softcap=config.number("logit_cap"))


# The weights have Llama's names, so Llama's rules say where each goes.
FAMILY = Family(_build, decoder_rules())
