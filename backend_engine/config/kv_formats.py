"""The number formats that the KV cache may hold, and how much memory each takes. Data only.

``resolve.py`` checks the option by it, sizing and the pool take their bytes and types from it.
"""

from typing import NamedTuple


class KvFormat(NamedTuple):
    """``element_bytes`` of one number; ``scale_bytes`` of what is kept beside the numbers of one head of one token."""

    element_bytes: int
    scale_bytes: int = 0


# fp8 and fp8_e5m2: the formats E4M3 and E5M2 of "FP8 formats for deep learning" (Micikevicius et al., 2022).
KV_FORMATS = {
    "float32": KvFormat(4),
    "bfloat16": KvFormat(2),
    "float16": KvFormat(2),
    "fp8": KvFormat(1),
    "fp8_e5m2": KvFormat(1),
    "int8": KvFormat(1, scale_bytes=4),
}
