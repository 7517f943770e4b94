"""``Checkpoint``: a model on disk as the rest of the engine sees it, whatever format it is in.

Made by ``open_checkpoint.py``. Every format is translated to Hugging Face's terms at its border: its config.json and
its names of tensors are what the families read. Data only; opening the tensors waits until somebody asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.config.engine_manifest import EngineManifest


@dataclass(frozen=True)
class Checkpoint:
    """path: the folder or file. kind: ``hugging_face``, ``gguf``, ``nemo``, ``megatron`` or ``engine``. config:
    config.json, or what stands for it. generation: generation_config.json, ``None`` without one. open_tensors: the
    readers of its files, each tensor in one of them. origin: in what its config was found, for messages. engine: what
    an engine folder says of itself, ``None`` for every other kind. is_verified: whether nobody has to compare checksums
    any more, see ``engine_folder.verifying``.
    """

    path: Path
    kind: str
    config: Mapping[str, Any]
    open_tensors: Callable[[], list[TensorReader]]
    generation: Mapping[str, Any] | None = None
    origin: str = "config.json"
    engine: EngineManifest | None = None
    is_verified: bool = True
