"""Checkpoints with ``quant_method`` ``modelopt``: exports of NVIDIA's TensorRT Model Optimizer.

Read by name through the catalog: config.json's own form, and that of hf_quant_config.json, which has everything under
``quantization``. Inputs are rounded where the export holds a scale for that, or asks for one of each token; those of
NVFP4 and of the Microscaling formats stay in the model's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.modelopt_algorithms import ALGORITHMS, ALIASES, Algorithm, PackedWeight
from backend_engine.quantization.formats.module_patterns import ModulePatterns
from backend_engine.quantization.formats.stored_shape import stored_scalar
from backend_engine.quantization.formats.stored_weight import is_plain
from backend_engine.quantization.formats.treated_input import TreatedInput
from backend_engine.quantization.weight_format import Quantization, StoredTensors, WeightFormat

_MIXED = "MIXED_PRECISION"
_INPUT_SCALE, _FACTORS = ".input_scale", ".pre_quant_scale"
_KV_CACHES = {"FP8": "fp8", "INT8": "int8"}
_KV_TYPES = {"fp8": ("float", 8), "int8": ("int", 8)}


class _Rule(NamedTuple):
    """What the config says for some modules."""

    algorithm: Algorithm
    group_size: int | None


@dataclass(frozen=True)
class ModelOpt(Quantization):
    """common: the rule for whatever is not ignored; ``None`` where only ``layers``, by module, are quantized."""

    stored: StoredTensors
    ignored: tuple[ModulePatterns, ...]
    common: _Rule | None
    layers: Mapping[str, _Rule]
    kv_cache: str | None

    def format_of(self, module: str) -> WeightFormat | None:
        if is_plain(self.stored, module) or any(module in patterns for patterns in self.ignored):
            return None
        rule = self._rule_for(module)
        if rule is None:
            return None
        weight = rule.algorithm.weight(PackedWeight(self.stored, module, rule.group_size))
        return self._with_input(module, weight, rule.algorithm)

    @property
    def kv_cache_dtype(self) -> str | None:
        return self.kv_cache

    def _rule_for(self, module: str) -> _Rule | None:
        """That of the module or of what it lies in, whichever is closer."""
        around = accumulate(module.split("."), "{}.{}".format)
        found = [self.layers[name] for name in around if name in self.layers]
        return found[-1] if found else self.common

    def _with_input(self, module: str, weight: WeightFormat, algorithm: Algorithm) -> WeightFormat:
        factors = _FACTORS if self.stored.has(module + _FACTORS) else None
        is_stored = self.stored.has(module + _INPUT_SCALE)
        has_scale = algorithm.is_static or (is_stored and algorithm.rounding is None)
        if algorithm.rounding is None and factors is None and not has_scale:
            return weight
        shape = stored_scalar(self.stored, module + _INPUT_SCALE)
        return TreatedInput(weight, algorithm.rounding, _INPUT_SCALE if has_scale else None, shape, factors)


def read(config: HfConfig, stored: StoredTensors) -> Quantization:
    """``quant_method`` ``modelopt``. Raises ``ModelLoadError`` for a value that is not known."""
    body = config.section("quantization") or config
    ignored = tuple(ModulePatterns.read(body, key) for key in ("ignore", "exclude_modules"))
    kv_cache = _kv_cache(body)
    layers: dict[str, _Rule] = {}
    common = None
    if body.get("quant_algo") == _MIXED:
        layers = _layers(body)
    elif body.get("quant_algo") is not None or kv_cache is None:
        common = _rule(body)
    return ModelOpt(stored, ignored, common, layers, kv_cache)


def _rule(config: HfConfig) -> _Rule:
    found = config.get("quant_algo")
    name = found.upper() if isinstance(found, str) else ""
    algorithm = ALGORITHMS.get(ALIASES.get(name, name))
    if algorithm is None:
        raise _unknown_algorithm(config)
    return _Rule(algorithm, config.count("group_size", 0) or None)


def _unknown_algorithm(config: HfConfig) -> ModelLoadError:
    return config.refuse("quant_algo", f"one of {', '.join(sorted((*ALGORITHMS, _MIXED)))}")


def _layers(body: HfConfig) -> dict[str, _Rule]:
    section = body.section("quantized_layers")
    if section is None:
        raise body.refuse("quantized_layers", f"an object with modules for quant_algo {_MIXED}")
    rules = {}
    for name in section.unread():
        layer = section.section(name)
        if layer is None:
            raise section.refuse(name, "an object with a quant_algo")
        rules[name] = _rule(layer)
    return rules


def _kv_cache(body: HfConfig) -> str | None:
    """``fp8``, ``int8`` or none; hf_quant_config.json has a name, config.json an object or a name."""
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        value = body.get(key)
        if value is not None:
            found = _kv_dtype(value)
            if found is None:
                raise body.refuse(key, "FP8 or INT8")
            return found
    return None


def _kv_dtype(value: Any) -> str | None:
    if isinstance(value, str):
        return _KV_CACHES.get(value.upper())
    if not isinstance(value, dict):
        return None
    chosen = (value.get("type"), value.get("num_bits"))
    return next((dtype for dtype, numbers in _KV_TYPES.items() if numbers == chosen), None)
