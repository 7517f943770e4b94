"""``ModelBackend``: whose modules a model is made of, ours or transformers'. ``LoadedModel``: what either gives.

``model_loader.py`` chooses one by name or by architecture. One backend a file.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from backend_engine.attention.interface import AttentionBackend
from backend_engine.checkpoint.loader import Progress
from backend_engine.config.model_facts import ModelFacts
from backend_engine.models.model_source import ModelSource
from backend_engine.models.model_traits import ModelTraits
from backend_engine.quantization.quant_method import TensorOptions


class LoadOptions(NamedTuple):
    """How a model is loaded. attention_backend: a name or ``auto``. max_windows: upper bounds of the layers' sliding
    windows, repeated over the layers.
    """

    tensors: TensorOptions
    attention_backend: str = "auto"
    max_windows: tuple[int, ...] = ()
    progress: Progress | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model with weights, the attention backend that its layers call, and what was odd about the checkpoint.

    ``model(inputs, caches)`` gives float32 logits ``[num_logits, vocab_size]`` for ``ModelInputs`` and the pool.
    """

    model: nn.Module
    traits: ModelTraits
    attention: AttentionBackend
    options: TensorOptions
    warnings: tuple[str, ...] = ()


class ModelBackend(ABC):
    """Holds nothing. Every fault of a folder is a one-line ``ModelLoadError``."""

    @abstractmethod
    def nearest(self, architecture: str) -> str | None:
        """The architecture it runs whose name is nearest to ``architecture``, itself if it is one; ``None`` when none
        looks like it.
        """

    @abstractmethod
    def describe(self, source: ModelSource) -> ModelFacts:
        """What is known of the model before it is loaded."""

    @abstractmethod
    def load(self, source: ModelSource, options: LoadOptions) -> LoadedModel:
        """Build the model that config.json describes and fill it from the folder's safetensors files.

        Raises ``ConfigError`` for an attention backend that cannot serve the model.
        """


def nan_warning(tensor: str, source: ModelSource) -> str:
    """What is said about a tensor of the checkpoint that holds NaN."""
    return f"tensor {tensor} of {source.model_dir} holds NaN: what the model says will not be of use"
