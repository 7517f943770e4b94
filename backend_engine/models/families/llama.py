"""Llama (1 to 3.x, SmolLM2 and others that use its class): the base case of the families."""

from backend_engine.config.hf_config import HfConfig
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_rules, decoder_spec, read_attention, read_mlp
from backend_engine.models.family import Family


def _build(config: HfConfig) -> ArchSpec:
    layer = LayerDecl(read_attention(config), read_mlp(config))
    return decoder_spec(config, (layer,) * config.num_layers())


FAMILY = Family(_build, decoder_rules())
