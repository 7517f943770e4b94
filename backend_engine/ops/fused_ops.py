"""Recorded operations that one after another say the same as one: fewer results are written and read.

Called once, when the layers have been recorded. What comes out has the same bits. Knows no model.
"""

import ctypes

from backend_engine.ops.dense_products import PANEL_ROWS, DenseOp, NativeWeight
from backend_engine.ops.native_ops import ActivationOp
from backend_engine.ops.native_runtime import Recording


def fuse(recording: Recording) -> None:
    """Gate in a product of integers what an activation right behind it would gate: the wide result, that of a prompt
    larger than the cache, is then never written.

    Nobody but the activation may read the product's result. A layer that keeps it is found out by the trial that
    follows on recording.
    """
    fused: list[ctypes.Structure] = []
    for op in recording.ops:
        gating = _gating(recording, fused[-1], op) if fused else None
        if gating is None:
            fused.append(op)
        else:
            fused[-1] = gating
    recording.replace(fused)


def _gating(recording: Recording, product: ctypes.Structure, activation: ctypes.Structure) -> DenseOp | None:
    """A product that does what ``activation`` does, too; ``None`` where the two are not such a pair."""
    if not (isinstance(product, DenseOp) and isinstance(activation, ActivationOp) and activation.gated):
        return None
    weight = NativeWeight.from_address(product.weight)
    if not weight.is_integer or weight.rows % (2 * PANEL_ROWS) or weight.rows != 2 * activation.width:
        return None
    if (activation.x, activation.x_stride) != (product.out, product.out_stride):
        return None
    # What the product reads must not be where the activation's result goes, as it may be once it has been read.
    if any(recording.same_memory(address, activation.out) for address in (product.x, product.rounded)):
        return None
    op = DenseOp.from_buffer_copy(product)
    op.out, op.out_stride, op.gated = activation.out, activation.width, ctypes.addressof(activation)
    return op
