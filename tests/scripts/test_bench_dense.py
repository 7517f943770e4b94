"""``scripts/bench_dense.py``: every kind of weight takes part, and is told of."""

import json
import sys

import bench_dense
import pytest
import torch

from backend_engine.ops.dense_products import DenseKind


@pytest.mark.parametrize("as_json", [False, True])
def test_all_kinds_of_weights_are_measured(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SHAPES", ((48, 32),)), ("NUM_TOKENS", (1, 8)), ("SECONDS", 0.0)):
        monkeypatch.setattr(bench_dense, name, value)
    threads = str(torch.get_num_threads())
    monkeypatch.setattr(sys, "argv", ["bench_dense.py", "--threads", threads, *(["--json"] if as_json else [])])
    bench_dense.main()
    out = capsys.readouterr().out
    kinds = {kind.name for kind in DenseKind}
    assert kinds <= set(bench_dense.NUMBER_BYTES)
    if as_json:
        times = json.loads(out.splitlines()[-1])["48x32_8_tokens_ms"]
        assert kinds <= set(times) and all(ms > 0 for ms in times.values())
    else:
        assert all(kind in out for kind in kinds)
