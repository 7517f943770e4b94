"""Which of several shapes a checkpoint has chosen for a tensor: a number as ``[]`` or ``[1]``, a column with or without
its second dimension. For formats whose writers differ in that; the loader checks everything else.
"""

from collections.abc import Sequence

from backend_engine.quantization.weight_format import StoredTensors


def stored_shape(stored: StoredTensors, name: str, choices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of tensor ``name`` where it is one of ``choices``, otherwise the first of them."""
    found = stored.tensors.get(name)
    return found.shape if found is not None and found.shape in choices else choices[0]


def stored_scalar(stored: StoredTensors, name: str) -> tuple[int, ...]:
    """The shape of a single number: ``()`` or ``(1,)``."""
    return stored_shape(stored, name, ((), (1,)))
