"""The real server with an engine that hangs or dies: clients are told within seconds, and so is readiness."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from render_repository import render_repository
from triton_process import group_members

from tests.e2e.conftest import ProductServer, serving
from tests.support.client import GrpcStream, Server
from tests.support.launched import Launched, eventually, is_ready
from tests.support.server import running_server

pytestmark = pytest.mark.triton
STUCK = "the engine is stuck: a step has run for more than 1.5 s"
COUNT = " 1 2 3 4 5 end"


def hanging(ids: dict[str, int]) -> dict[str, str]:
    """Settings of an engine that hangs after three tokens of "Long", and is found out after 1.5 s."""
    words = ("Long", " zig", " zag", " zig")
    return {"step_timeout_ms": "1500", "debug_hang_on_tokens": ",".join(str(ids[word]) for word in words)}


@pytest.fixture
def launched(request: pytest.FixtureRequest, table_model_dir: Path, table_ids: dict[str, int], tmp_path: Path
) -> Iterator[Launched]:  # fmt: skip
    repository = tmp_path / "repository"
    render_repository(repository, hanging(table_ids), table_model_dir)
    started = Launched(repository, tmp_path, *request.param)
    started.read_until("model control key")
    yield started
    started.close()


def client(launched: Launched) -> Server:
    return Server(f"127.0.0.1:{launched.http_port}", f"127.0.0.1:{launched.grpc_port}")


def stream_until_it_hangs(server: Server, model: str) -> GrpcStream:
    stream = GrpcStream(server.grpc)
    stream.send(model, text_input="Long", max_tokens=400, stream=True, exclude_input_in_output=True)
    text = ""
    while text != " zig zag zig":
        response = stream.next()
        assert response.error is None, response
        text += response.text
    return stream


def test_a_hanging_step_ends_its_streams_and_makes_the_models_not_ready(
    table_model_dir: Path, table_ids: dict[str, int]
) -> None:
    """Plain Triton Server in explicit mode: the engine model does it by itself, and can be loaded again."""
    with serving(table_model_dir, **hanging(table_ids)) as server:
        assert server.text("ensemble", text_input="Count", max_tokens=16) == COUNT
        stream = stream_until_it_hangs(server, "ensemble")
        last = stream.all()[-1]
        assert last.final and STUCK in (last.error or "")
        stream.close()
        for model in ("tensorrt_llm", "ensemble"):
            assert eventually(lambda model=model: not is_ready(f"http://{server.http}", model))
        assert STUCK in server.log()
        server.load("tensorrt_llm")
        assert server.text("ensemble", text_input="Count", max_tokens=16) == COUNT


def test_requests_to_a_dead_engine_are_refused_with_the_reason(
    table_model_dir: Path, table_ids: dict[str, int]
) -> None:
    """Without model control nothing can turn not-ready: the answers say it, through every entry model."""
    with running_server(model_dir=table_model_dir, settings=hanging(table_ids)) as started:
        server = ProductServer(started.http_url.removeprefix("http://"), started.grpc_url)
        stream = stream_until_it_hangs(server, "tensorrt_llm_bls")
        assert STUCK in (stream.all()[-1].error or "")
        stream.close()
        assert eventually(started.health_file.exists)
        # Many, and after the engine's death was reported: a server that was asked to unload the model would end here.
        for model in ("ensemble", "tensorrt_llm_bls") * 10:
            status, body = server.generate(model, text_input="Count", max_tokens=3)
            assert status != 200 or "error" in body
            assert STUCK in json.dumps(body)
        assert started.health_file.read_text() == f"tensorrt_llm: {STUCK}\n"


@pytest.mark.parametrize("launched", [[]], indirect=True)
def test_the_launcher_ends_a_server_whose_engine_hangs(launched: Launched) -> None:
    server_pid = launched.server_pid()
    stream = stream_until_it_hangs(client(launched), "ensemble")
    assert STUCK in (stream.all()[-1].error or "")
    assert launched.process.wait(timeout=30) == 1
    assert launched.error_text() == f"error: model 'tensorrt_llm' has failed: {STUCK}\n"
    launched.assert_nothing_left(server_pid)
    stream.close()


@pytest.mark.parametrize("launched", [["--restart", "1"]], indirect=True)
def test_the_launcher_restarts_a_server_as_often_as_allowed(launched: Launched) -> None:
    """Once for an engine that hangs; when its process is killed afterwards, that is the end."""
    first = launched.server_pid()
    stream = stream_until_it_hangs(client(launched), "ensemble")
    assert STUCK in (stream.all()[-1].error or "")
    stream.close()
    assert eventually(lambda: group_members(first) == [])
    assert eventually(lambda: is_ready(launched.http_url, "ensemble"), seconds=120.0)
    assert client(launched).text("ensemble", text_input="Count", max_tokens=16) == COUNT
    launched.kill_stub("tensorrt_llm")
    assert launched.process.wait(timeout=20) == 1
    assert launched.error_text().splitlines() == [
        f"error: model 'tensorrt_llm' has failed: {STUCK}; starting again (1 of 1)",
        "the server is ready again",
        "error: the process of model 'tensorrt_llm' has died",
    ]


@pytest.mark.parametrize("launched", [["--model-control-mode", "explicit"]], indirect=True)
def test_in_explicit_mode_a_killed_engine_process_makes_the_models_not_ready(launched: Launched) -> None:
    launched.kill_stub("tensorrt_llm")
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        assert eventually(lambda model=model: not is_ready(launched.http_url, model))
    assert is_ready(launched.http_url, "preprocessing") and launched.process.poll() is None


def test_a_repository_with_the_old_backend_name_is_served(table_model_dir: Path, tmp_path: Path) -> None:
    """``backend: "tensorrtllm"``: the backend folder has the model.py, whether the model brings one or not."""
    repository = tmp_path / "repository"
    render_repository(repository, {"triton_backend": "tensorrtllm"}, table_model_dir)
    assert 'backend: "tensorrtllm"' in (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    with running_server(repository, model_control_mode="explicit") as started:
        server = ProductServer(
            started.http_url.removeprefix("http://"), started.grpc_url, admin_key=started.admin_key
        )  # fmt: skip
        for _ in range(2):
            for model in ("ensemble", "tensorrt_llm_bls"):
                assert server.text(model, text_input="Count", max_tokens=16) == COUNT
                assert server.joined(model, text_input="Count", max_tokens=16) == COUNT
            processes = set(started.model_processes().values())
            assert processes == {"preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}
            (repository / "tensorrt_llm" / "1" / "model.py").unlink(missing_ok=True)
            for model in ("ensemble", "tensorrt_llm"):
                server.unload(model)
            for model in ("tensorrt_llm", "ensemble"):
                server.load(model)
