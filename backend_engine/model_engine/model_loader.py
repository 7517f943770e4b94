"""``load_model``: from a model folder to a model with weights; the first of two steps, since the KV pool is sized
after it. Called by the composition root; starts nothing and logs nothing (progress goes to a callback).
"""

import dataclasses
import os
from dataclasses import dataclass

import torch

from backend_engine.attention.interface import AttentionBackend
from backend_engine.attention.select import select_backend
from backend_engine.checkpoint.hf_folder import architecture, read_hf_config
from backend_engine.checkpoint.loader import Progress, load_weights
from backend_engine.core.kv_spec import KvSpec
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.blocks import ModelParts
from backend_engine.models.causal_lm import CausalLM, attention_specs
from backend_engine.models.family import Family
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.plugins.catalog import ARCHITECTURES
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model with weights and the attention backend that its layers call."""

    model: CausalLM
    attention: AttentionBackend
    spec: ArchSpec
    options: TensorOptions

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """What each layer stores for a token."""
        return self.model.kv_specs


def load_model(
    model_dir: str | os.PathLike[str],
    dtype: str,
    device: str,
    attention_backend: str = "auto",
    progress: Progress | None = None,
    max_attention_window: tuple[int, ...] | None = None,
) -> LoadedModel:
    """Build the model that config.json describes and fill it from the folder's safetensors files.

    dtype: ``float32``, ``bfloat16`` or ``float16``; the checkpoint's is converted. max_attention_window: see
    ``KvCacheConfig``. Raises ``ModelLoadError`` for what is wrong with the folder, ``ConfigError`` for an attention
    backend that cannot serve the model.
    """
    config = read_hf_config(model_dir)
    try:
        family: Family = ARCHITECTURES.get(architecture(config))
    except ConfigError as error:
        raise ModelLoadError(f"config.json of {model_dir}: {error}") from None
    spec = dataclasses.replace(family.from_hf(config), max_windows=max_attention_window or ())
    options = TensorOptions(_DTYPES[dtype], torch.device(device))
    ops = TorchOps()
    backend = select_backend(attention_backend, attention_specs(spec), options.dtype, options.device)
    attention = backend(ops, options.device)
    with torch.inference_mode():
        model = CausalLM(spec, ModelParts(ops, attention, Unquantized(), options))
        load_weights(model_dir, model.load_targets(), family.rules, progress)
        model.after_loading()
    model.eval()
    return LoadedModel(model, attention, spec, options)
