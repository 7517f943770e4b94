"""``NativeBackend``: models of the family files, built from our own layers.

Looked up by ``model_loader.py`` under ``native``. Logs nothing (progress goes to a callback).
"""

import dataclasses
import difflib
from collections.abc import Mapping

import torch

from backend_engine.attention.paged_kv import KvScales
from backend_engine.attention.select import select_backend
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.engine_folder import verifying
from backend_engine.checkpoint.hf_folder import stated_dtype
from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
from backend_engine.config.model_facts import ModelFacts
from backend_engine.core.kv_spec import StateSpec
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.layers.parts import ModelParts
from backend_engine.model_engine.claims import check_claims
from backend_engine.model_engine.engine_weights import EngineWeights
from backend_engine.model_engine.memory_plan import HeadersOnly, MemoryPlan, plan_native
from backend_engine.model_engine.model_backend import LoadedModel, LoadOptions, ModelBackend, nan_warning
from backend_engine.model_engine.weight_source import CheckpointWeights, WeightSource
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.family import Family
from backend_engine.models.model_source import ModelSource
from backend_engine.models.weight_rules import LoadTarget
from backend_engine.ops.dense_products import DenseKind
from backend_engine.ops.huge_pages import HugePages
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.plugins.catalog import ARCHITECTURES, OPERATORS
from backend_engine.quantization.deferred import Deferred
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.read_config import read_quantization
from backend_engine.quantization.unquantized import Decoded, Unquantized


class NativeBackend(ModelBackend):
    """See the module."""

    def nearest(self, architecture: str) -> str | None:
        if architecture in ARCHITECTURES:
            return architecture
        return next(iter(difflib.get_close_matches(architecture, ARCHITECTURES.names(), n=1)), None)

    def describe(self, source: ModelSource, checkpoint: Checkpoint) -> ModelFacts:
        spec = family_of(source).from_hf(source.config, source.origin)
        states = [cache for cache in spec.cache_specs if isinstance(cache, StateSpec)]
        tokens = [cache for cache in spec.cache_specs if not isinstance(cache, StateSpec)]
        limits = [limit for limit in (spec.max_positions, spec.exact_up_to) if limit is not None]
        return ModelFacts(
            max_positions=min(limits, default=None),
            dtype=stated_dtype(source.config),
            elements_per_token=sum(cache.bytes_per_block(1, 1) for cache in tokens),
            state_bytes=sum(cache.bytes_per_block(1, 1) for cache in states),
            kv_cache_dtype=self._kv_cache_dtype(source, checkpoint),
            built=None if checkpoint.engine is None else checkpoint.engine.build,
        )

    def _kv_cache_dtype(self, source: ModelSource, checkpoint: Checkpoint) -> str | None:
        if checkpoint.engine is not None:
            return checkpoint.engine.kv_cache_dtype
        if not source.config.get("quantization_config"):
            return None
        return _open_weights(source, checkpoint).kv_cache_dtype

    def plan(
        self, source: ModelSource, checkpoint: Checkpoint, tensors: TensorOptions, tp: int, kind: DenseKind
    ) -> MemoryPlan | None:
        family = family_of(source)
        spec = family.from_hf(source.config, source.origin)
        return plan_native(spec, weight_source(spec, family, source, checkpoint, HeadersOnly), tensors, tp, kind)

    def load(self, source: ModelSource, checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
        family = family_of(source)
        spec = dataclasses.replace(family.from_hf(source.config, source.origin), max_windows=options.max_windows)
        tensors = options.tensors
        names = options.implementations
        ops: TorchOps = OPERATORS.get(names.operators)()
        specs = spec.attention_specs()
        backend = select_backend(names.attention_backend, specs, tensors.dtype, tensors.device, type(ops))
        attention = backend(ops, tensors.device)
        weights = weight_source(spec, family, source, checkpoint)
        memory, kinds = HugePages(), (names.weight_kind, names.weight_kind.for_head)
        plain, plain_head = (
            Decoded() if options.plain_weights else Unquantized(kind=kind, memory=memory) for kind in kinds
        )
        parts = ModelParts(ops, attention, Deferred(plain), tensors, Deferred(plain_head))
        with torch.inference_mode():
            # Without memory first: whether the files hold what config.json asks for is known before any is taken.
            outline = CausalLM(spec, dataclasses.replace(parts, options=tensors._replace(device=torch.device("meta"))))
            weights.check(outline)
            with verifying(checkpoint):
                model = CausalLM(spec, parts)
                targets = model.load_targets()
                if options.plain_weights:
                    _decode(targets)
                with_nan = weights.fill(targets, options.progress)
                model.after_loading()
        model.eval()
        warnings = [nan_warning(name, source) for name in with_nan]
        unknown = family.unknown_keys(source.config)
        if unknown:
            keys = ", ".join(unknown)
            warnings.append(f"{source.where} has keys that are not understood and have no effect: {keys}")
        kv_scales = {layer: KvScales(*scales) for layer, scales in weights.kv_scales().items()}
        return LoadedModel(model, model.traits, attention, tensors, tuple(warnings), kv_scales)


def _decode(targets: Mapping[str, LoadTarget]) -> None:
    """Let every layer keep its weight plain, those too that would have a form of their own."""
    for target in targets.values():
        if target.layer is not None:
            target.layer.store_as(Decoded())


def weight_source(
    spec: ArchSpec,
    family: Family,
    source: ModelSource,
    checkpoint: Checkpoint,
    made_as: type[StoredWeights] = StoredWeights,
) -> WeightSource:
    """What fills a model of ``spec``. Raises ``ModelLoadError`` where the files are too small to hold it."""
    weights: WeightSource
    if checkpoint.engine is not None:
        weights = EngineWeights(spec, checkpoint.engine, checkpoint.path, checkpoint.open_tensors())
    else:
        weights = CheckpointWeights(_open_weights(source, checkpoint, made_as), family.rules, str(source.model_dir))
    check_claims(spec, weights.infos(), weights.origin)
    return weights


def _open_weights(
    source: ModelSource, checkpoint: Checkpoint, made_as: type[StoredWeights] = StoredWeights
) -> StoredWeights:
    files = TensorFiles(checkpoint.open_tensors())
    quantization = read_quantization(source.config, files.described(source.where))
    return made_as(files, quantization, source.where, source.origin)


def family_of(source: ModelSource) -> Family:
    """The family of the architecture that the configuration names. Raises ``ModelLoadError``."""
    try:
        family: Family = ARCHITECTURES.get(source.architecture)
    except ConfigError as error:
        raise ModelLoadError(f"{source.where}: {error}") from None
    return family
