"""Clients that leave, models that come and go, and the end of the server."""

import functools
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.client import GrpcStream, Server

pytestmark = pytest.mark.triton
eventually = functools.partial(waiting.eventually, seconds=20.0, pause_s=0.05)
MODELS = ["ensemble", "tensorrt_llm_bls", "postprocessing", "tensorrt_llm", "preprocessing"]
COUNT = " 1 2 3 4 5 end"


def is_idle(server: Server) -> bool:
    return server.gauge("nv_trt_llm_request_metrics", "active") == 0 and (
        server.gauge("nv_trt_llm_kv_cache_block_metrics", "used") == 0
    )


def is_busy(server: Server) -> bool:
    return server.gauge("nv_trt_llm_request_metrics", "active") > 0


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_a_grpc_client_that_leaves_frees_its_request(
    slow_server: Server, model: str, table_ids: dict[str, int]
) -> None:
    stream = GrpcStream(slow_server.grpc)
    if model == "tensorrt_llm":
        fields = {"input_ids": [[table_ids["Long"]]], "input_lengths": 1, "request_output_len": 4000, "streaming": True}
    else:
        fields = {"text_input": "Long", "max_tokens": 4000, "stream": True}
    stream.send(model, **fields)
    for _ in range(3):
        stream.next()
    assert eventually(lambda: is_busy(slow_server))
    stream.close(cancel=True)
    assert eventually(lambda: is_idle(slow_server))
    tokens = slow_server.gauge("inflight_generated_tokens_total")
    time.sleep(0.5)
    assert slow_server.gauge("inflight_generated_tokens_total") == tokens
    assert slow_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


CLIENT = """
import sys
from tests.support.client import GrpcStream
stream = GrpcStream(sys.argv[1])
if sys.argv[2] == "tensorrt_llm":
    fields = {"input_ids": [[int(sys.argv[3])]], "input_lengths": 1, "request_output_len": 4000, "streaming": True}
else:
    fields = {"text_input": "Long", "max_tokens": 4000, "stream": True}
stream.send(sys.argv[2], **fields)
stream.next()
print("streaming", flush=True)
stream.all()
"""


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_a_client_process_that_is_killed_frees_its_request(
    slow_server: Server, model: str, table_ids: dict[str, int]
) -> None:
    command = [sys.executable, "-c", CLIENT, slow_server.grpc, model, str(table_ids["Long"])]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert client.stdout is not None and client.stdout.readline() == "streaming\n"
    assert eventually(lambda: is_busy(slow_server))
    client.kill()
    client.wait()
    assert eventually(lambda: is_idle(slow_server))
    assert slow_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_an_http_client_that_drops_its_stream_frees_its_request(slow_server: Server, model: str) -> None:
    """The ensemble hides the cancellation from the engine: there the deadline ends it."""
    events = slow_server.events(model, text_input="Long", max_tokens=4000, deadline_ms=3000)
    for _ in range(3):
        next(events)
    events.close()
    assert eventually(lambda: is_idle(slow_server))


def test_a_silent_client_is_ended_by_its_deadline(slow_server: Server) -> None:
    connection = http.client.HTTPConnection(slow_server.http, timeout=30)
    body = {"text_input": "Long", "max_tokens": 4000, "deadline_ms": 1500}
    connection.request("POST", "/v2/models/ensemble/generate", json.dumps(body))
    assert eventually(lambda: is_busy(slow_server))
    connection.close()
    assert eventually(lambda: is_idle(slow_server))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_deadline_ends_a_text_with_what_there_is(slow_server: Server, model: str) -> None:
    status, body = slow_server.generate(
        model, text_input="Long", max_tokens=4000, deadline_ms=700, return_finish_reason=True
    )
    assert status == 200 and body["finish_reason"] == "timeout" and body["text_output"].startswith(" zig zag")


def test_a_stop_request_ends_the_stream_of_its_id(slow_server: Server, table_ids: dict[str, int]) -> None:
    stream = GrpcStream(slow_server.grpc)
    prompt = {"input_ids": [[table_ids["Long"]]], "input_lengths": 1, "request_output_len": 4000, "streaming": True}
    stream.send("tensorrt_llm", "to_be_stopped", **prompt)
    stream.next()
    stop = {"input_ids": [[1]], "input_lengths": 0, "request_output_len": 0, "stop": True}
    stopper = GrpcStream(slow_server.grpc)
    stopper.send("tensorrt_llm", "to_be_stopped", {"Streaming": True}, **stop)
    answer = stopper.all()
    assert answer[-1].final and not [r.error for r in answer if r.error]
    responses = stream.all()
    assert responses[-1].final and not [r.error for r in responses if r.error] and len(responses) < 2000
    stopper.send("tensorrt_llm", "never_heard_of", **stop)
    assert stopper.next().error is None
    stopper.send("tensorrt_llm", "", **stop)
    assert "request ID is not provided" in (stopper.next().error or "")
    stream.close()
    stopper.close()
    assert eventually(lambda: is_idle(slow_server))


def test_models_unload_and_load_again_three_times(table_server: Server) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        for _ in range(2):
            table_server.joined(model, text_input="Count", max_tokens=16)
    for _ in range(3):
        for model in MODELS:
            table_server.unload(model)
        assert not table_server.stub_pids(), "the models' processes are gone"
        for model in reversed(MODELS):
            table_server.load(model)
        assert table_server.text("ensemble", text_input="Count", max_tokens=16) == COUNT
        assert table_server.text("tensorrt_llm_bls", text_input="Count", max_tokens=16) == COUNT


def test_control_apis_need_the_key(table_server: Server) -> None:
    assert table_server.post("/v2/repository/models/ensemble/unload", {})[0] in (400, 403, 404)
    assert table_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


def test_nothing_listens_outside_loopback(table_server: Server) -> None:
    ports = {
        int(address.rsplit(":", 1)[1]) for address in (table_server.http, table_server.grpc, table_server.metrics_url)
    }
    listening = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    ours = [f[1] for f in listening if f[3] == "0A" and int(f[1].split(":")[1], 16) in ports]
    assert len(ours) >= 3
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    assert all(address.split(":")[0] in loopback for address in ours), ours


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_with_a_live_stream_and_leaves_nothing(serve_process: Callable[[], Server], number: int) -> None:
    """``scripts/serve.sh`` itself: the client gets a final response, the exit code is 0, nothing of ours stays."""
    server = serve_process()
    stream = GrpcStream(server.grpc)
    stream.send("ensemble", text_input="Long", max_tokens=4000, stream=True)
    stream.next()
    children = server.stub_pids()
    assert children
    os.kill(server.pid, number)
    responses = stream.all()
    assert responses[-1].final and responses[-1].error is None
    assert server.process.wait(timeout=20) == 0
    stream.close()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(server.shm_prefix)]
