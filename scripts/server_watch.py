"""Watches a ready Triton Server and acts when it, one of its models' processes or an engine dies.

The launcher and ``serve.py`` call ``watch`` and stay in it until the end. Triton Server itself notices neither: it
keeps saying that such a model is ready. In explicit model control the dead model is unloaded, so that readiness tells
the truth; otherwise the server is ended, or started again as often as allowed.
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any, NamedTuple

from embedded_server import ServerNotFoundError
from triton_process import PortInUseError, is_alive
from triton_server import ADMIN_HEADER, ServerStartError, TritonServer

START_ERRORS = (ServerNotFoundError, PortInUseError, ServerStartError)
POLL_S = 0.2
RESTART_PAUSE_S = 1.0
_RESCAN_S = 2.0
_ENGINE_KEY, _DEFAULT_ENGINE = "tensorrt_llm_model_name", "tensorrt_llm"
_REPLY_TIMEOUT_S = 5.0


class Failure(NamedTuple):
    """Something died. ``model`` is empty when it is the server itself, which then ended with ``exit_code``."""

    model: str
    reason: str
    exit_code: int | None = None
    is_process_gone: bool = False


class ServerWatch:
    """``look`` says what has died since the last look; ``unload`` makes readiness tell so."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._known = server.model_processes()
        self._next_scan = time.monotonic() + _RESCAN_S

    def look(self) -> Failure | None:
        """Return the first thing that is found dead, None when all is well."""
        exit_code = self._server.poll()
        if exit_code is not None:
            reason = f"the server ended by itself with exit code {exit_code}: {self._server.last_error()}"
            return Failure("", reason, exit_code)
        return self._reported() or self._dead_process()

    def _reported(self) -> Failure | None:
        """What an engine model says about its engine. Read once: the model may be loaded again."""
        path = self._server.health_file
        try:
            model, _, reason = path.read_text().strip().partition(": ")
        except FileNotFoundError:
            return None
        path.unlink()
        return Failure(model, f"model {model!r} has failed: {reason}")

    def _dead_process(self) -> Failure | None:
        gone = {model for pid, model in self._known.items() if not is_alive(pid, self._server.pid)}
        if not gone and time.monotonic() < self._next_scan:
            return None
        self._next_scan = time.monotonic() + _RESCAN_S
        self._known = self._server.model_processes()
        alive = Counter(self._known.values())
        for model in sorted(gone):
            if self._is_ready(model) and alive[model] < self._num_instances(model):
                return Failure(model, f"the process of model {model!r} has died", is_process_gone=True)
        return None

    def _is_ready(self, model: str) -> bool:
        """Whether the model is meant to be there: an unload that was asked for is no death."""
        index = self._call("repository/index") or []
        return any(entry["name"] == model and entry.get("state") == "READY" for entry in index)

    def _num_instances(self, model: str) -> int:
        config = self._call(f"models/{model}/config", is_post=False) or {}
        groups = config.get("instance_group", [])
        return sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)

    def unload(self, model: str) -> list[str]:
        """Unload ``model`` and the BLS models that call it (Triton sees to its ensembles); return their names."""
        names = [model, *(name for name in self._server.model_states if name != model and self._calls(name, model))]
        for name in names:
            self._call(f"repository/models/{name}/unload")
        return names

    def _calls(self, name: str, model: str) -> bool:
        parameters = (self._call(f"models/{name}/config", is_post=False) or {}).get("parameters", {})
        if _ENGINE_KEY not in parameters:
            return False
        engine = parameters[_ENGINE_KEY].get("string_value", "")
        return model in (_DEFAULT_ENGINE if not engine or engine.startswith("${") else engine, "preprocessing")

    def _call(self, path: str, *, is_post: bool = True) -> Any:
        """Ask the server; None when it has no answer (such as a model that is not loaded)."""
        headers = {ADMIN_HEADER: self._server.admin_key}
        request = urllib.request.Request(f"{self._server.http_url}/v2/{path}", b"{}" if is_post else None, headers)
        try:
            with urllib.request.urlopen(request, timeout=_REPLY_TIMEOUT_S) as reply:
                body = reply.read()
        except (urllib.error.URLError, OSError):
            return None
        return json.loads(body) if body else None


def watch(server: TritonServer, stop: threading.Event, restarts: int = 0) -> int:
    """Stay with a ready ``server`` until ``stop`` is set or it is over, end it, and return the shell's exit code.

    0 after a requested end (also of the server process by SIGTERM), 1 after a failure; ``restarts`` failures are
    answered by starting the server again. Each failure is one line on standard error.
    """
    watcher = ServerWatch(server)
    left = restarts
    while not stop.wait(POLL_S):
        failure = watcher.look()
        if failure is None:
            continue
        if failure.exit_code == 0:
            print("the server was ended from outside", file=sys.stderr, flush=True)
            break
        if failure.model and server.options.model_control_mode == "explicit":
            unloaded = ", ".join(watcher.unload(failure.model))
            print(f"error: {failure.reason}; unloaded: {unloaded}", file=sys.stderr, flush=True)
            continue
        if not left:
            print(f"error: {failure.reason}", file=sys.stderr, flush=True)
            server.stop(at_once=failure.is_process_gone)
            return 1
        left -= 1
        note = f"starting again ({restarts - left} of {restarts})"
        print(f"error: {failure.reason}; {note}", file=sys.stderr, flush=True)
        server.stop(at_once=True, keep_run_dir=True)
        try:
            if stop.wait(RESTART_PAUSE_S) or not _restart(server, stop):
                break
        except START_ERRORS as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            server.stop()
            return 1
        watcher = ServerWatch(server)
    server.stop()
    return 0


def _restart(server: TritonServer, stop: threading.Event) -> bool:
    server.restart()
    if not server.wait_ready(cancel=stop):
        return False
    print("the server is ready again", file=sys.stderr, flush=True)
    return True
