"""Starts the real product server for tests, on free ports, and ends it again.

``running_server`` is what end-to-end tests use; ``write_model`` makes small Python-backend models for tests of the
launcher itself. Everything goes through ``TritonServer``, as it does for users.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from render_repository import render_repository
from triton_process import PortInUseError, free_ports
from triton_server import ServerOptions, TritonServer

_PORT_ATTEMPTS = 3


@contextlib.contextmanager
def running_server(
    repository: Path | None = None,
    *,
    model_dir: Path | None = None,
    settings: Mapping[str, str] | None = None,
    model_control_mode: str = "none",
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> Iterator[TritonServer]:
    """A ready server on free ports; stopped when the block ends.

    Serves ``repository`` as it is, or the five product models rendered for ``model_dir`` with ``settings`` (what
    ``--set`` takes). ``environment`` is added to the server's. ``options`` replaces any other ``ServerOptions``
    field. The server has ``http_url``, ``grpc_url``, ``metrics_url``, ``admin_key``, ``pid``, ``log_path`` (kept until
    the block ends), ``processes()``, ``stop()`` and the rest of ``TritonServer``.
    """
    assert (repository is None) != (model_dir is None), "give either a repository or a model_dir"
    with tempfile.TemporaryDirectory(prefix="inflight-test-") as scratch:
        if repository is None:
            repository = Path(scratch) / "repository"
            render_repository(repository, settings or {}, model_dir)
        base = ServerOptions(
            model_repository=repository,
            model_control_mode=model_control_mode,
            run_dir=Path(scratch) / "run",
            log_path=Path(scratch) / "server.log",
            environment={"OMP_NUM_THREADS": "1", **(environment or {})},
        )
        server = _start(replace(base, **dict(options or {})))
        try:
            server.wait_ready(timeout_s=240)
            yield server
        finally:
            server.stop()


def _start(options: ServerOptions) -> TritonServer:
    """Start on free ports; another process may take one between the look and the start, so look again then."""
    for attempt in range(_PORT_ATTEMPTS):
        http_port, grpc_port, metrics_port = free_ports()
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        server = TritonServer(replace(options, **ports))
        try:
            server.start()
        except PortInUseError:
            if attempt == _PORT_ATTEMPTS - 1:
                raise
            continue
        return server
    raise AssertionError("unreachable: the last attempt returns or raises")


def write_model(repository: Path, name: str, code: str, *, decoupled: bool = False) -> Path:
    """Write a Python-backend model with one STRING input IN and one STRING output OUT; return its folder.

    ``code`` is the body of model.py; ``pb_utils`` and ``numpy`` as ``np`` are imported for it.
    """
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        f"""name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}
input [{{ name: "IN" data_type: TYPE_STRING dims: [1] }}]
output [{{ name: "OUT" data_type: TYPE_STRING dims: [1] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
    )
    head = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"
    (folder / "1" / "model.py").write_text(head + code)
    return folder
