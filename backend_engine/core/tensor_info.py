"""``TensorInfo``: what a checkpoint says of a tensor before anybody reads it. Data only."""

import math
from typing import NamedTuple

# Bytes of an element, of dtypes that take more than one.
_ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """``dtype``: as safetensors spells it (``F32``, ``BF16``, ``F8_E4M3``, ``I32``, ``U8``), or the name of a GGUF type
    (``Q4_K``), whose last dimension then counts bytes.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor as it is stored."""
        return math.prod(self.shape) * _ELEMENT_BYTES.get(self.dtype, 1)
