"""``scripts/profile_step.py``: tells of decoding steps, and of prompts' steps."""

import json
import sys
from pathlib import Path

import profile_step
import pytest

from tests.support.tiny_models import build_tiny_model


# 16 prompts are more than a step takes; decoding is told of with all of them nevertheless.
@pytest.mark.parametrize(("batch", "steps", "num_attended"), [("1", "6", 1), ("16", "6", 16), ("1", "1", 40)])
def test_stages_and_operations_of_a_step(
    batch: str,
    steps: str,
    num_attended: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build_tiny_model("llama", tmp_path)
    told = []
    by_kind = profile_step.by_kind
    monkeypatch.setattr(profile_step.common, "memory_bandwidth_gb_s", lambda threads: 1.0)
    monkeypatch.setattr(
        profile_step,
        "by_kind",
        lambda executor: told.append(executor._model_engine.recorded_layers._step.num_tokens) or by_kind(executor),
    )
    arguments = ["--model", str(tmp_path), "--batch", batch, "--prompt", "40", "--steps", steps, "--threads", "2"]
    monkeypatch.setattr(
        sys, "argv", ["profile_step.py", *arguments, "--weight-only-precision", "int16", "--kv-cache-dtype", "int8"]
    )
    profile_step.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == [num_attended]
    assert line["stages_ms"]["forward_ms"] > 0 and {"dense", "attend", "round"} <= set(line["operations_ms"])
