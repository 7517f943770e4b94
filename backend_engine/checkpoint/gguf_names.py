"""Tensors of a GGUF file under the names, and in the order of rows, that Hugging Face has for the same model.

Used by ``gguf_checkpoint.py``. A tensor that no rule knows keeps its name, so that the loader refuses it by that.
"""

from collections.abc import Mapping
from typing import Any

from backend_engine.checkpoint.gguf_changes import Stored, same, whole_latents
from backend_engine.checkpoint.gguf_files import GgufFiles
from backend_engine.checkpoint.gguf_name_rules import RULES
from backend_engine.checkpoint.gguf_rope import FACTOR_TENSORS
from backend_engine.checkpoint.tensor_reader import MadeTensor
from backend_engine.errors import ModelLoadError
from backend_engine.models.weight_rules import pattern

_LEAVES = (".weight", ".bias")
_LATENT_HALVES = (".attn_k_b.weight", ".attn_v_b.weight")


def hf_tensors(architecture: str, files: GgufFiles, config: Mapping[str, Any]) -> dict[str, MadeTensor]:
    """The tensors of the model by Hugging Face's names. ``config``: of ``hf_config``."""
    rules = [(pattern(rule.source), rule) for rule in RULES[architecture]]
    found: dict[str, MadeTensor] = {}
    absorbed: list[str] = []
    for name in files.tensors:
        if name in FACTOR_TENSORS:
            continue  # The config says what they say.
        if "kv_lora_rank" in config and name.endswith(_LATENT_HALVES):
            absorbed.append(name)
            continue
        stored = Stored(files, name, config)
        matches = ((rule, template.fullmatch(name)) for template, rule in rules if name.endswith(_LEAVES))
        rule, match = next(((rule, match) for rule, match in matches if match), (None, None))
        target = name if rule is None or match is None else _filled(rule.target, match.groupdict())
        for made_name, made in (same if rule is None else rule.change)(stored, target):
            if made_name in found:
                raise ModelLoadError(f"{files.path} holds {made_name} twice, one of them as {name}")
            found[made_name] = made
    found.update(whole_latents(files, config, absorbed))
    return found


def _filled(template: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        template = template.replace(f"{{{name}}}", value)
    return template
