"""Feed-forward layers that every token goes through: gated and plain."""

from dataclasses import dataclass

from torch import Tensor, nn

from backend_engine.layers.activations import Activation, multiplies_up
from backend_engine.layers.linear import Linear
from backend_engine.layers.parts import ModelParts
from backend_engine.layers.smoothing import Rows, Smoothing


@dataclass(frozen=True)
class GatedMlpDecl:
    """``down(act(gate(x)) * up(x))`` of inner width ``size``."""

    size: int
    act: Activation
    bias: bool = False


@dataclass(frozen=True)
class PlainMlpDecl:
    """``down(act(up(x)))`` of inner width ``size``."""

    size: int
    act: Activation
    bias: bool = False


class GatedMlp(nn.Module):
    """See ``GatedMlpDecl``; gate and up are one product."""

    def __init__(self, decl: GatedMlpDecl, hidden_size: int, parts: ModelParts) -> None:
        super().__init__()
        size, quant, options = decl.size, parts.quant, parts.options
        self.gate_up_proj = Linear(hidden_size, (size, size), quant, options, decl.bias)
        self.down_proj = Linear(size, (hidden_size,), quant, options, decl.bias)
        self._act = decl.act
        self._ops = parts.ops

    def readers(self) -> tuple[Linear, ...]:
        """The products that read the layer's input."""
        return (self.gate_up_proj,)

    def smoothable(self) -> list[Smoothing]:
        """See ``Smoothing``; those within the layer."""
        if not multiplies_up(self._act):
            return []
        gate_size, up_size = self.gate_up_proj.out_sizes
        return [Smoothing(Rows(self.gate_up_proj, gate_size, up_size), (self.down_proj,))]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._act(self._ops, self.gate_up_proj(x)))
        return out


class PlainMlp(nn.Module):
    """See ``PlainMlpDecl``."""

    def __init__(self, decl: PlainMlpDecl, hidden_size: int, parts: ModelParts) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, (decl.size,), parts.quant, parts.options, decl.bias)
        self.down_proj = Linear(decl.size, (hidden_size,), parts.quant, parts.options, decl.bias)
        self._act = decl.act
        self._ops = parts.ops

    def readers(self) -> tuple[Linear, ...]:
        """The products that read the layer's input."""
        return (self.up_proj,)

    def smoothable(self) -> list[Smoothing]:
        """None: the activation is between the two products."""
        return []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._act(self._ops, self.up_proj(x)))
        return out
