"""``TensorInfo``: what a checkpoint says of a tensor before anybody reads it. Data only."""

from typing import NamedTuple


class TensorInfo(NamedTuple):
    """``dtype``: as safetensors spells it (``F32``, ``BF16``, ``F8_E4M3``, ``I32``, ``U8``), or the name of a GGUF type
    (``Q4_K``), whose last dimension then counts bytes.
    """

    shape: tuple[int, ...]
    dtype: str
