"""``TransformersBackend``: causal language models of transformers, run on our scheduler and our paged cache.

Looked up by ``model_loader.py`` under ``transformers``, and imported then only. What it runs, the modules of
``models/transformers_room`` say.
"""

from backend_engine.checkpoint.hf_folder import stated_dtype
from backend_engine.config.model_facts import ModelFacts
from backend_engine.model_engine.model_backend import LoadedModel, LoadOptions, ModelBackend, nan_warning
from backend_engine.models.model_source import ModelSource
from backend_engine.models.transformers_room.facts import longest_text, nearest_causal_lm
from backend_engine.models.transformers_room.loading import load_transformers_model, read_config
from backend_engine.ops.torch_ops import TorchOps


class TransformersBackend(ModelBackend):
    """See the module."""

    def nearest(self, architecture: str) -> str | None:
        return nearest_causal_lm(architecture)

    def describe(self, source: ModelSource) -> ModelFacts:
        config = read_config(source)
        return ModelFacts(longest_text(config), stated_dtype(source.config), model_backend="transformers")

    def load(self, source: ModelSource, options: LoadOptions) -> LoadedModel:
        model, with_nan = load_transformers_model(
            source, options.tensors, TorchOps(), options.attention_backend, options.max_windows, options.progress
        )
        warnings = tuple(nan_warning(name, source) for name in with_nan)
        return LoadedModel(model, model.traits, model.backend, options.tensors, warnings)
