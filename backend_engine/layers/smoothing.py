"""``Smoothing``: where a layer's products could be handed smaller or larger inputs without another result.

Declared by layers and blocks; ``post_training/smoothing.py`` makes use of it. Names no model and changes nothing.
"""

from dataclasses import dataclass

from torch import nn

from backend_engine.layers.linear import Linear


@dataclass(frozen=True)
class Rows:
    """Outputs ``start`` to ``start + num_rows`` of a product."""

    layer: Linear
    start: int
    num_rows: int


@dataclass(frozen=True)
class Smoothing:
    """What ``producer`` gives, channel by channel, is read by ``consumers`` and by nothing else, and whatever is
    between them is linear in each channel. So it may be divided by factors which the consumers' columns are multiplied
    with. producer: rows of a product, or a module whose ``weight`` (and ``bias``) are its last step.
    """

    producer: nn.Module | Rows
    consumers: tuple[Linear, ...]
