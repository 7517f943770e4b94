"""What every client's check shares: the server under test, the reference answer, the result line and exit code.

The reference is the answer of the same server to a plain HTTP request, so a check works with any model: what the
client shows its user must be that text. It never starts a server; ``run_all.py`` does.
"""

import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compat.client_env import ClientUnavailableError, last_line

PASSED, FAILED, UNAVAILABLE = "passed", "failed", "not installable"
EXIT_CODES = {PASSED: 0, FAILED: 1, UNAVAILABLE: 2}
DRIVERS = Path(__file__).resolve().parent / "drivers"
CLIENT_TIMEOUT_S = 600


class CheckError(Exception):
    """The client did not get what it needs; the message is one line."""


@dataclass(frozen=True)
class Target:
    """The server under test: ``http`` and ``grpc`` as ``host:port``, its tokenizer's folder, and a prompt for it.

    ``decoupled`` tells how its models were deployed (``decoupled_mode``).
    """

    http: str
    grpc: str
    tokenizer: Path
    prompt: str = "The capital of France is"
    max_tokens: int = 12
    decoupled: bool = True


@dataclass(frozen=True)
class Outcome:
    """One line of the table: which client in which version, what was run, how it went, and notes."""

    client: str
    version: str
    ran: str
    result: str
    notes: str = ""

    def line(self) -> str:
        """The line that a script prints."""
        notes = f" ({self.notes})" if self.notes else ""
        return f"{self.client} {self.version}: {self.result}: {self.ran}{notes}"


Check = Callable[[Target], list[Outcome]]


def passed(client: str, version: str, ran: str, notes: str = "") -> Outcome:
    """A check that went well."""
    return Outcome(client, version, ran, PASSED, notes)


def guarded(client: str, version: str, ran: str, check: Callable[[], str]) -> Outcome:
    """Run ``check`` (which returns notes); a ``CheckError`` becomes a failed, an unavailable client its own outcome."""
    try:
        return passed(client, version, ran, check())
    except CheckError as error:
        return Outcome(client, version, ran, FAILED, str(error))
    except ClientUnavailableError as error:
        return Outcome(client, version, ran, UNAVAILABLE, str(error))


def need(condition: bool, message: str) -> None:
    """Raise ``CheckError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise CheckError(message)


def generate(target: Target, fields: Mapping[str, object]) -> dict[str, object]:
    """Answer of the server's ensemble to one plain ``/generate``. Raises ``CheckError``."""
    url = f"http://{target.http}/v2/models/ensemble/generate"
    try:
        with urllib.request.urlopen(url, json.dumps(dict(fields)).encode(), timeout=CLIENT_TIMEOUT_S) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        raise CheckError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise CheckError(f"{url} cannot be reached: {error}") from None
    need("error" not in answer, f"{url} answered {answer}")
    return dict(answer)


def reference_text(target: Target, prompt: str = "", max_tokens: int = 0, **fields: object) -> str:
    """Greedy text of a prompt (the target's, and as long, unless told otherwise) by the ensemble, without the prompt.

    ``fields`` are sent along. Raises ``CheckError``, also when the text is empty.
    """
    asked = {"text_input": prompt or target.prompt, "max_tokens": max_tokens or target.max_tokens, **fields}
    text = str(generate(target, {**asked, "exclude_input_in_output": True})["text_output"])
    need(text != "", f"the model answers {asked['text_input']!r} with nothing to compare with; use --prompt")
    return text


def run_client(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a client's program and return its standard output. Raises ``CheckError`` with its last line if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, env=environment, cwd=cwd, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"{Path(words[0]).name} did not end within {CLIENT_TIMEOUT_S} s") from None
    if done.returncode != 0:
        name = next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)
        said = " / ".join(last_line(text)[-300:] for text in (done.stdout, done.stderr) if text.strip())
        raise CheckError(f"{name} ended with {done.returncode}: {said}")
    return done.stdout


def last_json(output: str) -> dict[str, object]:
    """The JSON object on the last line of a driver's output. Raises ``CheckError``."""
    try:
        return dict(json.loads(last_line(output)))
    except ValueError:
        raise CheckError(f"the driver's last line is no JSON: {last_line(output)!r}") from None


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that every client's script has."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--url", default="localhost:8000", help="HTTP host:port of the server (default %(default)s)")
    parser.add_argument("--grpc", default="localhost:8001", help="gRPC host:port (default %(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="folder of the served model (default: the default model's)")
    parser.add_argument("--prompt", default=Target.prompt, help="a prompt that the model continues (%(default)r)")
    parser.add_argument("--not-decoupled", action="store_true", help="the server runs with decoupled_mode:false")
    return parser


def target_from(arguments: argparse.Namespace) -> Target:
    """The server that the command line names."""
    from fetch_model import model_folder
    from paths import cache_dir

    return Target(
        http=arguments.url.removeprefix("http://"), grpc=arguments.grpc,
        tokenizer=arguments.tokenizer or model_folder(cache_dir(), "float32"),
        prompt=arguments.prompt, decoupled=not arguments.not_decoupled,
    )  # fmt: skip


def run_script(check: Check, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run one client's check from the command line: one line a result; returns the exit code."""
    return report(check(target_from(build_parser(description).parse_args(argv))))


def report(outcomes: Sequence[Outcome]) -> int:
    """Print one line an outcome and return the exit code: 1 when one failed, else 2 when one cannot be installed."""
    for outcome in outcomes:
        print(outcome.line(), flush=True)
    codes = {EXIT_CODES[outcome.result] for outcome in outcomes}
    return 1 if 1 in codes else max(codes, default=1)


def main_guard(check: Check, description: str | None) -> None:
    """End the process with the exit code of ``run_script``."""
    sys.exit(run_script(check, description))
