"""``EngineHealth``: what the outside hears of an engine that is dead."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from backend_engine.errors import ShutdownError
from backend_engine.triton_io.health import EngineHealth
from backend_engine.triton_io.server_process import allows_unloading, honour_python_path
from tests.support.waiting import eventually

REASON = "the engine is stuck: a step\nhas run for more than 17 s"


class Refused(Exception):
    """Stands in for Triton Server's own exception."""


class Server:
    """Triton Server as the model sees it; in mode ``none`` it refuses to unload."""

    TritonModelException = Refused

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.unloaded: list[str] = []

    def unload_model(self, name: str) -> None:
        self.unloaded.append(name)
        if self.refuses:
            raise Refused("polling is on")


class Engine:
    """Stands in for ``LLM``."""

    def __init__(self) -> None:
        self.failure = ""
        self.is_shut_down = False
        self.asked = 0

    def stats(self) -> SimpleNamespace:
        self.asked += 1
        if self.is_shut_down:
            raise ShutdownError("the engine has been shut down")
        return SimpleNamespace(failure=self.failure)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend_engine.triton_io.health.PERIOD_S", 0.01)


def has_ended() -> bool:
    return not any(thread.name == "engine-health" for thread in threading.enumerate())


@pytest.mark.parametrize("refuses", [False, True])
def test_a_dead_engine_is_written_down_and_unloaded_once(tmp_path: Path, refuses: bool) -> None:
    server, engine, path = Server(refuses), Engine(), tmp_path / "health"
    EngineHealth(server, "tensorrt_llm", engine.stats, str(path), may_unload=True).start()
    assert eventually(lambda: engine.asked > 2)
    assert server.unloaded == [] and not path.exists()
    engine.failure = REASON
    assert eventually(has_ended)
    assert server.unloaded == ["tensorrt_llm"]
    assert path.read_text() == "tensorrt_llm: the engine is stuck: a step has run for more than 17 s\n"
    assert list(tmp_path.iterdir()) == [path], "no draft stays"


def test_a_server_that_does_not_let_itself_be_told_is_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, engine, path = Server(), Engine(), tmp_path / "health"
    engine.failure = REASON
    EngineHealth(server, "tensorrt_llm", engine.stats, str(path), may_unload=False).start()
    assert eventually(has_ended)
    assert server.unloaded == [] and path.exists()
    assert "stays loaded though its engine is dead" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["tritonserver", "--model-control-mode=explicit"], True),
        (["tritonserver", "--model-control-mode", "explicit", "--log-verbose=1"], True),
        (["tritonserver", "--model-control-mode=none", "--model-control-mode=explicit"], True),
        (["tritonserver", "--model-control-mode", "poll"], False),
        (["tritonserver", "--model-control-mode"], False),
        (["tritonserver", "--model-repository=explicit"], False),
        (["python"], False),
    ],
)
def test_the_servers_command_line_says_whether_models_can_be_unloaded(
    arguments: list[str], allowed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "cmdline"
    path.write_bytes(b"".join(argument.encode() + b"\0" for argument in arguments))
    assert allows_unloading(path) is allowed
    assert not allows_unloading(tmp_path / "missing")


def test_folders_of_pythonpath_count_although_the_interpreter_left_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/first", "/second"])
    monkeypatch.setenv("PYTHONPATH", "/second::/third")
    for _ in range(2):
        honour_python_path()
        assert sys.path == ["/first", "/second", "/third"]


def test_without_a_file_or_with_a_full_disk_the_model_is_unloaded_all_the_same(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "missing" / "health")):
        server, engine = Server(), Engine()
        engine.failure = REASON
        EngineHealth(server, "tensorrt_llm", engine.stats, path, may_unload=True).start()
        assert eventually(has_ended) and server.unloaded == ["tensorrt_llm"]


@pytest.mark.parametrize("how", ["closed", "shut down"])
def test_an_engine_that_ends_as_asked_is_no_failure(tmp_path: Path, how: str) -> None:
    server, engine, path = Server(), Engine(), tmp_path / "health"
    health = EngineHealth(server, "tensorrt_llm", engine.stats, str(path), may_unload=True)
    health.start()
    if how == "closed":
        health.close()
    else:
        engine.is_shut_down = True
    assert eventually(has_ended)
    assert server.unloaded == [] and not path.exists()
