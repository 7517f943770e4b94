#!/usr/bin/env python3
"""Runs every external client against servers it starts, and writes the table of docs/compatibility.md.

One server has decoupled models (streaming), the other has not; both serve the default model unless told otherwise.
The first run installs the clients into the cache, which takes some minutes and tells its progress.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat import (
    genai_perf,
    litellm,
    llama_index,
    perf_analyzer,
    sglang_bench,
    tritonclient,
    upstream_clients,
)  # fmt: skip
from compat.client_check import Check, Outcome, Target, report
from compat.client_env import say
from compat.compat_table import TableError, rows_of, update_page
from fetch_model import FetchError, fetch
from paths import REPOSITORY_ROOT, cache_dir
from render_repository import render_repository
from triton_process import PortInUseError, free_ports
from triton_server import ServerOptions, ServerStartError, TritonServer

PAGE = REPOSITORY_ROOT / "docs" / "compatibility.md"
# Client by name: what runs on a decoupled deployment, and what on one that is not.
DECOUPLED: dict[str, Check] = {
    "perf_analyzer": perf_analyzer.check, "genai_perf": genai_perf.check, "llama_index": llama_index.check,
    "litellm": litellm.check, "sglang_bench": sglang_bench.check, "tritonclient": tritonclient.check,
}  # fmt: skip
WHOLE: dict[str, Check] = {"perf_analyzer": perf_analyzer.check, "tritonclient": tritonclient.check}
UPSTREAM = "upstream_clients"


@contextlib.contextmanager
def served(model: Path, decoupled: bool, prompt: str) -> Iterator[Target]:
    """A ready server over ``model``, as the target of the checks; stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="inflight-compat-") as scratch:
        repository = Path(scratch) / "repository"
        render_repository(repository, {"decoupled_mode": str(decoupled).lower()}, model)
        run_dir, log = Path(scratch) / "run", Path(scratch) / "server.log"
        say(f"starting a server, decoupled_mode:{str(decoupled).lower()}, model {model}")
        http_port, grpc_port, metrics_port = free_ports()
        options = ServerOptions(repository, http_port, grpc_port, metrics_port, run_dir=run_dir, log_path=log)
        with TritonServer(options) as server:
            http = server.http_url.removeprefix("http://")
            yield Target(http, server.grpc_url, model, prompt, decoupled=decoupled)


def run_checks(model: Path, prompt: str, only: set[str], checkout: Path | None) -> list[Outcome]:
    """Run the chosen clients on both deployments, one after another."""
    outcomes = []
    for decoupled, checks in ((True, DECOUPLED), (False, WHOLE)):
        chosen = dict(checks)
        if checkout is not None:
            chosen[UPSTREAM] = partial(upstream_clients.check, checkout=checkout)
        chosen = {name: check for name, check in chosen.items() if not only or name in only}
        if not chosen:
            continue
        with served(model, decoupled, prompt) as target:
            for name, check in chosen.items():
                say(f"[{name}] running")
                for outcome in check(target):
                    say(f"  {outcome.line()}")
                    outcomes.append(outcome)
    return outcomes


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="Hugging Face folder to serve (default: the default model)")
    parser.add_argument("--prompt", default=Target.prompt, help="a prompt that it continues (%(default)r)")
    parser.add_argument("--upstream", type=Path, help="checkout of the upstream repository, to run its clients too")
    parser.add_argument(
        "--only", action="append", default=[], choices=[*DECOUPLED, UPSTREAM], help="run this client (repeatable)"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write the table into (%(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 0, 1 when a client failed, 2 when one cannot be installed here."""
    arguments = build_parser().parse_args(argv)
    if UPSTREAM in arguments.only and arguments.upstream is None:
        print(f"error: --only {UPSTREAM} needs --upstream CHECKOUT", file=sys.stderr)
        return 1
    try:
        model = arguments.model.absolute() if arguments.model else fetch(cache_dir(), "float32")
        checkout = arguments.upstream.absolute() if arguments.upstream else None
        outcomes = run_checks(model, arguments.prompt, set(arguments.only), checkout)
        # Without --upstream its rows stay from the last time.
        keep_old = bool(arguments.only) or checkout is None
        update_page(arguments.page, rows_of(outcomes, date.today()), keep_old)
    except (FetchError, ServerStartError, PortInUseError, TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
