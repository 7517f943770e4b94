"""``check_claims``: whether a checkpoint can hold the model that its configuration describes, before it is built.

Called by ``native_backend.py``. Compares sizes alone, so that no value of a config.json makes millions of modules; what
exactly is missing, the loader tells. Builds and reads nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence

from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.latent_attention import LatentAttentionDecl
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.layers.mlp import GatedMlpDecl, PlainMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.models.arch_spec import ArchSpec, MixerDecl, MlpDecl

_BITS = {"BOOL": 8, "I64": 64, "F64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32}
_BITS_OF_OTHERS = 16


def check_claims(spec: ArchSpec, tensors: Sequence[TensorInfo], origin: str) -> None:
    """``tensors``: all that the files hold. ``origin``: what the configuration was found in.

    Raises ``ModelLoadError`` for a model of more weights than they have bits, or more layers than tensors.
    """
    if spec.num_layers > len(tensors):
        raise ModelLoadError(
            f"{origin}: num_hidden_layers is {spec.num_layers}, but the checkpoint holds {len(tensors)} tensors; "
            "expected at least one for each layer"
        )
    num_bits = sum(math.prod(info.shape) * _BITS.get(info.dtype, _BITS_OF_OTHERS) for info in tensors)
    claimed = num_weights(spec)
    if claimed > num_bits:
        raise ModelLoadError(
            f"{origin}: its sizes (hidden_size {spec.hidden_size}, vocab_size {spec.vocab_size}, "
            f"num_hidden_layers {spec.num_layers}, widths of heads, layers and experts) make a model of {claimed} "
            f"weights, but the files of the checkpoint hold {num_bits} bits; expected sizes that they can hold"
        )


def num_weights(spec: ArchSpec) -> int:
    """Weights of the model, without its smaller ones (biases, norms and the like) and without the head."""
    found = spec.vocab_size * spec.hidden_size + (spec.learned_positions or 0) * spec.hidden_size
    for layer, count in Counter(spec.layers).items():
        found += count * (_mixer(layer.mixer, spec.hidden_size) + _mlp(layer.mlp, spec.hidden_size))
    return found


def _mixer(decl: MixerDecl, hidden_size: int) -> int:
    if isinstance(decl, AttentionDecl):
        return 2 * hidden_size * decl.head_dim * (decl.num_heads + decl.num_kv_heads)
    if isinstance(decl, LatentAttentionDecl):
        queries = decl.num_heads * (decl.nope_dim + decl.rope_dim)
        made = decl.q_rank * (hidden_size + queries) if decl.q_rank else hidden_size * queries
        keys = hidden_size * (decl.kv_rank + decl.rope_dim)
        return (
            made
            + keys
            + decl.num_heads * (decl.kv_rank * (decl.nope_dim + decl.value_dim) + decl.value_dim * hidden_size)
        )
    assert isinstance(decl, Mamba2Decl), decl
    return 2 * hidden_size * decl.inner_size + decl.conv_size * (hidden_size + decl.conv_kernel)


def _mlp(decl: MlpDecl | None, hidden_size: int) -> int:
    if decl is None:
        return 0
    if isinstance(decl, MoeDecl):
        return hidden_size * (decl.routing.num_experts * (3 * decl.size + 1) + 3 * decl.shared_size)
    assert isinstance(decl, GatedMlpDecl | PlainMlpDecl), decl
    return (3 if isinstance(decl, GatedMlpDecl) else 2) * hidden_size * decl.size
