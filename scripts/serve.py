#!/usr/bin/env python3
"""Serves a model: fetches it, renders the model repository, starts Triton Server, asks it a sample question.

``serve.sh`` runs it once everything is installed. It stays until Ctrl-C or SIGTERM, then ends the server and removes
what the run left. Flags are in ``serve_options``, processes in ``triton_server``.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from chat_client import ChatClient, ChatError
from launch_triton_server import START_ERRORS, describe, host_warning, stop_event, watch
from paths import default_log_path, make_run_dir
from prompt import PromptError, PromptRenderer
from render_repository import RenderError, parse_settings, render_repository
from serve_options import build_parser, check, is_hub_id
from server_log import ModelEvent
from triton_server import ServerOptions, TritonServer, compile_operators

from backend_engine.checkpoint.open_checkpoint import is_checkpoint

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64
_SCRIPTS = Path(__file__).resolve().parent


class ServeError(Exception):
    """Serving cannot begin; the message is one line."""


class StoppedError(Exception):
    """Ctrl-C or SIGTERM came before the server was up."""


@dataclass(frozen=True)
class Steps:
    """Prints numbered steps with the seconds since the start."""

    total: int
    started: float

    def show(self, number: int, text: str) -> None:
        """Print that step ``number`` begins."""
        print(f"[{number}/{self.total}] {text}  ({time.monotonic() - self.started:.0f} s)", flush=True)


def run_for_path(command: list[str], stop: threading.Event) -> Path:
    """Run a script that prints a folder last; its progress goes to our standard error.

    Raises ``ServeError`` when it fails (it has told why) and ``StoppedError`` when ``stop`` is set, ending it.
    """
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, start_new_session=True)
    while True:
        try:
            output, _ = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            if stop.is_set():
                process.terminate()
                process.wait()
                raise StoppedError from None
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        raise ServeError(f"{Path(command[0]).name} failed with exit code {process.returncode}; its message is above")
    return Path(lines[-1])


def find_model(model: str | None, stop: threading.Event) -> Path:
    """Return where the model lies: the default model, a hub model (downloaded), or the folder or file given."""
    if model is None:
        return run_for_path([str(_SCRIPTS / "fetch_model.py")], stop)
    if is_hub_id(model):
        return run_for_path([str(_SCRIPTS / "download_model.py"), model], stop)
    path = Path(model).expanduser().absolute()
    if not is_checkpoint(path):
        raise ServeError(
            f"--model {str(path)!r} is no checkpoint: it has no config.json and is of no other known format"
        )
    return path


def ask_sample(server: TritonServer, model: str, prompt: str, stop: threading.Event) -> None:
    """Ask the sample question and show the answer as it streams in. Raises ``ChatError``."""
    print(f"\nQ: {QUESTION}\nA: ", end="", flush=True)
    client = ChatClient(server.grpc_url, model)
    answer = client.stream(prompt, MAX_TOKENS, {}, lambda delta: print(delta, end="", flush=True), stop)
    print(f"\n   [{answer.summary()}, streamed over gRPC]\n", flush=True)


def usage_lines(server: TritonServer, model: str, prompt: str) -> str:
    """Return lines that can be pasted into a shell or into Python to call the server."""
    url = f"{server.http_url}/v2/models/{model}"
    body = {"text_input": prompt, "max_tokens": MAX_TOKENS, "exclude_input_in_output": True}
    whole = shlex.quote(json.dumps(body))
    streamed = shlex.quote(json.dumps(body | {"stream": True}))
    python = shlex.quote(sys.executable)
    chat = shlex.quote(str(_SCRIPTS / "chat.py"))
    return f"""Call it from a shell:
  curl -s {url}/generate -d {whole}
  curl -sN {url}/generate_stream -d {streamed}
or from Python:
  import json, urllib.request
  body = json.dumps({body!r}).encode()
  print(json.load(urllib.request.urlopen("{url}/generate", body))["text_output"])
or talk to it:
  {python} {chat} --url {server.grpc_url} --model-name {model}
"""


def print_ready(server: TritonServer, arguments: argparse.Namespace, run_dir: Path) -> None:
    """Print where everything is, and with ``--print-json`` the same as one line of JSON."""
    print(describe(server), flush=True)
    if arguments.print_json:
        ready = {
            "event": "ready",
            "http_url": server.http_url,
            "grpc_url": server.grpc_url,
            "metrics_url": server.metrics_url,
            "admin_key": server.admin_key,
            "pid": server.pid,
            "shm_prefix": server.shm_prefix,
            "log_path": str(server.log_path),
            "run_dir": str(run_dir),
        }
        print(json.dumps(ready), flush=True)


def start(arguments: argparse.Namespace, run_dir: Path, stop: threading.Event) -> tuple[TritonServer, Path, list[str]]:
    """Do every step up to a ready server; return it, the model's folder and the names of the models it serves.

    Raises ``ServeError``, ``RenderError``, one of ``START_ERRORS``, or ``StoppedError``.
    """
    steps = Steps(3, time.monotonic())
    steps.show(1, f"model: {arguments.model or 'the default one'}")
    model_dir = find_model(arguments.model, stop)
    steps.show(2, f"model repository for {model_dir}")
    repository = run_dir / "repository"
    models = render_repository(repository, parse_settings(arguments.settings), model_dir)
    options = ServerOptions(
        model_repository=repository,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        host=arguments.host,
        model_control_mode=arguments.model_control_mode,
        tritonserver=arguments.tritonserver,
        run_dir=run_dir,
        log_path=(arguments.log_file or default_log_path(arguments.http_port)).absolute(),
    )
    server = TritonServer(options)
    steps.show(3, f"Triton Server with {len(models)} models (log: {server.log_path})")

    def tell(event: ModelEvent) -> None:
        if event.state == "loaded":
            steps.show(3, f"  {event.model} is loaded")

    compile_operators(lambda: steps.show(3, "compiling the engine's native operators for this machine, once"))
    server.start()
    if not server.wait_ready(on_event=tell, cancel=stop):
        raise StoppedError
    steps.show(3, "ready")
    return server, model_dir, models


def serve(arguments: argparse.Namespace, run_dir: Path, stop: threading.Event) -> int:
    """Start, show, and stay until the end; returns the exit code."""
    try:
        server, model_dir, models = start(arguments, run_dir, stop)
    except StoppedError:
        return 0
    except (ServeError, RenderError, *START_ERRORS) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    model = next((name for name in ("tensorrt_llm_bls", "ensemble") if name in models), None)
    try:
        if model is not None:
            prompt = PromptRenderer(model_dir).render([{"role": "user", "content": QUESTION}])
            if not arguments.no_demo:
                ask_sample(server, model, prompt, stop)
            if not stop.is_set():
                print(usage_lines(server, model, prompt))
    except (ChatError, PromptError) as error:
        print(f"\nerror: the sample question failed: {error}", file=sys.stderr)
    print_ready(server, arguments, run_dir)
    print("Ctrl-C ends it.", flush=True)
    exit_code = watch(server, stop, arguments.restart)
    print("stopped", flush=True)
    return exit_code


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 0 after a requested stop and 1 after a failure."""
    arguments = build_parser().parse_args(argv)
    if problem := check(arguments):
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if warning := host_warning(arguments.host):
        print(warning, file=sys.stderr)
    stop = stop_event()
    run_dir = make_run_dir(arguments.run_dir)
    try:
        return serve(arguments, run_dir, stop)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
