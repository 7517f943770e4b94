"""Real servers for the end-to-end tests, each started once a session with the settings its tests need."""

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from triton_process import free_ports

from tests.support.client import Server
from tests.support.server import running_server
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
ADMIN_HEADER = "inflight-admin-key"


@dataclass
class ProductServer(Server):
    """A running product server as the tests see it."""

    metrics_url: str = ""
    admin_key: str = ""
    pid: int = 0
    log_path: str = ""
    step_dump: str = ""
    shm_prefix: str = ""
    process: subprocess.Popen[str] | None = None

    def metrics(self) -> list[str]:
        """Lines of the Prometheus page."""
        with urllib.request.urlopen(f"http://{self.metrics_url}/metrics", timeout=10) as reply:
            return [line for line in reply.read().decode().splitlines() if not line.startswith("#")]

    def gauge(self, family: str, label: str = "") -> float:
        """Value of a family's sample; ``label`` is the value of its category label."""
        found = [line for line in self.metrics() if line.startswith(family) and (not label or f'"{label}"' in line)]
        assert len(found) == 1, (family, label, found)
        return float(found[0].split()[-1])

    def wait_for(self, family: str, label: str, value: float) -> None:
        """Wait until a gauge shows ``value``."""
        assert eventually(lambda: self.gauge(family, label) == value, 30, 0.02), (family, label, value)

    def control(self, model: str, action: str) -> tuple[int, object]:
        """Load or unload a model with the key."""
        return self.post(f"/v2/repository/models/{model}/{action}", {}, {ADMIN_HEADER: self.admin_key})

    def states(self) -> dict[str, str]:
        """State of each model in the repository."""
        _, index = self.post("/v2/repository/index", {}, {ADMIN_HEADER: self.admin_key})
        return {entry["name"]: entry.get("state", "") for entry in index}

    def unload(self, model: str) -> None:
        """Unload and wait until the model is gone."""
        assert self.control(model, "unload")[0] == 200
        end = time.monotonic() + 60
        while self.states()[model] not in ("UNAVAILABLE", ""):
            assert time.monotonic() < end, f"{model} stays {self.states()[model]}"
            time.sleep(0.05)

    def load(self, model: str) -> None:
        """Load and wait until the model is ready (the call returns when it is)."""
        status, body = self.control(model, "load")
        assert status == 200, body

    def stub_pids(self) -> list[int]:
        """Model processes of this server that are alive."""
        pids = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if b"triton_python_backend_stub" in command and self.shm_prefix.encode() in command:
                    pids.append(int(entry.name))
        return pids

    def log(self) -> str:
        """The server's log so far."""
        return Path(self.log_path).read_text(errors="replace")


@contextlib.contextmanager
def serving(model_dir: Path, step_dump: Path | None = None, **settings: object) -> Iterator[ProductServer]:
    """A server in explicit mode over ``model_dir``. Afterwards its log must not show a Python traceback."""
    small = {"max_tokens_in_paged_kv_cache": 24_576}  # several servers share the machine
    filled = {key: str(value) for key, value in (small | settings).items()}
    with serving_repository(None, step_dump, model_dir=model_dir, settings=filled) as product:
        yield product


@contextlib.contextmanager
def serving_repository(
    repository: Path | None, step_dump: Path | None = None, **rendered: Any
) -> Iterator[ProductServer]:
    """As ``serving``, over a repository that is there, or over what ``running_server`` renders."""
    environment = {"ENGINE_CHECK_INVARIANTS": "1", **({"ENGINE_DUMP_STEPS": str(step_dump)} if step_dump else {})}
    with running_server(repository, model_control_mode="explicit", environment=environment, **rendered) as server:
        product = ProductServer(
            server.http_url.removeprefix("http://"), server.grpc_url,
            server.metrics_url.removeprefix("http://").removesuffix("/metrics"), server.admin_key, server.pid,
            str(server.log_path), str(step_dump or ""), server.shm_prefix,
        )  # fmt: skip
        yield product
        assert "Traceback" not in product.log()


@pytest.fixture(scope="session")
def table_server(table_model_dir: Path) -> Iterator[ProductServer]:
    """The table model with the defaults."""
    with serving(table_model_dir, max_queue_size=0) as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(table_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProductServer]:
    """The table model at 10 ms a step, in chunks of at most 64 tokens, with a record of its steps."""
    dump = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    with serving(table_model_dir, dump, debug_step_delay_ms=10, max_num_tokens=64) as server:
        yield server


@pytest.fixture(scope="session")
def faulty_server(table_model_dir: Path, table_ids: dict[str, int]) -> Iterator[ProductServer]:
    """The table model with an engine that fails after three tokens of "Long" and at once at "Text"."""
    long = [table_ids[word] for word in ("Long", " zig", " zag", " zig")]
    fail_on = ",".join(map(str, long)) + ";" + str(table_ids["Text"])
    with serving(table_model_dir, debug_fail_on_tokens=fail_on) as server:
        yield server


@pytest.fixture(scope="session")
def variant_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProductServer]:
    """A table model whose tokenizer adds a begin token and whose generation config has two end ids; 256 tokens."""
    from tests.support.table_model import EOS, IM_END, build_table_model

    folder = build_table_model(tmp_path_factory.mktemp("variant") / "model", add_bos=True, end_tokens=(EOS, IM_END))
    with serving(folder, max_seq_len=256) as server:
        yield server


@pytest.fixture(scope="session")
def whole_server(table_model_dir: Path) -> Iterator[ProductServer]:
    """The table model without decoupled responses, at 10 ms a step."""
    with serving(table_model_dir, decoupled_mode="false", debug_step_delay_ms=10) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_server(table_model_dir: Path) -> Iterator[ProductServer]:
    """The table model, one request at a time, at 10 ms a step, six waiting, with little room for logits."""
    with serving(
        table_model_dir, max_batch_size=1, debug_step_delay_ms=10, stats_check_period_ms=10, max_logits_bytes=10_000,
        max_queue_size=6,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def odd_server(table_model_dir: Path) -> Iterator[ProductServer]:
    """The table model with the other value of each choice, at 5 ms a step."""
    with serving(
        table_model_dir, batching_strategy="V1", kv_cache_layout="contiguous", context_chunking_policy="equal_progress",
        logits_datatype="TYPE_FP16", waiting_queue_policy="shortest_first", max_seq_len=512, debug_step_delay_ms=5,
        stats_check_period_ms=10,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def serve_process(table_model_dir: Path) -> Iterator[Callable[[], ProductServer]]:
    """Starts ``scripts/serve.sh`` itself as a user would, on free ports; ended hard if the test did not."""
    started: list[subprocess.Popen[str]] = []

    def start() -> ProductServer:
        http, grpc, metrics = free_ports()
        command = [
            str(ROOT / "scripts" / "serve.sh"), "--model", str(table_model_dir), "--no-demo", "--print-json",
            "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
            "--set", "debug_step_delay_ms:10",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                ready = json.loads(line)
                return ProductServer(
                    f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}", ready["admin_key"], process.pid,
                    ready["log_path"], "", ready["shm_prefix"], process,
                )  # fmt: skip
        raise AssertionError(f"serve.sh ended with {process.wait()} before it was ready")

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
