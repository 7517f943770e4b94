"""What the whole-repository renderer knows of the placeholders: defaults, allowed values, retired names.

``render_repository`` reads these tables. A placeholder without an entry is unset, the empty string, where the
template puts it in quotes, and has no default elsewhere. It reads no files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Filled from the model folder unless set.
MODEL_FOLDER_KEYS = ("tokenizer_dir", "engine_dir")

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "triton_max_batch_size": "8",
        "decoupled_mode": "true",
        "preprocessing_instance_count": "1",
        "postprocessing_instance_count": "1",
        "bls_instance_count": "1",
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "triton_backend": "python",
        "batching_strategy": "inflight_fused_batching",
        "max_queue_delay_microseconds": "0",
        "max_queue_size": "0",
    }
)

# Placeholders of other generations of the templates that mean nothing here: accepted with one line.
RETIRED = ("tokenizer_type", "worker_path", "prompt_embedding_table_data_type")


@dataclass(frozen=True)
class Allowed:
    """The values one placeholder may have: a pattern for the whole value, and the same in words."""

    pattern: re.Pattern[str]
    words: str

    def accepts(self, value: str) -> bool:
        """Say whether ``value`` may be used."""
        return self.pattern.fullmatch(value) is not None


_COUNT = Allowed(re.compile(r"[1-9][0-9]{0,3}"), "a whole number from 1 to 9999")
_WHOLE = Allowed(re.compile(r"[0-9]{1,9}"), "a whole number from 0")
_BOOL = Allowed(re.compile(r"true|True|TRUE|false|False|FALSE"), "true or false")
_FLOAT_TYPE = Allowed(re.compile(r"TYPE_(FP16|BF16|FP32)"), "TYPE_FP16, TYPE_BF16 or TYPE_FP32")
_LOGITS_TYPE = Allowed(re.compile(r"TYPE_(FP16|FP32)"), "TYPE_FP16 or TYPE_FP32")

ALLOWED: Mapping[str, Allowed] = MappingProxyType(
    {
        "triton_max_batch_size": _WHOLE,
        "decoupled_mode": _BOOL,
        "preprocessing_instance_count": _COUNT,
        "postprocessing_instance_count": _COUNT,
        "bls_instance_count": _COUNT,
        "logits_datatype": _LOGITS_TYPE,
        "encoder_input_features_data_type": _FLOAT_TYPE,
        "triton_backend": Allowed(re.compile(r"python|tensorrtllm"), "python or tensorrtllm"),
        "max_queue_delay_microseconds": _WHOLE,
        "max_queue_size": _WHOLE,
    }
)

# What any placeholder outside quotes must look like in text-format protobuf: a number, a boolean or an enum name.
UNQUOTED = Allowed(
    re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?"),
    "a number, true or false, or a name such as TYPE_FP32",
)
