"""``read_quantization``: from a checkpoint's quantization config to what it says of each weight.

Called while a checkpoint is described and loaded. Which kinds there are is the registry's affair.
"""

from collections.abc import Mapping
from typing import Any

from backend_engine.config.hf_config import HfConfig
from backend_engine.plugins.catalog import QUANT_METHODS
from backend_engine.quantization.weight_format import NoQuantization, Quantization, StoredTensors


def read_quantization(config: Mapping[str, Any], stored: StoredTensors) -> Quantization:
    """``config``: of the model. Raises ``ModelLoadError`` (one line: key, value and what is allowed)."""
    section = HfConfig(config, stored.where).section("quantization_config")
    if section is None:
        return NoQuantization()
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in QUANT_METHODS:
        raise section.refuse("quant_method", f"one of {', '.join(QUANT_METHODS.names())}")
    quantization: Quantization = QUANT_METHODS.get(method)(section, stored)
    return quantization
