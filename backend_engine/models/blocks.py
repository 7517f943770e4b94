"""Orders of operations within a transformer layer, one class each; ``ArchSpec.block`` names one.

Built and run by ``CausalLM``. A block takes the residual stream and the not yet added output of the sublayer
before it, so that the sum and the norm after it can be one operation.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.layers.attention_layer import AttentionLayer
from backend_engine.layers.mlp import GatedMlp
from backend_engine.layers.norm import RMSNorm
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import QuantMethod, TensorOptions


@dataclass(frozen=True)
class ModelParts:
    """What a model is built with: the injected maths, attention and weight scheme, and where tensors live."""

    ops: TorchOps
    attention: AttentionBackend
    quant: QuantMethod
    options: TensorOptions


class PreNormBlock(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, spec: ArchSpec, attention: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        ops, quant, options = parts.ops, parts.quant, parts.options
        biases = (spec.attention.qkv_bias, spec.attention.out_bias)
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm.eps, ops, options)
        self.attention = AttentionLayer(attention, spec.hidden_size, biases, ops, parts.attention, quant, options)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm.eps, ops, options)
        self.mlp = GatedMlp(spec.hidden_size, spec.mlp.size, spec.mlp.bias, ops, quant, options)

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``x``: the previous sublayer's output, ``residual``: the stream before it (``None`` in the first layer)."""
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, rope, kv), residual)
        return self.mlp(x), residual


BLOCKS = {"pre_norm": PreNormBlock}
