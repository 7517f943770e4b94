"""``MemoryPlan``: the weights that a checkpoint's model will keep in memory, from the headers of its files alone.

Made by the model backends, for ``scripts/plan_memory.py`` and, at start, for the log. Reads no tensor and allocates
none: the model is built without memory, as it is before it is loaded.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
from backend_engine.core.kv_spec import CacheSpec
from backend_engine.errors import ConfigError
from backend_engine.layers.latent_attention import LatentAttention
from backend_engine.layers.linear import Linear
from backend_engine.layers.moe import SparseMoe
from backend_engine.layers.parts import ModelParts
from backend_engine.model_engine.rank_spec import per_rank, rank_of
from backend_engine.model_engine.weight_source import PlannedRows, WeightSource
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.causal_lm import CausalLM
from backend_engine.ops.dense_products import DenseKind
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.deferred import Deferred
from backend_engine.quantization.quant_method import TensorOptions, WeightedLayer
from backend_engine.quantization.unquantized import Unquantized, packing_works, packs_densely, plain_bytes
from backend_engine.quantization.weight_format import FLOAT_DTYPES
from backend_engine.quantization.weight_scheme import WeightScheme

_META = torch.device("meta")
_EMBEDDINGS, _LAYERS, _HEAD, _ROTARIES = "embed_", "layers.", ("norm.", "lm_head."), "rotaries."


class PlannedWeight(NamedTuple):
    """A tensor, or rows of a packed one. name: in the model. form: its dtype, or the scheme that it stays packed in.
    num_bytes: of the whole; rank_bytes: of what one tensor-parallel rank holds of it.
    """

    name: str
    form: torch.dtype | WeightScheme
    num_bytes: int
    rank_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """``spec``: the model, and as one tensor-parallel rank holds it; ``None`` where what the cache and a step take is
    not known before the model is loaded.
    """

    weights: tuple[PlannedWeight, ...]
    spec: ArchSpec | None = None
    rank_spec: ArchSpec | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...] | None:
        """What each layer keeps in the cache of one rank."""
        return None if self.rank_spec is None else self.rank_spec.cache_specs

    def stages(self, pp: int, setting: str = "pp") -> list[range]:
        """The layers of each of ``pp`` stages, the first ones with one more where they are not all equal. Raises
        ``ConfigError``, which calls the number ``setting``, where there are fewer layers.
        """
        num_layers = 1 if self.spec is None else self.spec.num_layers
        if pp > num_layers:
            raise ConfigError(f"{setting} {pp} is more than the model can be divided into; use {_up_to(num_layers)}")
        size, more = divmod(num_layers, pp)
        starts = [stage * size + min(stage, more) for stage in range(pp + 1)]
        return [range(a, b) for a, b in itertools.pairwise(starts)]

    def stage_bytes(self, pp: int) -> list[int]:
        """Bytes of weights of a rank of each stage: the first has the embeddings, the last the norm and the head."""
        stages = self.stages(pp)
        found = [0] * pp
        for weight in self.weights:
            for stage in stages_of(weight.name, stages):
                found[stage] += weight.rank_bytes
        is_tied = self.spec is not None and self.spec.tie_embeddings
        if pp > 1 and is_tied and not any(weight.name.startswith("lm_head.") for weight in self.weights):
            found[-1] += sum(w.rank_bytes for w in self.weights if w.name.startswith("embed_tokens."))
        return found


def stages_of(name: str, stages: Sequence[range]) -> Sequence[int]:
    """Which of ``stages`` hold the model's tensor ``name``; a head that is tied to the embeddings has none."""
    if len(stages) == 1 or name.startswith(_EMBEDDINGS):
        return [0]
    if name.startswith(_ROTARIES):
        return range(len(stages))
    if name.startswith(_HEAD):
        return [len(stages) - 1]
    assert name.startswith(_LAYERS), f"{name} belongs to no stage"
    layer = int(name.split(".")[1])
    return [next(i for i, layers in enumerate(stages) if layer in layers)]


class HeadersOnly(StoredWeights):
    """Never reads: a bias beside a packed weight counts as one of zeros, which the loader makes sure of."""

    def is_empty_bias(self, name: str) -> bool:
        module = name.removesuffix(".bias")
        return module != name and self.format_of(module + ".weight") is not None


def plan_native(
    spec: ArchSpec, source: WeightSource, options: TensorOptions, tp: int, kind: DenseKind = DenseKind.F32
) -> MemoryPlan:
    """The plan of a model of our own layers, for one of ``tp`` ranks. ``kind``: of plain weights, see ``Unquantized``.

    Raises ``ModelLoadError`` where the files do not hold the model, ``ConfigError`` for a ``tp`` it cannot have.
    """
    rank_spec = rank_of(spec, tp)
    model = outline(spec, options.dtype)
    rows = source.check(model)
    rank_model = model if tp == 1 else outline(rank_spec, options.dtype)
    weights = _Weights(model, rows, options, tp, kind)
    found = [planned for path, module in model.named_modules() for planned in weights.of(path, module, rank_model)]
    return MemoryPlan(tuple(found), spec, rank_spec)


def plan_plain_files(files: TensorFiles, vocab_size: int | None, options: TensorOptions) -> MemoryPlan:
    """The plan of a model of someone else's modules: the files' tensors, floating ones in the dtype. Where one table
    alone has ``vocab_size`` rows the head is tied to it, and a library's packed form of it is a second copy.
    """
    found = []
    for name in files:
        info = files.describe(name)
        is_floating = info.dtype in FLOAT_DTYPES
        size = math.prod(info.shape) * options.dtype.itemsize if is_floating else info.num_bytes
        found.append(PlannedWeight(name, options.dtype if is_floating else torch.uint8, size, size))
    tables = [w for w in found if len(shape := files.describe(w.name).shape) == 2 and shape[0] == vocab_size]
    if len(tables) == 1 and _packs(options):
        found.append(tables[0]._replace(name=f"{tables[0].name} packed"))
    return MemoryPlan(tuple(found))


class _Weights:
    """What the modules of ``model`` will keep. ``rows``: of the parameters that are layers' weights, by name."""

    def __init__(
        self,
        model: CausalLM,
        rows: Mapping[str, list[PlannedRows]],
        options: TensorOptions,
        tp: int,
        kind: DenseKind,
    ) -> None:
        self._model = model
        self._kind = kind
        self._rows = rows
        self._options = options
        self._latent_products = {
            f"{path}.kv_b_proj" for path, module in model.named_modules() if isinstance(module, LatentAttention)
        }
        # Experts that a rank holds, the first ones, by the path of their layer.
        self._num_held = {
            path: per_rank(len(module.experts), tp)
            for path, module in model.named_modules()
            if isinstance(module, SparseMoe)
        }

    def of(self, path: str, module: nn.Module, rank_model: CausalLM) -> Iterator[PlannedWeight]:
        """The tensors of ``module`` itself. ``rank_model``: what one rank holds, module by module."""
        rank_module = rank_model.get_submodule(path)
        prefix = f"{path}." if path else ""
        for planned in self._tensors(prefix, module, rank_module):
            yield planned if self._is_held(path) else planned._replace(rank_bytes=0)

    def _is_held(self, path: str) -> bool:
        layer, is_expert, rest = path.partition(".experts.")
        return not is_expert or int(rest.split(".")[0]) < self._num_held[layer]

    def _tensors(self, prefix: str, module: nn.Module, rank_module: nn.Module) -> Iterator[PlannedWeight]:
        is_layer = isinstance(module, WeightedLayer)
        if isinstance(module, WeightedLayer) and isinstance(rank_module, WeightedLayer):
            yield from self._weight(prefix, module, rank_module)
        for name, tensor in _own_tensors(module).items():
            if not (is_layer and name == "weight"):
                sizes = [t.numel() * t.element_size() for t in (tensor, _own_tensors(rank_module)[name])]
                yield PlannedWeight(prefix + name, tensor.dtype, *sizes)

    def _weight(self, prefix: str, layer: WeightedLayer, rank_layer: WeightedLayer) -> Iterator[PlannedWeight]:
        name, dtype = prefix + "weight", layer.options.dtype
        shapes = (layer.weight_shape, rank_layer.weight_shape)
        plain = [self._plain_bytes(prefix.removesuffix("."), layer, shape) for shape in shapes]
        rows = self._rows.get(name)
        if rows is None:
            assert layer is self._model.lm_head and self._model.spec.tie_embeddings, f"{name} has no source"
            table = self._rows["embed_tokens.weight"]
            if not any(part.scheme for part in table) and _packs(self._options):
                yield PlannedWeight(name, dtype, *plain)
        elif prefix.removesuffix(".") in self._latent_products or not any(part.scheme for part in rows):
            yield PlannedWeight(name, dtype, *plain)
        else:
            for part in rows:
                yield self._packed(name, part, layer, rank_layer)

    def _plain_bytes(self, path: str, layer: WeightedLayer, shape: tuple[int, int]) -> int:
        """Of a weight of ``shape`` of ``layer``: a product's in its packed form, a table as it is."""
        options = layer.options._replace(device=self._options.device)
        is_product = isinstance(layer, Linear) and path not in self._latent_products
        kind = self._kind.for_head if layer is self._model.lm_head else self._kind
        return plain_bytes(shape, options, kind, packs=is_product)

    def _packed(self, name: str, part: PlannedRows, layer: WeightedLayer, rank_layer: WeightedLayer) -> PlannedWeight:
        (_, columns), (_, rank_columns) = layer.weight_shape, rank_layer.weight_shape
        if part.scheme is None:
            row_bytes, fixed = columns * layer.options.dtype.itemsize, 0
        else:
            row_bytes, fixed = _scheme_bytes(part.scheme, columns)
        rank_rows = _rank_rows(part, _sizes(layer), _sizes(rank_layer))
        rank_bytes = -(-rank_rows * row_bytes * rank_columns // columns) + fixed
        return PlannedWeight(name, part.scheme or layer.options.dtype, part.num_rows * row_bytes + fixed, rank_bytes)


def _up_to(count: int) -> str:
    return "1" if count == 1 else f"1 to {count}"


def _scheme_bytes(scheme: WeightScheme, columns: int) -> tuple[int, int]:
    """Bytes of a row, and of what is there once for all rows."""
    row, fixed = 0, 0
    for component in scheme.components(columns).values():
        size = math.prod(component.shape) * component.dtype.itemsize
        row, fixed = (row + size, fixed) if component.per_row else (row, fixed + size)
    return row, fixed


def _rank_rows(part: PlannedRows, sizes: Sequence[int], rank_sizes: Sequence[int]) -> int:
    """How many of the rows a rank holds, given the widths of the fused outputs of the whole and of the rank."""
    found, start = 0, 0
    for size, rank_size in zip(sizes, rank_sizes, strict=True):
        overlap = min(start + size, part.start + part.num_rows) - max(start, part.start)
        if overlap > 0:
            found += -(-overlap * rank_size // size)
        start += size
    return found


def _sizes(layer: WeightedLayer) -> tuple[int, ...]:
    return layer.out_sizes if isinstance(layer, Linear) else layer.weight_shape[:1]


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *vars(module).items())
    return {name: tensor for name, tensor in named if isinstance(tensor, Tensor)}


def outline(spec: ArchSpec, dtype: torch.dtype) -> CausalLM:
    """The model without memory, its weights without a form yet."""
    ops = TorchOps()
    attention = TorchAttention(ops, torch.device("cpu"))
    parts = ModelParts(ops, attention, Deferred(Unquantized(pack=False)), TensorOptions(dtype, _META))
    with torch.inference_mode():
        return CausalLM(spec, parts)


def _packs(options: TensorOptions) -> bool:
    """Whether plain weights of products are packed by a library, see ``Unquantized``."""
    is_candidate = options.device.type == "cpu" and options.dtype == torch.float32
    return is_candidate and (packs_densely(options) or packing_works())
