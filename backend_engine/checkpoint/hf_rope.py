"""Rotary scalings in the terms of config.json, for formats that state them otherwise. Data only."""

from typing import Any


def llama3_scaling(factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> dict[str, Any]:
    """The scaling of Llama 3.1; the defaults are those of the published models."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
