"""``Family``: what a family file exports as ``FAMILY``: how to read its config.json and its checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.weight_rules import Rule


@dataclass(frozen=True)
class Family:
    """``from_hf``: config.json as a dict to ``ArchSpec``, ``ModelLoadError`` for what it cannot be faithful to.
    ``rules``: from checkpoint tensors to the parameters of ``CausalLM``.
    """

    from_hf: Callable[[dict[str, Any]], ArchSpec]
    rules: tuple[Rule, ...]
