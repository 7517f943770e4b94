"""``scripts/bench_start.py``: how long an engine and a server take to their first token."""

import socket
import sys
from pathlib import Path

import bench_start
import pytest

from tests.support.table_model import build_table_model


def test_starts_of_the_engine_are_measured_with_everything_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "model")
    build_table_model(model)
    rows = bench_start.measure_engine(model, ["int16"], rounds=1)
    assert [(row["from"], row["precision"]) for row in rows] == [("model folder", "auto"), ("engine folder", "int16")]
    assert all(0 < row["ready_s"] < row["first_token_s"] for row in rows)
    assert rows[0]["met"] is None and isinstance(rows[1]["met"], bool)
    assert "engine folder" in capsys.readouterr().out


def test_an_engine_that_does_not_start_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the engine did not start: .*config\.json"):
        bench_start.run_start(str(tmp_path), "auto", None)


def test_the_first_start_of_a_server_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = iter([(9.0, 9.5), (1.0, 1.5), (3.0, 4.0), (2.0, 2.5)])
    monkeypatch.setattr(bench_start, "start_ours", lambda: next(times))
    monkeypatch.setattr(bench_start, "python_of", lambda name: str(tmp_path / "absent"))
    assert bench_start.measure_servers(3) == [{"server": "serve.sh", "ready_s": 2.0, "first_token_s": 2.5}]


def test_modules_without_a_file_are_not_imported_again() -> None:
    assert bench_start.is_importable("json.decoder") and not bench_start.is_importable("__main__")
    assert "json.decoder" in sys.modules


def test_ports_are_free_and_all_different() -> None:
    ports = bench_start.free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as found:
            found.bind(("127.0.0.1", port))
