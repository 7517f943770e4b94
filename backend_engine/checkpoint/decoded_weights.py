"""``decoded_weights``: a checkpoint's tensors as plain floating point ones, for modules that know no other form.

Used for transformers' modules only; our own layers keep packed weights as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from backend_engine.checkpoint.kv_scales import find_kv_scales
from backend_engine.checkpoint.stored_weights import StoredWeights
from backend_engine.errors import ModelLoadError
from backend_engine.models.weight_rules import LoadTarget, Rename


def decoded_weights(
    stored: StoredWeights, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, packed ones decoded to ``dtype``. ``shapes``: of the model's parameters, by the
    names that the checkpoint has for them. Raises ``ModelLoadError`` for a packed weight that the model does not name.
    """
    found: dict[str, Tensor] = {}
    used = {name for names in find_kv_scales(stored.files).values() for name in names}
    for name, shape in shapes.items():
        packing = stored.format_of(name)
        if packing is None:
            continue
        target = LoadTarget(torch.empty(shape, device="meta"), shape[:1])
        (copy,) = Rename(name, name).copies(name, {}, {name: target})
        stored.check(copy)
        used.update(stored.tensors_of(copy))
        found[name] = packing.scheme.decode(stored.unpack(copy, stored.read(copy))).to(dtype)
    for name in stored.files:
        if name in used:
            continue
        tensor = stored.files.read(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelLoadError(
                f"{stored.files.file_of(name)}: tensor {name} is packed ({stored.files.describe(name).dtype}), and the "
                "model of transformers has no weight of that name; only architectures with a family file run it"
            )
        found[name] = tensor
    return found
