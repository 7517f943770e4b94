"""The builtin load generator of ``scripts/load_test.py`` against a real server."""

from pathlib import Path

import load_test
import pytest
from load_test_builtin import run_builtin
from load_test_perf_analyzer import LoadError
from load_test_report import read_csv
from load_test_workload import Workload

from tests.support.client import Server

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
def test_streamed_requests_are_measured(table_server: Server, model: str) -> None:
    records = run_builtin(table_server.grpc, Workload(model, 5, 60, True), concurrency=2, num_requests=4)
    assert [record.num_tokens for record in records] == [60] * 4
    # A stream that the machine leaves waiting gets several tokens at once.
    assert any(len(record.token_times()) > 1 for record in records)
    assert all(record.start_ns < record.response_ns[0] <= record.end_ns for record in records)


def test_whole_answers_are_measured(table_server: Server) -> None:
    (record,) = run_builtin(table_server.grpc, Workload("ensemble", 5, 6, False), concurrency=1, num_requests=1)
    assert [count for count in record.tokens if count] == [6]


def test_a_refused_request_is_one_line(table_server: Server) -> None:
    """The prompt is longer than the model's 8,192 positions."""
    with pytest.raises(LoadError, match=r"^a request failed: .*9000"):
        run_builtin(table_server.grpc, Workload("tensorrt_llm", 9000, 4, True), concurrency=2, num_requests=4)


def test_the_script_writes_table_csv_and_plot(table_server: Server, tmp_path: Path) -> None:
    output = tmp_path / "load"
    arguments = ["--client", "builtin", "--url", table_server.grpc, "--concurrency", "1,2", "--requests", "2"]
    assert load_test.main([*arguments, "--input-len", "5", "--output-len", "4", "--output", str(output)]) == 0
    points = read_csv(Path(f"{output}.csv"))
    assert [(point.concurrency, point.requests, point.streaming) for point in points] == [(1, 2, True), (2, 2, True)]
    assert all(point.first_token_p50 is not None and point.tokens_per_s > 0 for point in points)
    assert Path(f"{output}.png").stat().st_size > 1000 and Path(f"{output}.md").read_text().count("\n| ") == 3
