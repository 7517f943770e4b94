"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.client import Server

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def test_generate(table_model_dir: Path) -> None:
    first, second, _ = run("generate.py", str(table_model_dir)).splitlines()
    assert first.startswith("'The capital of France is' -> '") and second.startswith("'1, 2, 3,' -> '")


@pytest.mark.triton
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_stream_grpc(table_server: Server, model: str) -> None:
    assert run("stream_grpc.py", table_server.grpc, model, "Count") == " 1 2 3 4 5 end\n"
