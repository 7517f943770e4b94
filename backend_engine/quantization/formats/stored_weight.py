"""What the tensors of a checkpoint tell about a weight before its format is known, from names and dtypes alone."""

from collections.abc import Sequence

from backend_engine.quantization.weight_format import FLOAT_DTYPES, StoredTensors


def is_plain(stored: StoredTensors, module: str) -> bool:
    """Whether the weight of ``module`` (or a tensor of that name, a stack of experts) is stored as plain floats."""
    found = stored.tensors.get(module + ".weight") or stored.tensors.get(module)
    return found is not None and found.dtype in FLOAT_DTYPES


def first_stored(stored: StoredTensors, module: str, endings: Sequence[str]) -> str:
    """The first of ``endings`` that ``module`` has a tensor with; without any, the first of them."""
    return next((ending for ending in endings if stored.has(module + ending)), endings[0])
