"""``scripts/load_test.py``: what perf_analyzer exports is read rightly, figures, table, CSV and plot are right."""

import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import load_test
import load_test_perf_analyzer
import pytest
from load_test_perf_analyzer import LoadError, command_line, error_line, input_data, parse_profile, run_perf_analyzer
from load_test_records import LoadPoint, RequestRecord, percentile, summarize
from load_test_report import ReportError, read_csv, table, write_csv, write_plot
from load_test_workload import NEVER_ENDS, NUM_PROMPTS, Workload

MS = 1_000_000


def record(start_ms: int, *responses: tuple[int, int]) -> RequestRecord:
    """A request sent at ``start_ms`` with responses (milliseconds, tokens)."""
    return RequestRecord(start_ms * MS, tuple(at * MS for at, _ in responses), tuple(count for _, count in responses))


def point(concurrency: int, latency: float, tokens_per_s: float, first: float | None = 20.0) -> LoadPoint:
    return LoadPoint(
        "perf_analyzer", "ensemble", "grpc", first is not None, concurrency, 8, first, first, first and 5.0,
        latency, latency * 2, latency * 3, tokens_per_s, tokens_per_s / 16,
    )  # fmt: skip


def export(*requests: dict[str, object]) -> dict[str, object]:
    return {"experiments": [{"experiment": {"mode": "concurrency", "value": 2}, "requests": list(requests)}]}


def test_a_profile_export_becomes_records() -> None:
    outputs = [
        {"text_output": " one", "num_output_tokens": 1, "cum_log_probs": ""},
        {"text_output": " two three", "num_output_tokens": 2, "cum_log_probs": ""},
        {"text_output": "", "num_output_tokens": "", "cum_log_probs": ""},
    ]
    request = {"timestamp": 100, "response_timestamps": [150, 180, 190], "response_outputs": outputs}
    assert parse_profile(export(request)) == [RequestRecord(100, (150, 180, 190), (1, 2, 0))]


def test_without_token_counts_a_response_with_text_is_one_token() -> None:
    outputs = [{"text_output": " one"}, {"text_output": ""}]
    request = {"timestamp": 100, "response_timestamps": [150, 180], "response_outputs": outputs}
    assert parse_profile(export(request))[0].tokens == (1, 0)


def test_a_request_without_a_response_and_a_second_experiment_are_refused() -> None:
    silent = {"timestamp": 100, "response_timestamps": [], "response_outputs": []}
    with pytest.raises(LoadError, match="without a response"):
        parse_profile(export(silent))
    with pytest.raises(LoadError, match="2 experiments, expected 1"):
        parse_profile({"experiments": [{}, {}]})


def test_figures_of_a_request_leave_empty_responses_out() -> None:
    """Tokens at 10, 30 (two at once) and 40 ms, then an empty final response at 45 ms."""
    one = record(0, (10, 1), (30, 2), (40, 1), (45, 0))
    assert one.first_token_ms == 10
    assert one.inter_token_ms == 10  # 30 ms for the three tokens after the first
    assert one.latency_ms == 45
    assert one.num_tokens == 4
    whole = record(5, (25, 8))
    assert (whole.first_token_ms, whole.inter_token_ms) == (20, None)
    empty = record(0, (7, 0))
    assert (empty.first_token_ms, empty.inter_token_ms, empty.latency_ms) == (None, None, 7)


def test_a_record_needs_a_count_for_each_response() -> None:
    with pytest.raises(ValueError, match="2 response times for 1 token counts"):
        RequestRecord(0, (1, 2), (1,))


def test_rates_are_over_the_whole_run() -> None:
    records = [record(0, (10, 1), (100, 3)), record(50, (70, 2), (250, 2))]
    got = summarize(records, "builtin", "ensemble", "grpc", True, 2)
    assert (got.requests, got.tokens_per_s, got.requests_per_s) == (2, 8 / 0.25, 2 / 0.25)
    assert (got.first_token_p50, got.first_token_p90) == (10, 20)
    assert (got.latency_p50, got.latency_p90, got.latency_p99) == (100, 200, 200)
    assert got.inter_token_p50 == 30
    whole = summarize(records, "builtin", "ensemble", "http", False, 2)
    assert (whole.first_token_p50, whole.inter_token_p50) == (None, None)
    with pytest.raises(ValueError, match="no request was measured at concurrency 3"):
        summarize([], "builtin", "ensemble", "grpc", True, 3)


def test_percentiles_are_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_a_workload_has_the_lengths_asked_for_and_repeats() -> None:
    text = Workload("ensemble", 12, 5, True).requests(salt=3)
    assert len(text) == NUM_PROMPTS and text == Workload("ensemble", 12, 5, True).requests(salt=3)
    assert text != Workload("ensemble", 12, 5, True).requests(salt=4)
    assert len(str(text[0]["text_input"][0]).split()) == 12
    assert (text[0]["max_tokens"], text[0]["stream"], text[0]["end_id"]) == ([5], [True], [NEVER_ENDS])
    ids = Workload("tensorrt_llm", 12, 5, False).requests()[0]
    assert (len(ids["input_ids"]), ids["input_lengths"], ids["streaming"]) == (12, [12], [False])
    assert input_data([ids])["data"][0]["input_ids"] == {"content": ids["input_ids"], "shape": [12]}  # type: ignore[index]


@pytest.mark.parametrize(("protocol", "streams"), [("grpc", True), ("http", False)])
def test_perf_analyzer_streams_over_grpc_only(tmp_path: Path, protocol: str, streams: bool) -> None:
    workload = Workload("tensorrt_llm_bls", 8, 4, streams)
    words = command_line(Path("/x/perf_analyzer"), "host:1", protocol, workload, 4, 16, tmp_path)
    assert ("--streaming" in words) == streams
    pairs = set(itertools.pairwise(words))
    assert {("-m", "tensorrt_llm_bls"), ("-i", protocol), ("-u", "host:1"), ("--concurrency-range", "4")} <= pairs
    assert ("--request-count", "16") in pairs


def fake_perf_analyzer(folder: Path, script: str) -> Path:
    program = folder / "perf_analyzer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_run_reads_the_export_and_names_the_error(tmp_path: Path) -> None:
    profile = export({"timestamp": 0, "response_timestamps": [9], "response_outputs": [{"num_output_tokens": 4}]})
    (tmp_path / "made.json").write_text(json.dumps(profile))
    good = fake_perf_analyzer(tmp_path, f'for last; do :; done; cp "{tmp_path}/made.json" "$last"')
    workload = Workload("ensemble", 8, 4, True)
    assert run_perf_analyzer(good, "host:1", "grpc", workload, 1, 8) == [RequestRecord(0, (9,), (4,))]
    bad = fake_perf_analyzer(tmp_path, "echo usage; echo 'error: failed to get model metadata'; echo; exit 99")
    with pytest.raises(LoadError, match=r"ended with 99: error: failed to get model metadata$"):
        run_perf_analyzer(bad, "host:1", "grpc", workload, 1, 8)
    silent = fake_perf_analyzer(tmp_path, "exit 0")
    with pytest.raises(LoadError, match="it said nothing"):
        run_perf_analyzer(silent, "host:1", "grpc", workload, 1, 8)


def test_an_endless_perf_analyzer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test_perf_analyzer, "TIMEOUT_S", 0.2)
    with pytest.raises(LoadError, match=r"did not end within 0.2 s"):
        run_perf_analyzer(
            fake_perf_analyzer(tmp_path, "exec sleep 20"), "host:1", "grpc", Workload("ensemble", 8, 4, True), 1, 8
        )


def test_error_line_prefers_the_line_that_tells() -> None:
    assert error_line("a\nFailed to connect\n\nusage: many flags\n") == "Failed to connect"
    assert error_line("only\nlines\n") == "lines"


def test_table_shows_what_is_not_measured_as_a_dash() -> None:
    lines = table([point(1, 100.0, 160.0), point(2, 1234.5, 200.0, first=None)]).splitlines()
    assert lines[0].startswith("| concurrency | requests | first token p50, ms |")
    assert lines[2] == "| 1 | 8 | 20.0 | 20.0 | 5.0 | 100.0 | 200.0 | 300.0 | 160.0 | 10.00 |"
    assert lines[3] == "| 2 | 8 | - | - | - | 1,234.5 | 2,469.0 | 3,703.5 | 200.0 | 12.50 |"


def test_table_compares_with_the_same_setting_of_a_baseline() -> None:
    lines = table([point(1, 50.0, 320.0), point(4, 70.0, 99.0)], [point(1, 100.0, 160.0)]).splitlines()
    assert lines[0].endswith("| tokens/s vs. baseline | request p50 vs. baseline |")
    assert lines[2].endswith("| 2.00x | 0.50x |")
    assert lines[3].endswith("| - | - |")


def test_csv_reads_back_and_bad_files_are_named(tmp_path: Path) -> None:
    points = [point(1, 100.0, 160.0), point(2, 123.25, 200.0, first=None)]
    write_csv(tmp_path / "a.csv", points)
    assert read_csv(tmp_path / "a.csv") == points
    (tmp_path / "b.csv").write_text("concurrency,requests\n1,2\n")
    with pytest.raises(ReportError, match=r"b.csv is no table of a load test: it has no client, "):
        read_csv(tmp_path / "b.csv")
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "c.csv").write_text(text.replace("160.0", "many"))
    with pytest.raises(ReportError, match=r"c.csv: could not convert string to float: 'many'"):
        read_csv(tmp_path / "c.csv")
    with pytest.raises(ReportError, match=r"none.csv: .*No such file"):
        read_csv(tmp_path / "none.csv")


def test_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    points = [point(1, 100.0, 160.0), point(4, 180.0, 400.0)]
    write_plot(path, points, "title", baseline=[point(1, 150.0, 90.0, first=None)])
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (576, 360)


def test_the_command_line_measures_each_concurrency_and_writes_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    def run(url: str, workload: Workload, concurrency: int, count: int) -> list[RequestRecord]:
        asked.append((concurrency, count))
        return [record(0, (10, 1), (40, workload.output_len - 1))] * count

    monkeypatch.setattr(load_test, "run_builtin", run)
    output = tmp_path / "made" / "run"
    common = ["--client", "builtin", "--concurrency", "1,3", "--output-len", "4", "--output", str(output)]
    assert load_test.main(common) == 0
    assert asked == [(1, 2), (1, 8), (3, 12)]
    assert [p.concurrency for p in read_csv(Path(f"{output}.csv"))] == [1, 3]
    assert Path(f"{output}.png").exists()
    out = capsys.readouterr().out
    assert out == Path(f"{output}.md").read_text() and "measured by builtin" in out
    assert load_test.main([*common, "--no-plot", "--baseline-csv", f"{output}.csv"]) == 0
    assert "1.00x" in Path(f"{output}.md").read_text()


def test_faults_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from compat.client_env import ClientUnavailableError

    def missing() -> types.SimpleNamespace:
        raise ClientUnavailableError("perf_analyzer needs glibc 2.38, and apt-get is missing to get it aside")

    monkeypatch.setattr(load_test, "find_perf_analyzer", missing)
    assert load_test.main(["--output", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == (
        "error: perf_analyzer needs glibc 2.38, and apt-get is missing to get it aside; "
        "--client builtin measures the same without it\n"
    )
    assert load_test.main(["--client", "builtin", "--protocol", "http"]) == 1
    assert "builtin speaks grpc only" in capsys.readouterr().err
    assert load_test.main(["--protocol", "http"]) == 1
    assert "add --no-streaming" in capsys.readouterr().err
    assert load_test.main(["--baseline-csv", str(tmp_path / "none.csv")]) == 1
    assert "none.csv" in capsys.readouterr().err
    for flags in (["--concurrency", "1,0"], ["--output-len", "0"], ["--model", "other"]):
        with pytest.raises(SystemExit):
            load_test.main(flags)


def test_it_runs_as_a_script() -> None:
    script = Path(__file__).parents[2] / "scripts" / "load_test.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "--baseline-csv" in done.stdout
