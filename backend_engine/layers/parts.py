"""``ModelParts``: what every layer is built with. ``LayerStep``: what every layer is run with.

Made by the model loader and by the model's forward pass; layers keep the first and never the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata
from backend_engine.attention.paged_kv import PagedKv
from backend_engine.layers.state_plan import StatePlan
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import QuantMethod, TensorOptions

# Keys and values for a layer that stores something for every token, the pool's tensors for a recurrent state.
LayerCache = PagedKv | tuple[Tensor, ...]


@dataclass(frozen=True)
class ModelParts:
    """The injected maths, attention and weight scheme, and where tensors live. head_quant: the scheme of the projection
    to the vocabulary, ``None`` = that of all others.
    """

    ops: TorchOps
    attention: AttentionBackend
    quant: QuantMethod
    options: TensorOptions
    head_quant: QuantMethod | None = None


class LayerStep(NamedTuple):
    """One step as a layer sees it.

    ropes: cosine and sine of the step's tokens, one pair for each rotary scheme of the model, as ``Ops.apply_rope``
    takes them. caches: the pool, layer by layer. metadata: rows and block tables. states: where recurrent states are
    read and written, ``None`` for a model without any.
    """

    ropes: tuple[tuple[Tensor, Tensor], ...]
    caches: Sequence[LayerCache]
    metadata: AttentionMetadata
    states: StatePlan | None
