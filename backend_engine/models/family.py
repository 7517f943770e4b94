"""``Family``: what a family file exports as ``FAMILY``: how to read its config.json and its checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_engine.config.hf_config import HfConfig
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.config_keys import check_rest, unknown_keys
from backend_engine.models.weight_rules import Rule


@dataclass(frozen=True)
class Family:
    """``build``: config.json to ``ArchSpec``, ``ModelLoadError`` for what it cannot be faithful to. ``rules``: from
    checkpoint tensors to the parameters of ``CausalLM``. ``section``: the part of config.json that describes the
    language model, where it also describes others; ``None`` = all of it. ``section_defaults``: what keys mean that are
    not in it, since such parts leave out what is as usual.
    """

    build: Callable[[HfConfig], ArchSpec]
    rules: tuple[Rule, ...]
    section: str | None = None
    section_defaults: Mapping[str, Any] = field(default_factory=dict)

    def from_hf(self, values: Mapping[str, Any], where: str = "config.json") -> ArchSpec:
        """The model that config.json describes, or ``where`` else the values were found. Refuses values that the family
        did not read and that would change the maths.
        """
        config = self._config(values, where)
        spec = self.build(config)
        check_rest(config)
        return spec

    def unknown_keys(self, values: Mapping[str, Any]) -> list[str]:
        """Keys of config.json that neither the family reads nor anybody knows; they have no effect."""
        config = self._config(values, "config.json")
        self.build(config)
        return unknown_keys(config)

    def _config(self, values: Mapping[str, Any], where: str) -> HfConfig:
        config = HfConfig(values, where)
        if self.section is None:
            return config
        section = config.section(self.section, self.section_defaults)
        if section is None:
            raise config.refuse(self.section, "an object that describes the language model")
        return section
