"""The processes of one Triton Server: its group, its shared-memory regions, its ports, and a guard that cleans up.

``launch_triton_server`` calls it. It knows nothing of models or of the server's API.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

_SHM_DIR = Path("/dev/shm")
_STUB = "triton_python_backend_stub"
_INSTANCE = re.compile(r"(?P<model>[^/]+)_\d+_\w*\d+")  # such as tensorrt_llm_0_0; no path, no shared-memory region

# Runs beside the server and reads a pipe that the launcher holds. "done" means the launcher has cleaned up;
# end of file without it means the launcher died, so the server is ended and its leavings are removed here.
_GUARD_SCRIPT = """
read -r line
[ "$line" = done ] && exit 0
: > "$4"
sleep 2
kill -TERM -"$1"
for _ in 1 2 3 4 5; do kill -0 -"$1" || break; sleep 1; done
kill -KILL -"$1"
rm -f -- /dev/shm/"$2"*
rm -rf -- "$3"
"""


class PortInUseError(Exception):
    """A port that the server needs is taken; the message is one line that names it and its flag."""


def free_ports(count: int = 3) -> list[int]:
    """Return ``count`` different TCP ports of loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def check_ports(host: str, ports: Iterable[tuple[str, int]]) -> None:
    """Raise ``PortInUseError`` unless every ``(flag, port)`` is free on ``host`` and none is asked for twice."""
    seen: dict[int, str] = {}
    for flag, port in ports:
        if port in seen:
            raise PortInUseError(f"{seen[port]} and {flag} are both {port}; give each its own port")
        seen[port] = flag
        _check_port(host, flag, port)


def _check_port(host: str, flag: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"port {port} on {host} is in use; choose another with {flag}") from None
            raise PortInUseError(f"cannot listen on {host}:{port} ({flag}): {error.strerror or error}") from None


def group_members(group: int) -> list[int]:
    """Return the ids of the live (not zombie) processes of process group ``group``."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if is_alive(pid, group)]


def is_alive(pid: int, group: int) -> bool:
    """Say whether ``pid`` is a live (not zombie) process of process group ``group``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The command in parentheses may hold blanks, so fields count from the last parenthesis.
    state, _parent, process_group = stat.rpartition(")")[2].split()[:3]
    return int(process_group) == group and state not in "ZX"


def stub_model(pid: int) -> str | None:
    """Return the model that ``pid`` runs for Triton Server's Python backend, None when it is no such process."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if Path(arguments[0]).name != _STUB or len(arguments) < 2:
        return None
    path = Path(arguments[1])
    if path.parent.name.isdigit():  # <repository>/<model>/<version>/model.py
        return path.parent.parent.name
    # The model.py of a backend folder serves several models: what tells them apart is the instance's name.
    instance = next((match for match in map(_INSTANCE.fullmatch, arguments[2:]) if match), None)
    return instance["model"] if instance else None


def kill_group(group: int, timeout_s: float = 2.0) -> None:
    """Kill every process of ``group`` and wait until none is left, ``timeout_s`` at most."""
    deadline = time.monotonic() + timeout_s
    while group_members(group) and time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def remove_shared_memory(prefix: str) -> list[str]:
    """Remove the ``/dev/shm`` regions whose names start with ``prefix``; return their names."""
    assert prefix, "an empty prefix would remove every region of the machine"
    regions = sorted(_SHM_DIR.glob(f"{prefix}*"))
    for region in regions:
        region.unlink(missing_ok=True)
    return [region.name for region in regions]


class ProcessGuard:
    """A small shell that ends the server's group and removes its leavings if this process dies without doing so."""

    def __init__(self, group: int, shm_prefix: str, run_dir: Path, drain_file: Path) -> None:
        shell = shutil.which("sh") or "/bin/sh"
        self._process = subprocess.Popen(
            [shell, "-c", _GUARD_SCRIPT, "guard", str(group), shm_prefix, str(run_dir), str(drain_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Tell the guard that everything is cleaned up, and wait for its end."""
        try:
            self._process.communicate(b"done\n", timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
