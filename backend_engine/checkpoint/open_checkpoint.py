"""``open_checkpoint``: a model on disk, whatever format it is in.

Called by whoever is given a model's path. Looks at names only; each format's own module reads it, imported when needed.
"""

import os
from pathlib import Path

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import CONFIG_FILE
from backend_engine.config.engine_files import is_engine_folder
from backend_engine.config.gguf_metadata import find_gguf
from backend_engine.plugins.catalog import CHECKPOINT_FORMATS, CHECKPOINT_SIGNS

HUGGING_FACE_WEIGHTS = "*.safetensors"
_NEMO, _GGUF = ".nemo", ".gguf"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read what the checkpoint says of itself. Raises ``ModelLoadError`` (one line: file, and what was expected)."""
    found = Path(path)
    kind = kind_of(found)
    if kind == "gguf":
        found = find_gguf(found) or found
    checkpoint: Checkpoint = CHECKPOINT_FORMATS.get(kind)(found)
    return checkpoint


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether anything lies there that says what model it is; a folder of a tokenizer alone does not."""
    found = Path(path)
    return found.is_file() or (found / CONFIG_FILE).exists() or kind_of(found) != "hugging_face"


def kind_of(path: Path) -> str:
    """The format by names of files, a key of ``CHECKPOINT_FORMATS``: Hugging Face's when none speaks for another."""
    if path.is_file():
        return {_NEMO: "nemo", _GGUF: "gguf"}.get(path.suffix, "hugging_face")
    if is_engine_folder(path):
        return "engine"
    if not path.is_dir() or (path / CONFIG_FILE).exists():
        return "hugging_face"
    if any(path.glob("*" + _GGUF)):
        return "gguf"
    if not any(path.iterdir()) or any(path.glob(HUGGING_FACE_WEIGHTS)):
        return "hugging_face"
    return next((kind for kind in CHECKPOINT_SIGNS.names() if CHECKPOINT_SIGNS.get(kind)(path)), "hugging_face")
