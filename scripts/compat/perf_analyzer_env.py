"""Gets NVIDIA's perf_analyzer and makes it run, also where the C library is older than the one it was built for.

The binary needs glibc 2.38. On an older system the loader, C and C++ libraries of a newer release of the same
distribution are unpacked aside in the cache (with apt, through the sources this machine is configured with) and the
binary is started through that loader; nothing of the system is changed.
"""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from compat.client_env import ClientUnavailableError, compat_dir, last_line, say, wheel_member

VERSION = "2.60.0"
NEEDED_GLIBC = (2, 38)
WHEEL_TAG = "manylinux_2_38_x86_64"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1")


@dataclass(frozen=True)
class NewerRelease:
    """The release of a distribution whose C library is new enough, and the keyring that signs it."""

    suite: str
    keyring: str


RELEASES = {
    "Debian": NewerRelease("trixie", "/usr/share/keyrings/debian-archive-keyring.gpg"),
    "Ubuntu": NewerRelease("noble", "/usr/share/keyrings/ubuntu-archive-keyring.gpg"),
}


@dataclass(frozen=True)
class PerfAnalyzer:
    """A perf_analyzer that runs here: the program ``path`` (put its folder on PATH for tools that call it)."""

    path: Path
    version: str = VERSION


def glibc_version() -> tuple[int, int] | None:
    """Version of the running C library, None where it is not glibc."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    found = re.fullmatch(r"glibc (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def needs_newer_loader(version: tuple[int, int] | None) -> bool:
    """True when a binary for ``NEEDED_GLIBC`` cannot start on glibc ``version``. Raises for other C libraries."""
    if version is None:
        raise ClientUnavailableError("perf_analyzer needs glibc, which this system does not use")
    return version < NEEDED_GLIBC


def find_perf_analyzer() -> PerfAnalyzer:
    """Return a perf_analyzer that runs on this machine, fetching what is missing with progress.

    Raises ``ClientUnavailableError`` with one line: what is missing.
    """
    if platform.machine() != "x86_64":
        raise ClientUnavailableError(f"perf_analyzer {VERSION} is built for x86_64 only, this is {platform.machine()}")
    is_old = needs_newer_loader(glibc_version())
    folder = compat_dir() / f"perf-analyzer-{VERSION}"
    binary = folder / "lib" / "perf_analyzer"
    binary.parent.mkdir(parents=True, exist_ok=True)
    wheel_member(f"perf-analyzer=={VERSION}", "perf_analyzer/bin/perf_analyzer", binary, WHEEL_TAG)
    binary.chmod(0o755)
    program = folder / "bin" / "perf_analyzer"
    program.parent.mkdir(exist_ok=True)
    program.write_text(launcher(binary, newer_libraries() if is_old else None))
    program.chmod(0o755)
    tried = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise ClientUnavailableError(f"perf_analyzer does not start: {last_line(tried.stdout + tried.stderr)}")
    return PerfAnalyzer(program)


def launcher(binary: Path, libraries: Path | None) -> str:
    """Text of a shell script that starts ``binary``, through the loader in ``libraries`` when there is one."""
    if libraries is None:
        return f'#!/bin/sh\nexec "{binary}" "$@"\n'
    system = "/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu"
    return f'#!/bin/sh\nexec "{libraries}/{LOADER}" --library-path "{libraries}:{system}" "{binary}" "$@"\n'


def newer_libraries() -> Path:
    """Return a folder with a newer loader, C and C++ libraries, unpacked aside from the distribution's packages."""
    folder = compat_dir() / "newer-libraries"
    libraries = folder / LIBRARIES
    if (folder / "complete").exists():
        return libraries
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise ClientUnavailableError(f"perf_analyzer needs glibc 2.38, and {tool} is missing to get it aside")
    origin, mirror = apt_mirror()
    release = RELEASES[origin]
    say(f"this system's glibc is {glibc_version()}; getting {', '.join(PACKAGES)} of {origin} {release.suite} aside")
    work = compat_dir() / "newer-libraries.download"
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    download_packages(work, f"deb [signed-by={release.keyring}] {mirror} {release.suite} main\n")
    folder.mkdir(parents=True)
    for package in sorted(work.glob("*.deb")):
        say(f"unpacking {package.name}")
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    if not (libraries / LOADER).exists():
        raise ClientUnavailableError(f"the packages {', '.join(PACKAGES)} hold no {LIBRARIES}/{LOADER}")
    (folder / "complete").touch()
    shutil.rmtree(work)
    return libraries


def apt_mirror() -> tuple[str, str]:
    """Return (distribution, mirror) that this machine's apt is configured with."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)\t$(REPO_URI)"], capture_output=True, text=True, check=False
    )
    return pick_mirror(listing.stdout)


def pick_mirror(listing: str) -> tuple[str, str]:
    """Pick the first line ``ORIGIN<tab>URI`` of a distribution we know a newer release of; security archives aside."""
    for line in listing.splitlines():
        origin, _, uri = line.partition("\t")
        if origin in RELEASES and uri and "security" not in uri:
            return origin, uri
    known = " or ".join(RELEASES)
    raise ClientUnavailableError(
        f"perf_analyzer needs glibc 2.38: apt knows no {known} archive to get it from (run apt-get update first)"
    )


def download_packages(work: Path, source: str) -> None:
    """Download ``PACKAGES`` into ``work`` from one apt source line, leaving the system's apt state as it is."""
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "cache" / "archives" / "partial").mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(source)
    settings = {
        "Dir::State::lists": work / "lists", "Dir::State::status": work / "status", "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": work / "sources.list", "Dir::Etc::sourceparts": "/nonexistent",
        "APT::Sandbox::User": "root",
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    for command in (["update"], ["download", *PACKAGES]):
        say(f"apt-get {' '.join(command)} (in {work})")
        done = subprocess.run(
            ["apt-get", "-q", *options, *command], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = last_line(done.stdout + done.stderr)
            raise ClientUnavailableError(f"apt-get {command[0]} for a newer glibc failed: {reason}")
