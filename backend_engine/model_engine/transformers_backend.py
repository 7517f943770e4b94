"""``TransformersBackend``: causal language models of transformers, run on our scheduler and our paged cache.

Looked up by ``model_loader.py`` under ``transformers``, and imported then only. What it runs, the modules of
``models/transformers_room`` say.
"""

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.decoded_weights import decoded_weights
from backend_engine.checkpoint.hf_folder import stated_dtype
from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
from backend_engine.config.model_facts import ModelFacts
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.model_engine.memory_plan import MemoryPlan, plan_plain_files
from backend_engine.model_engine.model_backend import LoadedModel, LoadOptions, ModelBackend, nan_warning
from backend_engine.models.model_source import ModelSource
from backend_engine.models.transformers_room.facts import longest_text, nearest_causal_lm
from backend_engine.models.transformers_room.loading import load_transformers_model, read_config
from backend_engine.ops.dense_products import DenseKind
from backend_engine.plugins.catalog import OPERATORS
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.read_config import read_quantization


class TransformersBackend(ModelBackend):
    """See the module."""

    def nearest(self, architecture: str) -> str | None:
        return nearest_causal_lm(architecture)

    def describe(self, source: ModelSource, checkpoint: Checkpoint) -> ModelFacts:
        _check_kind(checkpoint)
        config = read_config(source)
        return ModelFacts(longest_text(config), stated_dtype(source.config), model_backend="transformers")

    def plan(
        self, source: ModelSource, checkpoint: Checkpoint, tensors: TensorOptions, tp: int, kind: DenseKind
    ) -> MemoryPlan | None:
        _check_kind(checkpoint)
        if tp != 1:
            raise ConfigError(
                f"tp {tp} is not allowed with model_backend transformers, whose layers are not ours; use 1"
            )
        if source.config.get("quantization_config"):
            return None
        return plan_plain_files(TensorFiles(checkpoint.open_tensors()), source.config.get("vocab_size"), tensors)

    def load(self, source: ModelSource, checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
        _check_kind(checkpoint)
        files = TensorFiles(checkpoint.open_tensors())
        quantization = read_quantization(source.config, files.described(source.where))
        stored = StoredWeights(files, quantization, source.where, source.origin)
        model, with_nan = load_transformers_model(
            source,
            lambda shapes: decoded_weights(stored, shapes, options.tensors.dtype),
            options.tensors,
            OPERATORS.get(options.implementations.operators)(),
            options.implementations.attention_backend,
            options.max_windows,
            options.progress,
            options.implementations.weight_kind,
        )
        warnings = tuple(nan_warning(name, source) for name in with_nan)
        return LoadedModel(model, model.traits, model.backend, options.tensors, warnings)


def _check_kind(checkpoint: Checkpoint) -> None:
    if checkpoint.kind != "hugging_face":
        raise ModelLoadError(
            f"{checkpoint.path} is in the format {checkpoint.kind}; model_backend:transformers runs folders of Hugging "
            "Face's format only"
        )
