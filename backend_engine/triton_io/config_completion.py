"""Adds to a config.pbtxt of an earlier generation the tensors that our models use beyond it.

The adapters' ``auto_complete_config`` calls ``complete``; Triton Server asks for it unless it was started with
--disable-auto-complete-config. A config that our own templates made has everything, and stays as it is.
"""

from typing import Any

from backend_engine.triton_io.tensor_rows import ENCODER_FEATURES, FP16, FP32, LOGITS, TensorRow
from backend_engine.triton_io.tensor_table import MODELS

_USUAL_TYPES = {LOGITS: FP32, ENCODER_FEATURES: FP16}


def complete(model: str, config: Any) -> Any:
    """``config``, a ``pb_utils.ModelConfig``, with all optional inputs and all outputs of ``model``.

    Tensors that are there already keep their types and dims. Required inputs are never added.
    """
    stated = config.as_dict()
    inputs, outputs = ({entry["name"] for entry in stated.get(kind) or []} for kind in ("input", "output"))
    for row in MODELS[model].inputs:
        if row.optional and row.name not in inputs:
            config.add_input(_entry(row) | {"optional": True})
    for row in MODELS[model].outputs:
        if row.name not in outputs:
            config.add_output(_entry(row))
    return config


def _entry(row: TensorRow) -> dict[str, Any]:
    return {"name": row.name, "data_type": _USUAL_TYPES.get(row.dtype, row.dtype), "dims": list(row.dims)}
