"""The command line of ``serve.sh``, and the checks that need no set-up: flags, ports, model folder.

``serve.sh`` runs it before anything long starts, with a bare Python; ``serve.py`` parses with it. Needs only the
standard library.
"""

import argparse
import re
import sys
from pathlib import Path

from triton_process import PortInUseError, check_ports

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w.-]+\.gguf)?")


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/serve.sh", description="Serve a language model on Triton Server.", allow_abbrev=False
    )
    parser.add_argument(
        "--model", metavar="PATH_OR_HUB_ID", help="a checkpoint in any format, or a hub id (default: a small model)"
    )
    parser.add_argument("--http-port", type=port_number, default=8000)
    parser.add_argument("--grpc-port", type=port_number, default=8001)
    parser.add_argument("--metrics-port", type=port_number, default=8002)
    parser.add_argument("--host", default="127.0.0.1", help="address of all three ports (default: loopback only)")
    parser.add_argument("--no-demo", action="store_true", help="do not ask the sample question")
    parser.add_argument("--model-control-mode", choices=("none", "explicit"), default="none")
    parser.add_argument(
        "--restart", type=count, default=0, metavar="N", help="start the server again, N times at most, when it dies"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY:VALUE",
        help="fill a placeholder of the templates, such as triton_max_batch_size:16 (repeatable)",
    )
    parser.add_argument("--log-file", type=Path, help="where the server's log goes (default: in the cache)")
    parser.add_argument("--run-dir", type=Path, help="where this run's folder is made (default: in the cache)")
    parser.add_argument("--tritonserver", type=Path, help="server binary (default: on PATH, else the embedded one)")
    parser.add_argument("--print-json", action="store_true", help="when ready, also print one line of JSON")
    return parser


def port_number(text: str) -> int:
    """Parse a TCP port for argparse."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use 1 to 65535")
    return int(text)


def count(text: str) -> int:
    """Parse a number of times for argparse."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of times; use 0 or more")
    return int(text)


def check(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the options in one line, or an empty string."""
    for item in arguments.settings:
        if not item.partition(":")[0] or ":" not in item:
            return f"--set {item!r} is not allowed; use KEY:VALUE"
    model = arguments.model
    if model is not None and not Path(model).expanduser().exists() and not is_hub_id(model):
        return f"--model {model!r} is neither a folder, nor a file, nor a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    ports = (arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    try:
        check_ports(arguments.host, zip(flags, ports, strict=True))
    except PortInUseError as error:
        return str(error)
    return ""


def is_hub_id(model: str) -> bool:
    """Say whether ``model`` can only mean a model of the Hugging Face hub."""
    return _HUB_ID.fullmatch(model) is not None and not Path(model).expanduser().exists()


if __name__ == "__main__":
    if problem := check(build_parser().parse_args()):
        sys.exit(f"error: {problem}")
