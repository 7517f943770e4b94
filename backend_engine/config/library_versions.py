"""The versions of the programs that an engine folder was written with, and how they differ from those here.

Told and logged; nothing in a folder depends on them.
"""

import importlib.metadata
import platform

import backend_engine
from backend_engine.config.engine_manifest import EngineManifest

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def library_versions() -> dict[str, str]:
    """By name: of Inflight, Python and the libraries that weights and tokenizers go through."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"inflight": backend_engine.__version__, "python": platform.python_version(), **libraries}


def differences(manifest: EngineManifest) -> list[str]:
    """One line for each program whose version is not the one that wrote the folder."""
    here = library_versions()
    return [
        f"built with {name} {version}, here is {here.get(name, 'none')}; weights are read as they are, what a library "
        "packs its own way is packed anew"
        for name, version in manifest.versions.items()
        if here.get(name) != version
    ]
