"""Choosing the attention backend: by name, or the preferred one that can serve every layer.

Called once, while a model is built. Looks backends up in the registry and never tries one out.
"""

from collections.abc import Sequence

import torch

from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.errors import ConfigError
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.plugins.catalog import ATTENTION_BACKENDS


def select_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    ops: type[TorchOps] = TorchOps,
) -> type[AttentionBackend]:
    """Return the class called ``name``, or for ``"auto"`` the best that supports all ``specs`` and, where ``ops`` write
    keys and values in a way of their own, writes them by these.

    Raises ``ConfigError`` with every candidate's reasons when none can serve the layers.
    """
    names = ATTENTION_BACKENDS.names() if name == "auto" else [name]
    candidates: list[type[AttentionBackend]] = sorted(
        (ATTENTION_BACKENDS.get(candidate) for candidate in names), key=lambda backend: -backend.preference
    )
    refusals = []
    for backend in candidates:
        if name == "auto" and ops.append_kv is not TorchOps.append_kv and not backend.appends_by_ops:
            continue
        reasons = sorted({reason for spec in specs for reason in backend.unsupported(spec, dtype, device)})
        if not reasons:
            return backend
        refusals.append(f"{backend.name}: {', '.join(reasons)}")
    raise ConfigError(f"no attention backend can serve this model ({'; '.join(refusals)})")
