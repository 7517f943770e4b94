"""serve.sh from the first line to the last: what it prints can be pasted, chat.py talks to it, Ctrl-C ends it all."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from triton_process import free_ports

from tests.support.native_cache import with_native_library

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "scripts" / "serve.sh"
CHAT = ROOT / "scripts" / "chat.py"
ANSWER = " yes"  # what the table model says after its chat template


def bare_environment(cache: Path) -> dict[str, str]:
    """The same with an empty cache."""
    return os.environ | {"INFLIGHT_VENV": sys.prefix, "INFLIGHT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def environment(cache: Path) -> dict[str, str]:
    """This environment, with the running virtual environment for serve.sh and a cache of the test's own."""
    return bare_environment(with_native_library(cache))


def port_flags(ports: Sequence[int]) -> list[str]:
    names = ("--http-port", "--grpc-port", "--metrics-port")
    return [item for name, port in zip(names, ports, strict=True) for item in (name, str(port))]


def refuse(cache: Path, *arguments: str) -> str:
    """Run serve.sh, which must refuse within seconds; return its one line."""
    done = subprocess.run(
        [str(SERVE), *arguments], env=bare_environment(cache), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: "), done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


class Served:
    """A running serve.sh; ``text`` is all it printed until it was ready, ``ready`` its line of JSON."""

    def __init__(self, model_dir: Path, cache: Path) -> None:
        self.cache = cache
        self.process = subprocess.Popen(
            [str(SERVE), "--model", str(model_dir), *port_flags(free_ports()), "--print-json"],
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith('{"event"'):
                break
        self.text = "".join(lines)
        assert lines and lines[-1].startswith('{"event"'), self.text
        self.ready = json.loads(lines[-1])

    def lines_after(self, heading: str) -> list[str]:
        """The indented lines under ``heading``."""
        lines = self.text.splitlines()
        start = lines.index(heading) + 1
        end = next(at for at in range(start, len(lines)) if not lines[at].startswith("  "))
        return lines[start:end]


@pytest.fixture(scope="module")
def served(table_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    started = Served(table_model_dir, tmp_path_factory.mktemp("cache"))
    yield started
    started.process.terminate()
    started.process.communicate(timeout=30)


def chat(served: Served, typed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHAT), "--url", served.ready["grpc_url"], *arguments],
        input=typed,
        env=environment(served.cache),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.triton
def test_every_step_is_told_and_a_sample_answer_streams(served: Served) -> None:
    for step in ("[1/3] model", "[2/3] model repository", "[3/3] Triton Server with 5 models", "[3/3] ready"):
        assert step in served.text
    for model in ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls", "ensemble"):
        assert f"{model} is loaded" in served.text
    assert f"Q: What is the capital of France?\nA: {ANSWER}\n" in served.text
    assert "streamed over gRPC]" in served.text


@pytest.mark.triton
def test_the_printed_curl_lines_work(served: Served) -> None:
    whole, streamed = served.lines_after("Call it from a shell:")
    output = subprocess.run(whole, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(output)["text_output"] == ANSWER
    output = subprocess.run(streamed, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    events = [json.loads(line.removeprefix("data:")) for line in output.splitlines() if line.startswith("data:")]
    assert "".join(event.get("text_output", "") for event in events) == ANSWER


@pytest.mark.triton
def test_the_printed_python_lines_work(served: Served) -> None:
    program = textwrap.dedent("\n".join(served.lines_after("or from Python:")))
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{ANSWER}\n"


@pytest.mark.triton
def test_the_printed_chat_line_and_its_commands_work(served: Served) -> None:
    (line,) = served.lines_after("or talk to it:")
    typed = "Hello\n\n/reset\nAgain\n/exit\nnever asked\n"
    done = subprocess.run(
        line,
        shell=True,
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment(served.cache),
    )
    assert done.stdout == f"{ANSWER}\n" * 2
    assert done.stderr.count("[1 token, first after ") + done.stderr.count("[2 tokens, first after ") == 2


@pytest.mark.triton
def test_chat_options_and_errors(served: Served) -> None:
    done = chat(served, "Hi\n", "--model-name", "ensemble", "--temperature", "0", "--top-k", "1", "--seed", "3")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done
    done = chat(served, "Hi\nHi\n", "--temperature", "-1")
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 2
    assert "temperature" in done.stderr
    done = chat(served, "Hi\n", "--tokenizer-dir", "/nowhere")
    expected = "error: tokenizer folder /nowhere does not exist or is neither a folder nor a GGUF file\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.triton
def test_ctrl_c_ends_the_current_answer_only(served: Served, table_model_dir: Path, tmp_path: Path) -> None:
    # Without a chat template the words go as they are: "Long" talks without end, "Count" counts.
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(table_model_dir, tokenizer, ignore=shutil.ignore_patterns("chat_template*", "*.safetensors"))
    flags = ["--url", served.ready["grpc_url"], "--max-tokens", "200000", "--tokenizer-dir", str(tokenizer)]
    process = subprocess.Popen(
        [sys.executable, str(CHAT), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(served.cache),
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("Long\nCount\n")
    process.stdin.close()
    assert process.stdout.read(8) == " zig zag"
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    error = process.stderr.read() if process.stderr else ""
    assert (process.wait(timeout=60), output.splitlines()[-1]) == (0, " 1 2 3 4 5 end"), error
    first, second = error.splitlines()
    assert first.endswith(", cancelled]")
    assert second.startswith(("[6 tokens, ", "[7 tokens, "))


@pytest.mark.triton
def test_chat_without_a_server_is_one_line(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    done = subprocess.run(
        [sys.executable, str(CHAT), "--url", f"127.0.0.1:{port}"],
        input="Hi\n",
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.triton
def test_ctrl_c_in_the_terminal_ends_everything(table_model_dir: Path, tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    served = Served(table_model_dir, tmp_path)
    server_pid = served.ready["pid"]
    started = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    output, _ = served.process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert (served.process.returncode, output.splitlines()[-1]) == (0, "stopped")
    assert not Path(f"/proc/{server_pid}").exists()
    assert not Path(served.ready["run_dir"]).exists()
    assert {
        name
        for name in {path.name for path in Path("/dev/shm").iterdir()} - before
        if f"_{served.process.pid}_" in name
    } == set()


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        http_port, grpc_port = free_ports(2)
        error = refuse(tmp_path, *port_flags((http_port, grpc_port, port)))
    assert error == f"error: port {port} on 127.0.0.1 is in use; choose another with --metrics-port\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--model", "/nowhere/at/all"],
            "--model '/nowhere/at/all' is neither a folder, nor a file, nor a hub id such as",
        ),
        (["--set", "no_colon"], "--set 'no_colon' is not allowed; use KEY:VALUE"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    assert expected in refuse(tmp_path, *port_flags(free_ports()), *arguments)
    assert list(tmp_path.iterdir()) == []


def run_serve(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SERVE), *port_flags(free_ports()), *arguments],
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_folder_that_is_no_model_and_an_unknown_setting_are_told(table_model_dir: Path, tmp_path: Path) -> None:
    done = run_serve(tmp_path / "cache", "--model", str(tmp_path))
    assert done.returncode == 1
    expected = "is no checkpoint: it has no config.json and is of no other known format"
    assert done.stderr == f"error: --model '{tmp_path}' {expected}\n"
    done = run_serve(tmp_path / "cache", "--model", str(table_model_dir), "--set", "max_batchsize:4")
    assert done.returncode == 1
    assert "unknown setting 'max_batchsize'; did you mean max_batch_size, triton_max_batch_size?" in done.stderr
    assert list((tmp_path / "cache" / "run").iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "download_model.py"), "owner/name"],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: model 'owner/name' is no path that exists, and ")
    assert "Traceback" not in done.stderr


def test_help_needs_no_set_up(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SERVE), "--help"], env=bare_environment(tmp_path), capture_output=True, text=True, timeout=60, check=True
    )
    assert "--model-control-mode" in done.stdout
    assert list(tmp_path.iterdir()) == []
