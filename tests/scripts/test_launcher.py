"""The launcher against the real server with small models: ready, bound to loopback, restricted, and ended cleanly."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from launch_triton_server import build_parser, host_warning, main, options_from
from triton_process import PortInUseError, check_ports, group_members
from triton_server import ADMIN_HEADER, GRPC_ADMIN_HEADER, ServerOptions, ServerStartError, TritonServer
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.support.server import free_ports, running_server, write_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_triton_server.py"
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in inputs]
"""
# Streams ticks until the drain file appears, then ends the stream and says so, as the engine model does.
TICKER = """
import os, threading, time

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.tick, args=(request.get_response_sender(),)).start()
        return None

    def tick(self, sender):
        drain = os.environ["ENGINE_DRAIN_FILE"]
        while not os.path.exists(drain):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([b"tick"], object))]))
            time.sleep(0.05)
        last = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([b"last"], object))])
        sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        open(drain + ".done", "w").close()
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("tokenizer_dir='/nope' has no tokenizer.json")

    def execute(self, requests):
        return []
"""
SLOW = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(120)

    def execute(self, requests):
        return []
"""


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("inflight_", "triton_python"))}


def text_input(text: str) -> InferInput:
    tensor = InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def post(url: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers or {})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Launched:
    """The launcher as a process of its own, on free ports, its output read line by line."""

    def __init__(self, repository: Path, scratch: Path, *arguments: str) -> None:
        self.http_port, self.grpc_port, metrics_port = free_ports()
        self.cache = scratch / "cache"
        ports = ["--http_port", str(self.http_port), "--grpc_port", str(self.grpc_port)]
        ports += ["--metrics_port", str(metrics_port)]
        self.shared_memory_before = shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--model_repo", str(repository), *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"INFLIGHT_CACHE": str(self.cache)},
        )

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
        assert shared_memory() - self.shared_memory_before == set()
        assert list((self.cache / "run").iterdir()) == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    write_model(folder, "echo", ECHO)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", ECHO)
    with running_server(folder, model_control_mode="explicit", options={"drain_timeout_s": 0.0}) as started:
        yield started


@pytest.mark.triton
def test_ready_server_answers_and_reports_its_models(server: TritonServer) -> None:
    assert server.model_states == {"echo": "loaded"}
    status, body = post(f"{server.http_url}/v2/models/echo/generate", {"IN": "hello"})
    assert (status, json.loads(body)["OUT"]) == (200, "hello")
    with urllib.request.urlopen(server.metrics_url, timeout=10) as reply:
        assert b"nv_inference_request_success" in reply.read()


@pytest.mark.triton
def test_every_port_listens_on_loopback_only(server: TritonServer) -> None:
    options = server.options
    ports = {options.http_port, options.grpc_port, options.metrics_port}
    listening: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, port = local.split(":")
            if state == "0A" and int(port, 16) in ports:
                listening.setdefault(int(port, 16), set()).add(address)
    # 127.0.0.1, as the kernel writes it, for an IPv4 socket and for an IPv6 one bound to a mapped address.
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening.keys() == ports
    assert all(addresses <= loopback for addresses in listening.values()), listening


@pytest.mark.triton
def test_control_and_shared_memory_need_the_key_over_http(server: TritonServer) -> None:
    region = {"key": "/mine", "offset": 0, "byte_size": 8}
    for path, body in (
        ("repository/index", {}),
        ("repository/models/echo/unload", {}),
        ("repository/models/echo/load", {}),
        ("systemsharedmemory/region/mine/register", region),
    ):
        for headers in ({}, {ADMIN_HEADER: "wrong"}):
            assert post(f"{server.http_url}/v2/{path}", body, headers)[0] == 403, (path, headers)
    status, body_text = post(f"{server.http_url}/v2/repository/index", {}, {ADMIN_HEADER: server.admin_key})
    assert (status, json.loads(body_text)[0]["state"]) == (200, "READY")


@pytest.mark.triton
def test_unload_and_load_with_the_key_over_grpc(server: TritonServer) -> None:
    with InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("echo")
        headers = {GRPC_ADMIN_HEADER: server.admin_key}
        client.unload_model("echo", headers=headers)
        deadline = time.monotonic() + 20
        while client.is_model_ready("echo") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not client.is_model_ready("echo")
        client.load_model("echo", headers=headers)
        assert client.is_model_ready("echo")


@pytest.mark.triton
def test_sigterm_ends_a_running_stream_with_a_final_response(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "ticker", TICKER, decoupled=True)
    launched = Launched(repository, tmp_path)
    launched.read_until("model control key")
    server_pid = launched.server_pid()
    replies: queue.Queue[tuple[bytes, bool]] = queue.Queue()

    def take(result: object, error: InferenceServerException | None) -> None:
        if error is not None:
            return  # the server is gone, after the final response
        final = result.get_response().parameters["triton_final_response"].bool_param  # type: ignore[attr-defined]
        replies.put((result.as_numpy("OUT")[0], final))  # type: ignore[attr-defined]

    with InferenceServerClient(f"127.0.0.1:{launched.grpc_port}") as client:
        client.start_stream(take)
        client.async_stream_infer("ticker", [text_input("go")])
        assert replies.get(timeout=30) == (b"tick", False)
        started = time.monotonic()
        launched.process.send_signal(signal.SIGTERM)
        last = replies.get(timeout=10)
        while not last[1]:
            last = replies.get(timeout=10)
        assert last == (b"last", True)
        exit_code = launched.process.wait(timeout=30)
        took = time.monotonic() - started
        client.stop_stream()
    assert (exit_code, launched.error_text()) == (0, "")
    assert took < 10
    launched.assert_nothing_left(server_pid)


@pytest.mark.triton
def test_interrupt_while_loading_ends_at_once(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "slow", SLOW)
    launched = Launched(repository, tmp_path)
    launched.read_until("slow: loading")
    server_pid = launched.server_pid()
    started = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(timeout=30) == 0
    assert time.monotonic() - started < 5
    launched.assert_nothing_left(server_pid)


@pytest.mark.triton
def test_a_killed_launcher_leaves_nothing_behind(repository: Path, tmp_path: Path) -> None:
    launched = Launched(repository, tmp_path)
    launched.read_until("model control key")
    server_pid = launched.server_pid()
    launched.process.kill()
    launched.process.wait(timeout=10)
    launched.assert_nothing_left(server_pid, timeout_s=20)


@pytest.mark.triton
def test_a_server_that_dies_is_told(repository: Path, tmp_path: Path) -> None:
    launched = Launched(repository, tmp_path)
    launched.read_until("model control key")
    server_pid = launched.server_pid()
    os.kill(server_pid, signal.SIGKILL)
    assert launched.process.wait(timeout=20) == 1
    assert launched.error_text().startswith("error: the server ended by itself with exit code -9: ")
    launched.assert_nothing_left(server_pid)


@pytest.mark.triton
def test_a_model_that_fails_to_load_gives_one_line(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "broken", BROKEN)
    launched = Launched(repository, tmp_path)
    assert launched.process.wait(timeout=60) == 1
    expected = "error: model 'broken' failed to load: RuntimeError: tokenizer_dir='/nope' has no tokenizer.json\n"
    assert launched.error_text() == expected
    assert list((tmp_path / "cache" / "run").iterdir()) == []
    assert shared_memory() - launched.shared_memory_before == set()


@pytest.mark.triton
def test_a_model_folder_without_a_valid_config_gives_one_line(repository: Path, tmp_path: Path) -> None:
    (repository / "echo" / "config.pbtxt").write_text('nome: "echo"\n')
    launched = Launched(repository, tmp_path)
    assert launched.process.wait(timeout=60) == 1
    error = launched.error_text()
    assert error.startswith("error: ")
    assert "echo" in error
    assert error.count("\n") == 1


@pytest.mark.triton
def test_detach_returns_when_ready_and_kill_ends_it(repository: Path, tmp_path: Path) -> None:
    launched = Launched(repository, tmp_path, "--detach")
    lines = launched.read_until("model control key")
    assert launched.process.wait(timeout=30) == 0
    status, _ = post(f"http://127.0.0.1:{launched.http_port}/v2/models/echo/generate", {"IN": "x"})
    assert status == 200
    launcher_pid = int(next(line for line in lines if line.startswith("ready;")).split()[-1])
    os.kill(launcher_pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while list((tmp_path / "cache" / "run").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list((tmp_path / "cache" / "run").iterdir()) == []
    assert shared_memory() - launched.shared_memory_before == set()


def test_a_taken_port_is_named_with_its_flag(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = TritonServer(ServerOptions(repository, metrics_port=port, http_port=free_ports(1)[0]))
        with pytest.raises(PortInUseError, match=f"^port {port} on 127.0.0.1 is in use; choose another with"):
            check_ports("127.0.0.1", [("--metrics_port", port)])
        with pytest.raises(PortInUseError):
            server.start()
    assert server.stop() == 0


def test_one_port_for_two_uses_is_refused() -> None:
    with pytest.raises(PortInUseError, match="--http_port and --grpc_port are both 1234"):
        check_ports("127.0.0.1", [("--http_port", 1234), ("--grpc_port", 1234)])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PortInUseError, match=r"cannot listen on 192\.0\.2\.1:\d+ \(--http_port\)"):
        check_ports("192.0.2.1", [("--http_port", free_ports(1)[0])])


def test_a_repository_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="is not a folder"):
        TritonServer(ServerOptions(tmp_path / "missing")).start()


def test_host_warning_only_beyond_loopback() -> None:
    assert host_warning("127.0.0.1") == host_warning("localhost") == host_warning("::1") == ""
    assert "everyone who can reach this machine" in host_warning("0.0.0.0")


def test_flags_of_older_launchers_are_accepted(tmp_path: Path) -> None:
    flags = (
        "--world_size=1 --force --no-mpi --multi-model --log --oversubscribe --disable-spawn-processes "
        "--trtllm_llmapi_launch --exit_timeout 5 --tensorrt_llm_model_name a,b "
        "--multimodal_gpu0_cuda_mem_pool_bytes 64 --grpc_port 9001"
    )
    arguments = build_parser().parse_args([*flags.split(), "--model_repo", str(tmp_path)])
    options = options_from(arguments)
    assert (options.grpc_port, options.http_port, options.exit_timeout_s, options.log_verbose) == (9001, 8000, 5, 3)
    assert options.extra_arguments == ("--cuda-memory-pool-byte-size=0:64",)
    assert options.log_path == Path("triton_log.txt").absolute()


@pytest.mark.parametrize("arguments", [["--world_size", "2"], ["--http_port", "0"], ["--http_port", "70000"]])
def test_flags_with_bad_values_are_refused(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--model_repo", str(tmp_path), *arguments])
    assert exit_info.value.code == 2
    assert arguments[1] in capsys.readouterr().err
