#!/usr/bin/env python3
"""Starts a Triton Server on a filled model repository, returns when it is ready, and leaves it running.

It takes the flags of the script of the same name that older set-ups call; those that only concern MPI are accepted
and named as without effect. A supervisor stays behind, which watches the server (``server_watch``) and removes what it
leaves; with ``--foreground`` it is this process, until Ctrl-C or SIGTERM. Everything that starts and ends processes is
in ``triton_server``.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from paths import default_log_path
from serve_options import count, port_number
from server_log import ModelEvent
from server_watch import START_ERRORS, watch
from triton_server import ADMIN_HEADER, LOOPBACK, ServerOptions, ServerStartError, TritonServer

__all__ = ["START_ERRORS", "ServerOptions", "ServerStartError", "TritonServer", "main", "watch"]

_WITHOUT_EFFECT = (
    ("--no-mpi",),
    ("--multi-model",),
    ("--disable-spawn-processes",),
    ("--oversubscribe",),
    ("--trtllm_llmapi_launch",),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line: our flags, and the accepted ones of older launchers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument(
        "--model_repo",
        "--model-repo",
        type=Path,
        required=True,
        help="filled model repository; it has no default, for there is none before fill_template.py has made one",
    )
    parser.add_argument("--tritonserver", type=Path, help="server binary (default: on PATH, else the embedded one)")
    parser.add_argument("--http_port", "--http-port", type=port_number, default=8000)
    parser.add_argument("--grpc_port", "--grpc-port", type=port_number, default=8001)
    parser.add_argument("--metrics_port", "--metrics-port", type=port_number, default=8002)
    parser.add_argument("--host", default="127.0.0.1", help="address of all three ports (default: loopback only)")
    parser.add_argument("--model-control-mode", choices=("none", "explicit"), default="none")
    parser.add_argument("--log", action="store_true", help="verbose server log")
    parser.add_argument(
        "--log-file", type=Path, help="where the log goes (default: in the cache; with --log triton_log.txt)"
    )
    parser.add_argument("--exit_timeout", "--exit-timeout", type=int, default=9, help="seconds stopping may take")
    parser.add_argument("--foreground", action="store_true", help="stay until Ctrl-C or SIGTERM, then end the server")
    parser.add_argument("--detach", action="store_true", help="what happens anyway without --foreground")
    parser.add_argument(
        "--restart",
        type=count,
        default=0,
        metavar="N",
        help="start the server again, N times at most, when it or (without explicit model control) a model dies",
    )
    parser.add_argument("--multimodal_gpu0_cuda_mem_pool_bytes", type=int, default=0, help="CUDA pool of GPU 0, bytes")
    old = parser.add_argument_group("accepted from older launchers, without effect")
    old.add_argument("--world_size", type=int, default=1, help="must be 1: workers are started by the engine itself")
    old.add_argument("--tensorrt_llm_model_name", default="tensorrt_llm", help="one name, or several with commas")
    old.add_argument(
        "--force", "-f", action="store_true",
        help="other servers on this machine are no hindrance: only the ports must be free, and that is always checked",
    )  # fmt: skip
    for names in _WITHOUT_EFFECT:
        old.add_argument(*names, action="store_true")
    return parser


def options_from(arguments: argparse.Namespace) -> ServerOptions:
    """Turn the parsed command line into ``ServerOptions``."""
    log_path = arguments.log_file or (
        Path("triton_log.txt") if arguments.log else default_log_path(arguments.http_port)
    )
    pool = arguments.multimodal_gpu0_cuda_mem_pool_bytes
    return ServerOptions(
        model_repository=arguments.model_repo.absolute(),
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        host=arguments.host,
        model_control_mode=arguments.model_control_mode,
        tritonserver=arguments.tritonserver,
        log_path=log_path.absolute(),
        log_verbose=3 if arguments.log else 0,
        exit_timeout_s=arguments.exit_timeout,
        extra_arguments=(f"--cuda-memory-pool-byte-size=0:{pool}",) if pool else (),
    )


def stop_event() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set from now on (call it in the main thread)."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return event


def host_warning(host: str) -> str:
    """Return the warning for an address that is not loopback, or an empty string."""
    if host in LOOPBACK:
        return ""
    return (
        f"warning: listening on {host}: everyone who can reach this machine can use the models; "
        "put a proxy that checks who is asking in front"
    )


def describe(server: TritonServer) -> str:
    """Return lines that say where ``server`` listens, where it logs and with which key it is controlled."""
    return (
        f"  HTTP     {server.http_url}\n  gRPC     {server.grpc_url}\n  metrics  {server.metrics_url}\n"
        f"  log      {server.log_path}\n"
        f"  model control key: send it as header {ADMIN_HEADER}: {server.admin_key}"
    )


def _print_event(event: ModelEvent) -> None:
    if event.state != "failed":
        print(f"  {event.model}: {event.state}", flush=True)


def _run(server: TritonServer, restarts: int, ready_pipe: int | None = None) -> int:
    """Start ``server``, tell ``ready_pipe`` when it is up, and stay until the end."""
    stop = stop_event()
    try:
        server.start()
        if not server.wait_ready(on_event=_print_event, cancel=stop):
            return 0
    except START_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    by_key = "Ctrl-C or: " if ready_pipe is None else ""
    print(f"ready; end it with {by_key}kill {os.getpid()}")
    print(describe(server), flush=True)
    if ready_pipe is not None:
        _leave_terminal(ready_pipe, server.log_path)
    return watch(server, stop, restarts)


def _leave_terminal(ready_pipe: int, log_path: Path) -> None:
    """Let go of the waiting parent's terminal and report readiness; errors go to the server's log from now on."""
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor, target in ((0, null), (1, null), (2, log)):
        os.dup2(target, descriptor)
    os.write(ready_pipe, b"ready")
    os.close(ready_pipe)


def _run_detached(server: TritonServer, restarts: int) -> int:
    """Run the server under a supervisor in a session of its own; return when it is ready (0) or has failed."""
    read_end, write_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.setsid()
        os.close(read_end)
        exit_code = _run(server, restarts, write_end)
        sys.stdout.flush()
        os._exit(exit_code)
    os.close(write_end)

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(supervisor, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    if os.read(read_end, 5) == b"ready":
        return 0
    return 1 if os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) else 0


def main(argv: list[str] | None = None) -> int:
    """Run the launcher; returns the exit code: 0 after a requested stop, 1 after a failure."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.world_size != 1:
        parser.error(f"--world_size {arguments.world_size} is not allowed: the launcher starts one server; use 1")
    for names in _WITHOUT_EFFECT:
        if getattr(arguments, names[0].lstrip("-").replace("-", "_")):
            print(f"note: {names[0]} has no effect: the server is a single process without MPI", file=sys.stderr)
    if warning := host_warning(arguments.host):
        print(warning, file=sys.stderr)
    server = TritonServer(options_from(arguments))
    if arguments.foreground:
        return _run(server, arguments.restart)
    return _run_detached(server, arguments.restart)


if __name__ == "__main__":
    sys.exit(main())
