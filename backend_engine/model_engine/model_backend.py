"""``ModelBackend``: whose modules a model is made of, ours or transformers'. ``LoadedModel``: what either gives.

``model_loader.py`` chooses one by name or by architecture. One backend a file.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from backend_engine.attention.interface import AttentionBackend
from backend_engine.attention.paged_kv import KvScales
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.loader import Progress
from backend_engine.config.model_facts import ModelFacts
from backend_engine.model_engine.memory_plan import MemoryPlan
from backend_engine.models.model_source import ModelSource
from backend_engine.models.model_traits import ModelTraits
from backend_engine.ops.dense_products import DenseKind
from backend_engine.quantization.quant_method import TensorOptions


class Implementations(NamedTuple):
    """What a model computes with, by name in the registries. attention_backend: a name or ``auto``.
    weight_only_precision: see ``EngineArgs``.
    """

    attention_backend: str = "auto"
    operators: str = "torch"
    weight_only_precision: str = "auto"

    @property
    def weight_kind(self) -> DenseKind:
        """Of plain weights, on a CPU in float32."""
        return DenseKind.of(self.weight_only_precision)


class LoadOptions(NamedTuple):
    """How a model is loaded. max_windows: upper bounds of the layers' sliding
    windows, repeated over the layers. plain_weights: every weight is a plain tensor of the layer, decoded where the
    checkpoint packs it and in no library's form, so that it can be read and changed.
    """

    tensors: TensorOptions
    implementations: Implementations = Implementations()
    max_windows: tuple[int, ...] = ()
    progress: Progress | None = None
    plain_weights: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model with weights, the attention backend that its layers call, and what was odd about the checkpoint.

    ``model(inputs, caches)`` gives float32 logits ``[num_logits, vocab_size]`` for ``ModelInputs`` and the caches.
    kv_scales: what the checkpoint brings for an fp8 KV cache, by the number of the layer; 1.0 where it brings none.
    """

    model: nn.Module
    traits: ModelTraits
    attention: AttentionBackend
    options: TensorOptions
    warnings: tuple[str, ...] = ()
    kv_scales: Mapping[int, KvScales] = field(default_factory=dict)


class ModelBackend(ABC):
    """Holds nothing. Every fault of a folder is a one-line ``ModelLoadError``."""

    @abstractmethod
    def nearest(self, architecture: str) -> str | None:
        """The architecture it runs whose name is nearest to ``architecture``, itself if it is one; ``None`` when none
        looks like it.
        """

    @abstractmethod
    def describe(self, source: ModelSource, checkpoint: Checkpoint) -> ModelFacts:
        """What is known of the model before it is loaded."""

    @abstractmethod
    def plan(
        self, source: ModelSource, checkpoint: Checkpoint, tensors: TensorOptions, tp: int, kind: DenseKind
    ) -> MemoryPlan | None:
        """The memory that the model would take, of one of ``tp`` ranks, from the files' headers; ``None`` where only
        loading tells. kind: of plain weights. Raises ``ConfigError`` for a ``tp`` that the model cannot have.
        """

    @abstractmethod
    def load(self, source: ModelSource, checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
        """Build the model that ``source`` describes and fill it from the checkpoint's tensors.

        Raises ``ConfigError`` for an attention backend that cannot serve the model.
        """


def nan_warning(tensor: str, source: ModelSource) -> str:
    """What is said about a tensor of the checkpoint that holds NaN."""
    return f"tensor {tensor} of {source.model_dir} holds NaN: what the model says will not be of use"
