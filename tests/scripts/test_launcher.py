"""The launcher against the real server with small models: ready, bound to loopback, restricted, and ended cleanly."""

import json
import os
import queue
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from embedded_server import find_server, prepare_backends
from launch_triton_server import build_parser, host_warning, main, options_from
from triton_process import PortInUseError, check_ports, free_ports
from triton_server import ADMIN_HEADER, GRPC_ADMIN_HEADER, ServerOptions, ServerStartError, TritonServer
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.support.launched import ECHO, SCRIPT, Launched, post, server_on, shared_memory
from tests.support.server import running_server, write_model

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


def text_input(text: str) -> InferInput:
    tensor = InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


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
def test_a_model_that_fails_to_load_gives_one_line(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "broken", BROKEN)
    launched = Launched(repository, tmp_path)
    assert launched.process.wait(timeout=60) == 1
    expected = "error: model 'broken' failed to load: RuntimeError: tokenizer_dir='/nope' has no tokenizer.json\n"
    assert launched.error_text() == expected
    assert list((tmp_path / "cache" / "run").iterdir()) == []
    assert shared_memory(launched.process.pid) == []


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
@pytest.mark.parametrize("arguments", [[], ["--detach"]])
def test_it_returns_when_ready_and_killing_its_supervisor_ends_it(
    repository: Path, tmp_path: Path, arguments: list[str]
) -> None:
    launched = Launched(repository, tmp_path, *arguments, foreground=False)
    lines = launched.read_until("model control key")
    assert launched.process.wait(timeout=30) == 0
    assert launched.error_text() == "", "nobody holds its pipes any more"
    assert launched.echo() == 200
    server_pid = server_on(launched.http_port)
    supervisor = int(next(line for line in lines if line.startswith("ready;")).split()[-1])
    os.kill(supervisor, signal.SIGTERM)
    launched.assert_nothing_left(server_pid, timeout_s=20)


@pytest.mark.triton
def test_a_start_that_fails_is_told_without_foreground_too(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "broken", BROKEN)
    launched = Launched(repository, tmp_path, foreground=False)
    assert launched.process.wait(timeout=60) == 1
    assert launched.error_text().startswith("error: model 'broken' failed to load: RuntimeError: tokenizer_dir")
    assert list((tmp_path / "cache" / "run").iterdir()) == []


@pytest.mark.triton
def test_an_interrupt_before_readiness_ends_the_supervisor_too(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "slow", SLOW)
    launched = Launched(repository, tmp_path, foreground=False)
    launched.read_until("slow: loading")
    server_pid = server_on(launched.http_port)
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(timeout=30) == 0
    launched.assert_nothing_left(server_pid)


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


def test_the_backend_folder_lends_the_engine_models_own_adapter() -> None:
    root = SCRIPT.parents[1]
    lent = root / "backends" / "tensorrtllm" / "model.py"
    assert lent.samefile(root / "model_repository" / "tensorrt_llm" / "1" / "model.py")
    assert lent.is_symlink() and not lent.readlink().is_absolute()


def test_the_backends_of_a_run_are_the_servers_and_ours(tmp_path: Path) -> None:
    backends = prepare_backends(find_server(search_path=str(tmp_path)), tmp_path / "backends")
    assert (backends / "tensorrtllm" / "model.py").is_file()
    library = backends / "python" / "libtriton_python.so"
    assert library.is_file() and not library.is_symlink(), "Triton Server refuses a link for backends made of Python"


def test_host_warning_only_beyond_loopback() -> None:
    assert host_warning("127.0.0.1") == host_warning("localhost") == host_warning("::1") == ""
    assert "everyone who can reach this machine" in host_warning("0.0.0.0")


def test_flags_of_older_launchers_are_accepted(tmp_path: Path) -> None:
    flags = (
        "--world_size=1 --force --no-mpi --multi-model --log --oversubscribe --disable-spawn-processes "
        "--trtllm_llmapi_launch --exit_timeout 5 --tensorrt_llm_model_name a,b "
        "--multimodal_gpu0_cuda_mem_pool_bytes 64 --grpc_port 9001 --detach -f"
    )
    arguments = build_parser().parse_args([*flags.split(), "--model_repo", str(tmp_path)])
    options = options_from(arguments)
    assert (options.grpc_port, options.http_port, options.exit_timeout_s, options.log_verbose) == (9001, 8000, 5, 3)
    assert options.extra_arguments == ("--cuda-memory-pool-byte-size=0:64",)
    assert options.log_path == Path("triton_log.txt").absolute()


@pytest.mark.parametrize(
    "arguments", [["--world_size", "2"], ["--http_port", "0"], ["--http_port", "70000"], ["--restart", "-1"]]
)
def test_flags_with_bad_values_are_refused(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--model_repo", str(tmp_path), *arguments])
    assert exit_info.value.code == 2
    assert arguments[1] in capsys.readouterr().err
