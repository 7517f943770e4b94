"""``TritonServer``: starts a Triton Server on a filled model repository, waits until it is ready, ends it cleanly.

``launch_triton_server.py``, ``serve.py`` and the tests use it. It binds to loopback unless told otherwise, restricts
the control APIs to a key, and at the end lets the engine finish its streams before the server goes. It never
touches model files.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from embedded_server import ServerInstallation, find_server, prepare_backends, server_environment
from paths import default_log_path, make_run_dir
from repository_check import needs_completion
from server_log import ModelEvent, ServerLog
from triton_process import ProcessGuard, check_ports, group_members, kill_group, remove_shared_memory, stub_model

from backend_engine.ops.native_library import NativeLibraryError, compile_ahead

ADMIN_HEADER = "inflight-admin-key"
GRPC_ADMIN_HEADER = f"triton-grpc-protocol-{ADMIN_HEADER}"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RESTRICTED_APIS = "model-repository,shared-memory"
_POLL_S = 0.05


class ServerStartError(Exception):
    """The server did not come up; the message is one line with the cause."""


@dataclass(frozen=True)
class ServerOptions:
    """How to start a server.

    ``run_dir`` belongs to this run alone: it is made when missing and removed at the end with all it holds; None
    makes one. ``drain_timeout_s`` bounds the wait for running streams to end, ``exit_timeout_s`` the whole of
    ``stop``. An empty ``admin_key`` makes a random one. ``environment`` is added to this process's own.
    """

    model_repository: Path
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str = "127.0.0.1"
    model_control_mode: str = "none"
    tritonserver: Path | None = None
    run_dir: Path | None = None
    log_path: Path | None = None
    log_verbose: int = 0
    drain_timeout_s: float = 4.0
    exit_timeout_s: int = 9
    admin_key: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_arguments: tuple[str, ...] = ()


def compile_operators(tell: Callable[[], None] = lambda: None) -> None:
    """Before a server waits for a model that does it. ``tell`` is called when there is something to compile. What
    stands in the way, the engine tells and does without.
    """
    if os.environ.get("ENGINE_OPS") != "torch":
        with contextlib.suppress(NativeLibraryError, OSError, RuntimeError):
            compile_ahead(tell)


class TritonServer:
    """One server process. ``start``, ``wait_ready``, ``stop``; or ``with`` for start, wait and stop together.

    Not thread-safe; ``stop`` may be called more than once and after a failed start.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.admin_key = options.admin_key or secrets.token_hex(16)
        self.shm_prefix = f"inflight_{os.getpid()}_{secrets.token_hex(4)}_"
        self.model_states: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: ProcessGuard | None = None
        self._run_dir: Path | None = None
        self._log: ServerLog | None = None
        self._is_up = False
        self._is_stopped = False

    @property
    def run_dir(self) -> Path:
        """The directory of this run, with its drain file and backend links."""
        assert self._run_dir is not None, "run_dir asked for before start()"
        return self._run_dir

    @property
    def log_path(self) -> Path:
        """Where the server's and the models' output goes."""
        return self.options.log_path or default_log_path(self.options.http_port)

    @property
    def drain_file(self) -> Path:
        """The file whose appearance asks the engine to end its streams; it answers with ``<name>.done``."""
        return self.run_dir / "drain"

    @property
    def health_file(self) -> Path:
        """The file in which an engine model says that its engine is dead, as ``<model>: <reason>``."""
        return self.run_dir / "health"

    @property
    def pid(self) -> int:
        """Process id of the server, and id of its process group."""
        assert self._process is not None, "pid asked for before start()"
        return self._process.pid

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP API."""
        return f"http://{self._client_address()}:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        """``address:port`` of the gRPC API, as tritonclient takes it."""
        return f"{self._client_address()}:{self.options.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus page."""
        return f"http://{self._client_address()}:{self.options.metrics_port}/metrics"

    def start(self) -> None:
        """Check ports and repository, then start the process.

        Raises ``PortInUseError``, ``ServerNotFoundError`` or ``ServerStartError``; nothing is left behind then.
        """
        assert self._process is None, f"server {self._process and self._process.pid} was started already"
        options = self.options
        if not options.model_repository.is_dir():
            raise ServerStartError(f"model repository {str(options.model_repository)!r} is not a folder")
        check_ports(options.host, self._ports())
        installation = find_server(options.tritonserver)
        self._run_dir = options.run_dir or make_run_dir()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        compile_operators()
        self._launch(installation)

    def restart(self) -> None:
        """End the process at once and start it again, with the same ports, key, log and files; then ``wait_ready``.

        Raises what ``start`` raises.
        """
        self.stop(at_once=True, keep_run_dir=True)
        for left in (self.health_file, self.drain_file, self._drained_file):
            left.unlink(missing_ok=True)
        self._is_up = self._is_stopped = False
        self.model_states.clear()
        check_ports(self.options.host, self._ports())
        self._launch(find_server(self.options.tritonserver))

    def _launch(self, installation: ServerInstallation) -> None:
        options, run_dir = self.options, self.run_dir
        environment = server_environment(installation, os.environ | dict(options.environment))
        environment["ENGINE_DRAIN_FILE"] = str(self.drain_file)
        environment["ENGINE_HEALTH_FILE"] = str(self.health_file)
        log_start = self.log_path.stat().st_size
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(installation),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._guard = ProcessGuard(self._process.pid, self.shm_prefix, run_dir, self.drain_file)
        self._log = ServerLog(self.log_path, log_start)

    def command(self, installation: ServerInstallation) -> list[str]:
        """Return the server's command line; links its backends into the run directory."""
        options = self.options
        backends = prepare_backends(installation, self.run_dir / "backends")
        control_key = f"{_RESTRICTED_APIS}:{ADMIN_HEADER}={self.admin_key}"
        command = [
            str(installation.binary),
            f"--model-repository={options.model_repository}",
            f"--backend-directory={backends}",
            *([] if needs_completion(options.model_repository) else ["--disable-auto-complete-config"]),
            # --http-address alone leaves the other two on every interface.
            *(f"--{api}-address={options.host}" for api in ("http", "grpc", "metrics")),
            *(f"{flag.replace('_', '-')}={port}" for flag, port in self._ports()),
            f"--http-restricted-api={control_key}",
            f"--grpc-restricted-protocol={control_key}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            # Half a minute by default, which a busy machine may need to start Python and import torch.
            "--backend-config=python,stub-timeout-seconds=180",
            f"--model-control-mode={options.model_control_mode}",
            # A client that keeps an idle gRPC stream open holds the server up to here.
            f"--exit-timeout-secs={max(1, options.exit_timeout_s - int(options.drain_timeout_s))}",
        ]
        if options.model_control_mode == "explicit":
            command.append("--load-model=*")
        if options.log_verbose:
            command.append(f"--log-verbose={options.log_verbose}")
        return [*command, *options.extra_arguments]

    def wait_ready(
        self,
        timeout_s: float = 900.0,
        on_event: Callable[[ModelEvent], None] = lambda event: None,
        cancel: threading.Event | None = None,
    ) -> bool:
        """Return True once every model is ready, False when ``cancel`` was set first (the server is stopped then).

        ``on_event`` hears each model's change of state. Raises ``ServerStartError`` as soon as a model fails to load
        or the process ends, with the log line that says why, or after ``timeout_s`` naming the models that are not
        up; the server is stopped then too.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self._is_ready(on_event):
                if cancel is not None and cancel.is_set():
                    self.stop()
                    return False
                if time.monotonic() > deadline:
                    late = [name for name, state in self.model_states.items() if state != "loaded"]
                    raise ServerStartError(
                        f"not ready after {timeout_s:.0f} s; still loading: {', '.join(late) or 'none'}"
                    )
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        self._is_up = True
        return True

    def _is_ready(self, on_event: Callable[[ModelEvent], None]) -> bool:
        exit_code = self.poll()
        failed = self._read_events(on_event)
        if failed or exit_code is not None:
            assert self._log is not None, "wait_ready() called before start()"
            raise ServerStartError(self._log.relevant_error())
        return "loading" not in self.model_states.values() and self._answers_ready()

    def _read_events(self, on_event: Callable[[ModelEvent], None]) -> bool:
        assert self._log is not None, "wait_ready() called before start()"
        failed = False
        for event in self._log.poll():
            self.model_states[event.model] = event.state
            failed = failed or event.state == "failed"
            on_event(event)
        return failed

    def _answers_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def poll(self) -> int | None:
        """Return the exit code of the server process, None while it runs."""
        assert self._process is not None, "poll() called before start()"
        return self._process.poll()

    def last_error(self) -> str:
        """Return the log line that says best what went wrong (after an unexpected end)."""
        assert self._log is not None, "last_error() called before start()"
        self._log.poll()
        return self._log.relevant_error()

    def stop(self, *, at_once: bool = False, keep_run_dir: bool = False) -> int:
        """End the server within ten seconds and remove what it leaves; return its exit code (0 when never started).

        Streams get the chance to end with a final response first, then SIGTERM, then the whole group is killed; with
        ``at_once`` it is killed without more ado.
        """
        if self._process is None:
            return 0
        if not self._is_stopped:
            self._is_stopped = True
            self._end(at_once)
        if not keep_run_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)
        return self._process.returncode

    def _end(self, at_once: bool) -> None:
        assert self._process is not None, "nothing to end before start()"
        deadline = time.monotonic() + self.options.exit_timeout_s
        if self._is_up and self.poll() is None and not at_once:
            self._drain()
            self._process.terminate()
            # A server that is still loading models would hear SIGTERM only afterwards, so that one is killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        kill_group(self._process.pid)
        self._process.wait()
        remove_shared_memory(self.shm_prefix)
        if self._guard is not None:
            self._guard.release()

    @property
    def _drained_file(self) -> Path:
        return self.drain_file.with_name(f"{self.drain_file.name}.done")

    def _drain(self) -> None:
        done = self._drained_file
        self.drain_file.touch()
        deadline = time.monotonic() + self.options.drain_timeout_s
        while not done.exists() and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """Return the ids of the server and of its model processes that are alive."""
        return group_members(self.pid)

    def model_processes(self) -> dict[int, str]:
        """Return the Python backend's processes that are alive, as process id to name of the model."""
        found = {pid: stub_model(pid) for pid in self.processes()}
        return {pid: model for pid, model in found.items() if model is not None}

    def _ports(self) -> tuple[tuple[str, int], ...]:
        options = self.options
        return (
            ("--http_port", options.http_port),
            ("--grpc_port", options.grpc_port),
            ("--metrics_port", options.metrics_port),
        )

    def _client_address(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)
        return f"[{host}]" if ":" in host else host

    def __enter__(self) -> "TritonServer":
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
