"""``NativeBackend``: models of the family files, built from our own layers.

Looked up by ``model_loader.py`` under ``native``. Logs nothing (progress goes to a callback).
"""

import dataclasses
import difflib

import torch

from backend_engine.attention.paged_kv import KvScales
from backend_engine.attention.select import select_backend
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import stated_dtype
from backend_engine.checkpoint.loader import check_weights, load_weights
from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
from backend_engine.config.model_facts import ModelFacts
from backend_engine.core.kv_spec import StateSpec
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.layers.parts import ModelParts
from backend_engine.model_engine.claims import check_claims
from backend_engine.model_engine.memory_plan import HeadersOnly, MemoryPlan, plan_native
from backend_engine.model_engine.model_backend import LoadedModel, LoadOptions, ModelBackend, nan_warning
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.family import Family
from backend_engine.models.model_source import ModelSource
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.plugins.catalog import ARCHITECTURES, OPERATORS
from backend_engine.quantization.deferred import Deferred
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.read_config import read_quantization
from backend_engine.quantization.unquantized import Unquantized


class NativeBackend(ModelBackend):
    """See the module."""

    def nearest(self, architecture: str) -> str | None:
        if architecture in ARCHITECTURES:
            return architecture
        return next(iter(difflib.get_close_matches(architecture, ARCHITECTURES.names(), n=1)), None)

    def describe(self, source: ModelSource, checkpoint: Checkpoint) -> ModelFacts:
        spec = _family(source).from_hf(source.config, source.origin)
        states = [cache for cache in spec.cache_specs if isinstance(cache, StateSpec)]
        tokens = [cache for cache in spec.cache_specs if not isinstance(cache, StateSpec)]
        limits = [limit for limit in (spec.max_positions, spec.exact_up_to) if limit is not None]
        return ModelFacts(
            max_positions=min(limits, default=None),
            dtype=stated_dtype(source.config),
            elements_per_token=sum(cache.bytes_per_block(1, 1) for cache in tokens),
            state_bytes=sum(cache.bytes_per_block(1, 1) for cache in states),
            kv_cache_dtype=self._kv_cache_dtype(source, checkpoint),
        )

    def _kv_cache_dtype(self, source: ModelSource, checkpoint: Checkpoint) -> str | None:
        if not source.config.get("quantization_config"):
            return None
        return _open_weights(source, checkpoint).kv_cache_dtype

    def plan(self, source: ModelSource, checkpoint: Checkpoint, tensors: TensorOptions, tp: int) -> MemoryPlan | None:
        family = _family(source)
        spec = family.from_hf(source.config, source.origin)
        stored = _open_weights(source, checkpoint, HeadersOnly)
        check_claims(spec, stored)
        return plan_native(spec, family.rules, stored, str(source.model_dir), tensors, tp)

    def load(self, source: ModelSource, checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
        family = _family(source)
        spec = dataclasses.replace(family.from_hf(source.config, source.origin), max_windows=options.max_windows)
        stored = _open_weights(source, checkpoint)
        tensors = options.tensors
        names = options.implementations
        ops: TorchOps = OPERATORS.get(names.operators)()
        backend = select_backend(names.attention_backend, spec.attention_specs(), tensors.dtype, tensors.device)
        attention = backend(ops, tensors.device)
        check_claims(spec, stored)
        parts = ModelParts(ops, attention, Deferred(Unquantized()), tensors)
        with torch.inference_mode():
            # Without memory first: whether the files hold what config.json asks for is known before any is taken.
            outline = CausalLM(spec, dataclasses.replace(parts, options=tensors._replace(device=torch.device("meta"))))
            check_weights(stored, outline.load_targets(), family.rules, str(source.model_dir))
            model = CausalLM(spec, parts)
            report = load_weights(stored, model.load_targets(), family.rules, str(source.model_dir), options.progress)
            model.after_loading()
        model.eval()
        warnings = [nan_warning(name, source) for name in report.with_nan]
        unknown = family.unknown_keys(source.config)
        if unknown:
            keys = ", ".join(unknown)
            warnings.append(f"{source.where} has keys that are not understood and have no effect: {keys}")
        kv_scales = {layer: KvScales(*scales) for layer, scales in report.kv_scales.items()}
        return LoadedModel(model, model.traits, attention, tensors, tuple(warnings), kv_scales)


def _open_weights(
    source: ModelSource, checkpoint: Checkpoint, made_as: type[StoredWeights] = StoredWeights
) -> StoredWeights:
    files = TensorFiles(checkpoint.open_tensors())
    quantization = read_quantization(source.config, files.described(source.where))
    return made_as(files, quantization, source.where, source.origin)


def _family(source: ModelSource) -> Family:
    try:
        family: Family = ARCHITECTURES.get(source.architecture)
    except ConfigError as error:
        raise ModelLoadError(f"{source.where}: {error}") from None
    return family
