"""``open_engine``: an engine folder, which ``builder/`` wrote, as a ``Checkpoint``.

Called by ``open_checkpoint.py``. Checks every file but those of weights, whose checksums are compared while somebody
loads them (``verifying``). Reads no tensor and runs no code of the folder.
"""

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import CONFIG_FILE, architecture, open_hf_folder
from backend_engine.config.engine_files import (
    WEIGHTS_SUFFIX,
    check_listed,
    check_small_files,
    check_weight_files,
    weight_names,
)
from backend_engine.config.engine_manifest import ENGINE_FILE, EngineManifest, read_manifest
from backend_engine.errors import ModelLoadError
from backend_engine.plugins.catalog import TENSOR_READERS

if TYPE_CHECKING:  # readers need torch, which whoever only reads configurations does without
    from backend_engine.checkpoint.tensor_reader import TensorReader


def open_engine(path: Path) -> Checkpoint:
    """The folder's configuration and manifest. A tensor of ``open_tensors`` may lie in the files of several ranks.

    Raises ``ModelLoadError`` (one line) for a file that is missing, changed or not listed, and for a config.json of
    another architecture than engine.json states.
    """
    manifest = read_manifest(path)
    check_listed(path, manifest)
    check_small_files(path, manifest)
    checkpoint = open_hf_folder(path)
    found = architecture(checkpoint.config, str(path / CONFIG_FILE))
    if found != manifest.architecture:
        raise ModelLoadError(
            f"{path / CONFIG_FILE}: architectures is {found}; expected {manifest.architecture}, as {ENGINE_FILE} says"
        )
    return dataclasses.replace(
        checkpoint,
        kind="engine",
        open_tensors=lambda: _open_readers(path, manifest),
        engine=manifest,
        is_verified=False,
    )


@contextmanager
def verifying(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The checkpoint, to be read while the checksums of its weights, if it has any, are compared in the background;
    what is made of it counts only behind the end. There ``ModelLoadError`` is raised for a wrong one, and instead of
    another that a damaged file led to.
    """
    manifest = checkpoint.engine
    if checkpoint.is_verified or manifest is None:
        yield checkpoint
        return
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        check = pool.submit(check_weight_files, checkpoint.path, manifest, stop=stop)
        try:
            yield dataclasses.replace(checkpoint, is_verified=True)
        except ModelLoadError:
            check.result()
            raise
        except BaseException:
            stop.set()
            raise
        check.result()


def _open_readers(path: Path, manifest: EngineManifest) -> "list[TensorReader]":
    names = weight_names(manifest)
    if not names:
        raise ModelLoadError(f"{path / ENGINE_FILE} lists no file of weights; expected names that end in .safetensors")
    return [TENSOR_READERS.get(WEIGHTS_SUFFIX)(path / name) for name in names]
