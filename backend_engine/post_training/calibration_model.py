"""``load_for_calibration``: a checkpoint as a model whose weights can be read and changed.

The first step of quantizing a whole model. Always our own layers, in float32, with the reference attention.
"""

import torch

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import architecture
from backend_engine.checkpoint.loader import Progress
from backend_engine.errors import ConfigError
from backend_engine.model_engine.model_backend import Implementations, LoadedModel, LoadOptions, ModelBackend
from backend_engine.models.model_source import ModelSource
from backend_engine.plugins.catalog import MODEL_BACKENDS
from backend_engine.quantization.quant_method import TensorOptions


def load_for_calibration(checkpoint: Checkpoint, device: str, progress: Progress | None = None) -> LoadedModel:
    """A ``CausalLM`` with plain float32 weights, decoded where the checkpoint packs them. device: ``cpu``, ``cuda``.

    The weights are inference tensors: change them under ``torch.inference_mode()``. Latent attention has no
    ``kv_b_proj`` any more: it is taken apart when it is loaded. Raises ``ConfigError`` for an architecture without a
    family file and for an engine folder, ``ModelLoadError`` for what is wrong with the checkpoint.
    """
    if checkpoint.engine is not None:
        raise ConfigError(f"{checkpoint.path} is an engine folder, which is not quantized further; give a checkpoint")
    name = architecture(checkpoint.config, checkpoint.origin)
    source = ModelSource(checkpoint.path, checkpoint.config, name, origin=checkpoint.origin)
    backend: ModelBackend = MODEL_BACKENDS.get("native")()
    nearest = backend.nearest(name)
    if nearest != name:
        hint = f"; the nearest that has one is {nearest}" if nearest else ""
        raise ConfigError(
            f"{source.where}: architecture {name} has no family file, and only models with one can be quantized{hint}"
        )
    tensors = TensorOptions(torch.float32, torch.device(device))
    options = LoadOptions(tensors, Implementations("torch"), progress=progress, plain_weights=True)
    return backend.load(source, checkpoint, options)
