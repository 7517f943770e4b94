"""Servers, model processes and engines that die under the launcher: it notices, says so, and leaves nothing behind."""

import os
import signal
from pathlib import Path

import pytest
from triton_process import group_members

from tests.support.launched import ECHO, Launched, eventually, is_ready, post, server_on
from tests.support.server import write_model

# Says that its engine is dead when it is asked, as the engine model does.
FAILING = """
import os

class TritonPythonModel:
    def execute(self, requests):
        path = os.environ["ENGINE_HEALTH_FILE"]
        with open(path + ".draft", "w") as file:
            file.write("engine: the engine is stuck: a step has run for more than 17 s\\n")
        os.replace(path + ".draft", path)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([b"x"], object))]) for _ in requests]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    write_model(folder, "echo", ECHO)
    return folder


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
def test_killing_the_server_itself_leaves_nothing_behind(repository: Path, tmp_path: Path) -> None:
    """As those do who end a server by its process name."""
    log = tmp_path / "server.log"
    launched = Launched(repository, tmp_path, "--log-file", str(log), foreground=False)
    lines = launched.read_until("model control key")
    assert launched.process.wait(timeout=30) == 0
    supervisor = int(next(line for line in lines if line.startswith("ready;")).split()[-1])
    server_pid = server_on(launched.http_port)
    os.kill(server_pid, signal.SIGKILL)
    launched.assert_nothing_left(server_pid, timeout_s=20)
    assert eventually(lambda: not Path(f"/proc/{supervisor}").exists())
    assert "error: the server ended by itself with exit code -9: " in log.read_text(), "what nobody sees is in the log"


@pytest.mark.triton
def test_a_server_that_is_asked_to_end_is_no_failure(repository: Path, tmp_path: Path) -> None:
    launched = Launched(repository, tmp_path, "--restart", "3")
    launched.read_until("model control key")
    server_pid = launched.server_pid()
    os.kill(server_pid, signal.SIGTERM)
    assert launched.process.wait(timeout=30) == 0
    assert launched.error_text() == "the server was ended from outside\n"
    launched.assert_nothing_left(server_pid)


@pytest.mark.triton
def test_a_dead_model_process_ends_the_server(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "other", ECHO)
    launched = Launched(repository, tmp_path)
    launched.read_until("model control key")
    server_pid = launched.server_pid()
    launched.kill_stub("other")
    assert launched.process.wait(timeout=20) == 1
    assert launched.error_text() == "error: the process of model 'other' has died\n"
    launched.assert_nothing_left(server_pid)


@pytest.mark.triton
def test_a_dead_model_process_restarts_the_server_as_often_as_allowed(repository: Path, tmp_path: Path) -> None:
    launched = Launched(repository, tmp_path, "--restart", "1")
    launched.read_until("model control key")
    first = launched.server_pid()
    launched.kill_stub("echo")
    assert eventually(lambda: group_members(first) == [])
    assert eventually(lambda: is_ready(launched.http_url, "echo"), seconds=60)
    assert launched.echo() == 200
    second = server_on(launched.http_port)
    assert launched.process.stderr is not None
    told = [launched.process.stderr.readline() for _ in range(2)]
    assert told == [
        "error: the process of model 'echo' has died; starting again (1 of 1)\n", "the server is ready again\n"
    ]  # fmt: skip
    launched.kill_stub("echo")
    assert launched.process.wait(timeout=20) == 1
    assert launched.error_text() == "error: the process of model 'echo' has died\n"
    launched.assert_nothing_left(second)


@pytest.mark.triton
def test_in_explicit_mode_a_dead_model_turns_not_ready_and_the_others_stay(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "other", ECHO)
    launched = Launched(repository, tmp_path, "--model-control-mode", "explicit")
    key = launched.read_key()
    for action in ("unload", "load"):  # what an operator does is no death
        assert post(f"{launched.http_url}/v2/repository/models/other/{action}", {}, key)[0] == 200
    assert eventually(lambda: is_ready(launched.http_url, "other"))
    assert is_ready(launched.http_url, "echo")
    launched.kill_stub("echo")
    assert eventually(lambda: not is_ready(launched.http_url, "echo"), seconds=10)
    assert launched.echo("other") == 200 and launched.process.poll() is None
    assert post(f"{launched.http_url}/v2/repository/models/echo/load", {}, key)[0] == 200
    assert launched.echo() == 200
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(timeout=30) == 0
    assert launched.error_text() == "error: the process of model 'echo' has died; unloaded: echo\n"


@pytest.mark.triton
def test_a_failed_engine_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "engine", FAILING)
    launched = Launched(repository, tmp_path)
    launched.read_until("model control key")
    server_pid = launched.server_pid()
    launched.echo("engine")
    assert launched.process.wait(timeout=20) == 1
    expected = "error: model 'engine' has failed: the engine is stuck: a step has run for more than 17 s\n"
    assert launched.error_text() == expected
    launched.assert_nothing_left(server_pid)


@pytest.mark.triton
def test_in_explicit_mode_a_failed_engine_takes_its_bls_with_it(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "engine", FAILING)
    write_model(repository, "other", ECHO)
    for name, engine in (("bls", "engine"), ("bls_of_another", "other")):
        config = write_model(repository, name, ECHO) / "config.pbtxt"
        parameter = f'parameters {{ key: "tensorrt_llm_model_name" value {{ string_value: "{engine}" }} }}\n'
        config.write_text(config.read_text() + parameter)
    launched = Launched(repository, tmp_path, "--model-control-mode", "explicit")
    launched.read_until("model control key")
    launched.echo("engine")
    assert eventually(lambda: not is_ready(launched.http_url, "engine") and not is_ready(launched.http_url, "bls"))
    assert is_ready(launched.http_url, "other") and is_ready(launched.http_url, "bls_of_another")
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(timeout=30) == 0
    assert launched.error_text().endswith("; unloaded: engine, bls\n")
