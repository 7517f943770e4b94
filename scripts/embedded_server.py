"""Finds a Triton Server to start and says how: its binary, backend directory and environment.

The launcher calls it. A ``tritonserver`` on PATH is used as it is; otherwise the one inside the
``nvidia-pytriton`` wheel is given what it lacks (a backend directory, library paths, the stub of the
running Python). This module starts nothing and writes only into the directory it is handed.
"""

import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paths import REPOSITORY_ROOT

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class ServerNotFoundError(Exception):
    """No usable Triton Server; the message is one line that says what to install."""


@dataclass(frozen=True)
class ServerInstallation:
    """A server that can be started: ``binary`` and where its backends lie.

    The embedded one, inside the wheel, has a ``stub`` and needs ``library_dirs``.
    """

    binary: Path
    backends: Path
    stub: Path | None
    library_dirs: tuple[Path, ...]


def find_server(explicit: Path | None = None, search_path: str | None = None) -> ServerInstallation:
    """Return the server to start: ``explicit``, else ``tritonserver`` on ``search_path``, else the embedded one.

    Raises ``ServerNotFoundError`` when ``explicit`` is no executable file or nothing is found.
    """
    if explicit is not None:
        if not (explicit.is_file() and os.access(explicit, os.X_OK)):
            raise ServerNotFoundError(f"--tritonserver {str(explicit)!r} is not an executable file")
        return _system_server(explicit)
    on_path = shutil.which("tritonserver", path=search_path)
    return _system_server(Path(on_path)) if on_path else _embedded_server()


def _system_server(binary: Path) -> ServerInstallation:
    return ServerInstallation(binary.resolve(), binary.resolve().parents[1] / "backends", None, ())


def _embedded_server() -> ServerInstallation:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerNotFoundError("no Triton Server found: no 'tritonserver' on PATH and no nvidia-pytriton package; "
                                  "run scripts/setup.sh")  # fmt: skip
    package = Path(spec.origin).parent
    server = package / "tritonserver"
    stub = server / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerNotFoundError(f"nvidia-pytriton in {package} has no stub for Python {_PYTHON}; use 3.11 or 3.12")
    libraries = (package.parent / "nvidia_pytriton.libs", libpython_dir())
    return ServerInstallation(server / "bin" / "tritonserver", server / "backends", stub, libraries)


def libpython_dir() -> Path:
    """Return the directory of the running Python's shared library, which the stub links to.

    Raises ``ServerNotFoundError`` naming the missing file and the Debian package that has it.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    for variable in ("LIBDIR", "LIBPL"):
        directory = Path(str(sysconfig.get_config_var(variable) or "/nonexistent"))
        for candidate in (directory, directory / str(sysconfig.get_config_var("MULTIARCH") or "")):
            if (candidate / name).exists():
                return candidate
    try:
        ctypes.CDLL(name)
    except OSError:
        raise ServerNotFoundError(
            f"{name} is missing, which the Triton Python backend needs; install the package libpython{_PYTHON} "
            f"(apt-get install libpython{_PYTHON}) or use a Python built with --enable-shared"
        ) from None
    return Path("/usr/lib")  # the loader's own search found it, so any existing directory will do


def prepare_backends(installation: ServerInstallation, target: Path) -> Path:
    """Fill ``target`` with links to the backends the server needs, ours in ``backends/`` included, and return it."""
    target.mkdir(parents=True, exist_ok=True)
    for source in (installation.backends, REPOSITORY_ROOT / "backends"):
        if not source.is_dir():
            continue
        for backend in sorted(entry for entry in source.iterdir() if entry.is_dir()):
            if backend.name == "python" and installation.stub is not None:
                _link_python_backend(backend, installation.stub, target / "python")
            else:
                _link(backend, target / backend.name)
    return target


def _link_python_backend(source: Path, stub: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    # A copy and no link: Triton Server refuses a library from outside for backends that are made of Python.
    shutil.copy2(source / "libtriton_python.so", target / "libtriton_python.so")
    for item in (source / "triton_python_backend_utils.py", stub):
        _link(item, target / item.name)


def _link(source: Path, link: Path) -> None:
    if link.is_symlink():
        link.unlink()
    link.symlink_to(source)


def server_environment(installation: ServerInstallation, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to start the server with, made from ``base``.

    The virtual environment comes first on PATH, because the stub finds its packages through it, and the
    repository root comes first on PYTHONPATH, so that the models can import ``backend_engine``. Unless told otherwise
    OpenMP's threads sleep while they wait: server, model processes and clients share the cores with the engine, and
    threads that spin at every barrier would keep the very threads from running that they wait for.
    """
    environment = dict(base)
    environment["PATH"] = _prepend(str(Path(sys.prefix) / "bin"), base.get("PATH", ""))
    environment["PYTHONPATH"] = _prepend(str(REPOSITORY_ROOT), base.get("PYTHONPATH", ""))
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if installation.library_dirs:
        libraries = os.pathsep.join(str(directory) for directory in installation.library_dirs)
        environment["LD_LIBRARY_PATH"] = _prepend(libraries, base.get("LD_LIBRARY_PATH", ""))
    return environment


def _prepend(first: str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first


if __name__ == "__main__":
    # setup.sh asks this with the Python it is about to use, before it downloads anything.
    try:
        print(libpython_dir())
    except ServerNotFoundError as error:
        sys.exit(f"error: {error}")
