"""``load_model``: from a model folder to a model with weights; the first of two steps, since the KV pool is sized
after it. Called by the composition root; chooses whose modules the model is made of and leaves the rest to them.
"""

import os

import torch

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import architecture
from backend_engine.checkpoint.loader import Progress
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.config.model_facts import ModelFacts
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.model_engine.memory_plan import MemoryPlan
from backend_engine.model_engine.model_backend import Implementations, LoadedModel, LoadOptions, ModelBackend
from backend_engine.models.model_source import ModelSource
from backend_engine.ops.dense_products import DenseKind
from backend_engine.plugins.catalog import ARCHITECTURES, MODEL_BACKENDS
from backend_engine.quantization.quant_method import TensorOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Where a model lies, or what was found when it was opened there.
ModelPath = str | os.PathLike[str] | Checkpoint
_NATIVE, _TRANSFORMERS = "native", "transformers"


def describe_model(model: ModelPath, model_backend: str = "auto", trust_remote_code: bool = False) -> ModelFacts:
    """What is known of the model before it is loaded; see ``load_model`` for arguments and errors."""
    checkpoint = _opened(model)
    source = source_of(checkpoint, trust_remote_code)
    backend = _backend_for(checkpoint, source, model_backend)
    try:
        return backend.describe(source, checkpoint)
    except ModelLoadError as error:
        if model_backend == "auto" and _is_native(source) and _runs_elsewhere(source):
            raise ModelLoadError(f"{error}; model_backend:transformers may run it all the same") from None
        raise


def plan_memory(
    model: ModelPath,
    dtype: str,
    device: str,
    model_backend: str = "auto",
    trust_remote_code: bool = False,
    tp: int = 1,
    weight_only_precision: str = "auto",
) -> MemoryPlan | None:
    """The memory that ``load_model`` would take, from the files' headers; ``None`` where only loading tells. ``tp``:
    ranks that the model is divided over, a plan only. Raises as ``load_model`` does for what the headers show.
    """
    checkpoint = _opened(model)
    source = source_of(checkpoint, trust_remote_code)
    tensors = TensorOptions(DTYPES[dtype], torch.device(device))
    return _backend_for(checkpoint, source, model_backend).plan(
        source, checkpoint, tensors, tp, DenseKind.of(weight_only_precision)
    )


def load_model(
    model: ModelPath,
    dtype: str,
    device: str,
    implementations: Implementations = Implementations(),
    progress: Progress | None = None,
    max_attention_window: tuple[int, ...] | None = None,
    model_backend: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Build the model that config.json describes and fill it from the checkpoint, in any format.

    dtype: ``float32``, ``bfloat16`` or ``float16``; the checkpoint's is converted. max_attention_window: see
    ``KvCacheConfig``. model_backend: ``native``, ``transformers``, or ``auto``: native where there is a family file.
    trust_remote_code: whether code in the folder may run. Raises ``ModelLoadError`` for what is wrong with the folder,
    ``ConfigError`` for an attention backend that cannot serve the model.
    """
    checkpoint = _opened(model)
    source = source_of(checkpoint, trust_remote_code)
    backend = _backend_for(checkpoint, source, model_backend)
    tensors = TensorOptions(DTYPES[dtype], torch.device(device))
    options = LoadOptions(tensors, implementations, max_attention_window or (), progress)
    return backend.load(source, checkpoint, options)


def _opened(model: ModelPath) -> Checkpoint:
    return model if isinstance(model, Checkpoint) else open_checkpoint(model)


def source_of(checkpoint: Checkpoint, trust_remote_code: bool = False) -> ModelSource:
    """The model that the checkpoint is of. Raises ``ModelLoadError`` when it names none."""
    name = architecture(checkpoint.config, checkpoint.origin)
    return ModelSource(checkpoint.path, checkpoint.config, name, trust_remote_code, checkpoint.origin)


def _backend_for(checkpoint: Checkpoint, source: ModelSource, name: str) -> ModelBackend:
    """As ``_backend``; a refusal of an engine folder tells which plugins it was built with."""
    try:
        return _backend(source, name)
    except ModelLoadError as error:
        plugins = () if checkpoint.engine is None else checkpoint.engine.build.plugins
        if not plugins:
            raise
        raise ModelLoadError(
            f"{error}; the engine folder was built with plugins {', '.join(plugins)}, which have to be named again"
        ) from None


def _backend(source: ModelSource, name: str) -> ModelBackend:
    """The backend called ``name``; for ``auto`` the native one, or where that has no family, transformers'."""
    if name == "auto":
        name = _NATIVE if _is_native(source) or not _runs_elsewhere(source) else _TRANSFORMERS
    elif name not in MODEL_BACKENDS:
        raise ConfigError(f"model_backend {name!r} is not allowed; use auto, {', '.join(MODEL_BACKENDS.names())}")
    if name == _NATIVE and not _is_native(source):
        raise _unknown(source)
    backend: ModelBackend = MODEL_BACKENDS.get(name)()
    return backend


def _is_native(source: ModelSource) -> bool:
    return _nearest(_NATIVE, source) == source.architecture


def _runs_elsewhere(source: ModelSource) -> bool:
    """Whether the transformers backend takes the architecture on; whether it can serve it shows when it is loaded."""
    if source.trust_remote_code and "AutoModelForCausalLM" in (source.config.get("auto_map") or {}):
        return True
    return _nearest(_TRANSFORMERS, source) == source.architecture


def _nearest(name: str, source: ModelSource) -> str | None:
    backend: ModelBackend = MODEL_BACKENDS.get(name)()
    return backend.nearest(source.architecture)


def _unknown(source: ModelSource) -> ModelLoadError:
    """Why a model without a family file is refused, and what may help."""
    try:
        ARCHITECTURES.get(source.architecture)
    except ConfigError as error:
        message = f"{source.where}: {error}"
    if _runs_elsewhere(source):
        return ModelLoadError(f"{message}; model_backend:transformers may run it")
    nearest = _nearest(_TRANSFORMERS, source)
    message += "; transformers has no such causal language model either"
    if nearest and repr(nearest) not in message:
        message += f", the nearest there is {nearest!r}"
    if source.config.get("auto_map"):
        message += "; the folder brings code of its own, which runs only with trust_remote_code"
    return ModelLoadError(message)
