"""The launcher as a process of its own, for tests of the launcher and of what it does when something dies."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from triton_process import free_ports, group_members, stub_model
from triton_server import ADMIN_HEADER

from tests.support import waiting
from tests.support.native_cache import with_native_library

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_triton_server.py"

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in inputs]
"""


def shared_memory(launcher_pid: int) -> list[str]:
    """Regions of the server that this launcher started; other servers of this machine have theirs."""
    return [path.name for path in Path("/dev/shm").glob(f"inflight_{launcher_pid}_*")]


def post(url: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers or {})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_ready(http_url: str, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"{http_url}/v2/models/{model}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def server_on(http_port: int) -> int:
    """The server on ``http_port``, as those find it who look for a process of its name."""
    for entry in Path("/proc").iterdir():
        try:
            name, command = (entry / "comm").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if name == "tritonserver\n" and f"--http-port={http_port}\0".encode() in command:
            return int(entry.name)
    raise AssertionError(f"no tritonserver on port {http_port}")


def eventually(check: Callable[[], bool], seconds: float = 20.0) -> bool:
    return waiting.eventually(check, seconds, pause_s=0.1)


class Launched:
    """The launcher as a process of its own, on free ports, its output read line by line."""

    def __init__(self, repository: Path, scratch: Path, *arguments: str, foreground: bool = True) -> None:
        self.http_port, self.grpc_port, metrics_port = free_ports()
        self.cache = scratch / "cache"
        ports = ["--http_port", str(self.http_port), "--grpc_port", str(self.grpc_port)]
        ports += ["--metrics_port", str(metrics_port)]
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                "--model_repo",
                str(repository),
                *ports,
                *arguments,
                *(["--foreground"] if foreground else []),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"INFLIGHT_CACHE": str(with_native_library(self.cache)), "OMP_NUM_THREADS": "1"},
        )

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def read_key(self) -> dict[str, str]:
        """Wait until the server is ready; return the header that allows model control."""
        return {ADMIN_HEADER: self.read_until("model control key")[-1].split()[-1]}

    def echo(self, model: str = "echo") -> int:
        """Status of a request."""
        return post(f"{self.http_url}/v2/models/{model}/generate", {"IN": "x"})[0]

    def kill_stub(self, model: str) -> None:
        """Kill the process of ``model``, and only that of this server."""
        pids = [pid for pid in group_members(server_on(self.http_port)) if stub_model(pid) == model]
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)

    def read_until(self, word: str) -> list[str]:
        """Lines of standard output up to the first that contains ``word``."""
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if word in line:
                return lines
        raise AssertionError(f"the output ended without {word!r}: {lines}, {self.error_text()}")

    def error_text(self) -> str:
        stream: IO[str] | None = self.process.stderr
        assert stream is not None
        return stream.read()

    def server_pid(self) -> int:
        """The server process: the child of the launcher that leads its own group and is no shell."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
        return next(pid for pid, name in names.items() if name == "tritonserver")

    def assert_nothing_left(self, server_pid: int, timeout_s: float = 0.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and (group_members(server_pid) or list((self.cache / "run").iterdir())):
            time.sleep(0.1)
        assert group_members(server_pid) == []
        assert shared_memory(self.process.pid) == []
        assert list((self.cache / "run").iterdir()) == []

    def close(self) -> None:
        """End the launcher whatever it is doing."""
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
