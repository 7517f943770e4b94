"""Drives NVIDIA's perf_analyzer with a workload and reads the requests it measured out of its profile export.

``load_test.py`` and the compatibility check call it. perf_analyzer itself is found by ``compat.perf_analyzer_env``.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from load_test_records import RequestRecord
from load_test_workload import Value, Workload

TIMEOUT_S = 1800


class LoadError(Exception):
    """A load generator could not measure; the message is one line."""


def input_data(requests: Sequence[Mapping[str, Sequence[Value]]]) -> dict[str, object]:
    """The requests as perf_analyzer's ``--input-data`` file: every value with its shape without the batch."""
    data = [
        {name: {"content": list(values), "shape": [len(values)]} for name, values in request.items()}
        for request in requests
    ]
    return {"data": data}


def command_line(
    program: Path, url: str, protocol: str, workload: Workload, concurrency: int, num_requests: int, folder: Path
) -> list[str]:
    """perf_analyzer's command line for one concurrency. Files are in ``folder``."""
    streaming = ["--streaming"] if protocol == "grpc" else []
    return [
        str(program), "-m", workload.model, "-i", protocol, "-u", url, "--async", *streaming,
        "--input-data", str(folder / "input.json"), "--concurrency-range", str(concurrency),
        "--request-count", str(num_requests), "--stability-percentage", "999",
        "--profile-export-file", str(folder / "profile.json"),
    ]  # fmt: skip


def run_perf_analyzer(
    program: Path, url: str, protocol: str, workload: Workload, concurrency: int, num_requests: int
) -> list[RequestRecord]:
    """Measure ``num_requests`` requests at one concurrency. Raises ``LoadError``."""
    with tempfile.TemporaryDirectory(prefix="inflight-load-") as scratch:
        folder = Path(scratch)
        (folder / "input.json").write_text(json.dumps(input_data(workload.requests(salt=concurrency))))
        command = command_line(program, url, protocol, workload, concurrency, num_requests, folder)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise LoadError(f"perf_analyzer did not end within {TIMEOUT_S} s") from None
        export = folder / "profile.json"
        if done.returncode != 0 or not export.exists():
            raise LoadError(f"perf_analyzer ended with {done.returncode}: {error_line(done.stdout + done.stderr)}")
        return parse_profile(json.loads(export.read_text()))


def error_line(output: str) -> str:
    """The line of perf_analyzer's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.lower().startswith(("error", "failed", "thread ["))]
    return (telling or lines or ["it said nothing"])[-1]


def parse_profile(profile: Mapping[str, object]) -> list[RequestRecord]:
    """The requests in a profile export of one experiment.

    A response's tokens are its ``num_output_tokens``; where it has none, 1 if it has text, else 0. Requests without a
    response are refused with ``LoadError``.
    """
    experiments = profile["experiments"]
    assert isinstance(experiments, list)
    if len(experiments) != 1:
        raise LoadError(f"the profile export has {len(experiments)} experiments, expected 1")
    records = []
    for request in experiments[0]["requests"]:
        times = request["response_timestamps"]
        if not times:
            raise LoadError("perf_analyzer measured a request without a response")
        tokens = tuple(_tokens(output) for output in request["response_outputs"])
        records.append(RequestRecord(int(request["timestamp"]), tuple(map(int, times)), tokens))
    return records


def _tokens(output: Mapping[str, object]) -> int:
    count = output.get("num_output_tokens", "")
    if count != "":
        return int(str(count))
    return 1 if output.get("text_output") else 0
