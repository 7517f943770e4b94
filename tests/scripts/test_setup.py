"""setup.sh: what it installs and in which order, that it does so once, and the one line each obstacle gives."""

import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "scripts" / "setup.sh"
TOOLS = (
    "awk bash cat cp cut df dirname env flock getconf grep head kill ls mkdir mktemp rm sed sha256sum sleep sort tail "
    "uname"
)
# Stands for a Python: says its version, and writes down what it is asked to do. Environments it makes hold a copy.
FAKE_PYTHON = """#!/bin/bash
echo "$*" >> "$FAKE_LOG"
case "$*" in
    *version_info*) echo "${FAKE_VERSION:-3.11}" ;;
    *"import ensurepip"*) exit "${FAKE_NO_VENV:-0}" ;;
    *embedded_server.py*)
        [ -z "${FAKE_NO_LIBPYTHON:-}" ] || { echo "error: libpython3.11.so.1.0 is missing" >&2; exit 1; } ;;
    "-m venv --clear "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    *"pip install"*"${FAKE_PIP_FAILS_ON:-nothing fails}"*) echo "$FAKE_PIP_SAYS" >&2; exit 1 ;;
    *"pip install"*) [ -z "${FAKE_PIP_HANGS:-}" ] || exec sleep 60 ;;
esac
"""


class Machine:
    """A PATH on which only the basic tools, the stubs of the test and the fake Python are found."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS.split():
            found = next((place for place in ("/usr/bin", "/bin") if Path(place, tool).exists()), None)
            if found:
                (self.bin / tool).symlink_to(Path(found, tool))
        self.venv = folder / "venv"
        self.log = folder / "log"
        self.log.touch()
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "INFLIGHT_VENV": str(self.venv),
            "INFLIGHT_DEVICE": "cpu",
            "FAKE_LOG": str(self.log),
        }
        self.stub("python3.11", FAKE_PYTHON)

    def stub(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/bash", str(SETUP), *arguments],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def error(self, *arguments: str, **environment: str) -> str:
        done = self.run(*arguments, **environment)
        assert done.returncode == 1, done
        assert done.stderr.startswith("error: "), done
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def pip_installs(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "pip install" in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_installs_torch_first_and_everything_by_pin(machine: Machine) -> None:
    done = machine.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^\[(\d)/4\] ", done.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    torch, packages, without_dependencies = machine.pip_installs()
    assert "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu" in torch
    assert packages.endswith(f"-r {ROOT}/requirements.txt")
    assert without_dependencies.endswith(f"--no-deps -r {ROOT}/requirements-no-deps.txt")
    assert all(f"-c {ROOT}/constraints.txt" in line for line in machine.pip_installs())


def test_the_second_time_does_nothing_and_is_fast(machine: Machine) -> None:
    machine.run()
    machine.log.write_text("")
    started = time.monotonic()
    done = machine.run()
    assert time.monotonic() - started < 1
    assert (done.returncode, done.stdout, done.stderr, machine.log.read_text()) == (0, "", "", "")


def test_dev_adds_the_tools_and_then_covers_both(machine: Machine) -> None:
    machine.run()
    machine.log.write_text("")
    assert machine.run("--dev").returncode == 0
    assert any(f"-r {ROOT}/requirements-dev.txt" in line for line in machine.pip_installs())
    machine.log.write_text("")
    assert machine.run().stdout == machine.run("--dev").stdout == machine.log.read_text() == ""


def test_another_device_sets_up_again(machine: Machine) -> None:
    machine.run()
    machine.log.write_text("")
    assert machine.run(INFLIGHT_DEVICE="cuda").returncode == 0
    assert machine.pip_installs()[0].endswith(" torch==2.13.0")


def test_an_interrupted_set_up_is_taken_up_again(machine: Machine) -> None:
    assert machine.run(FAKE_PIP_FAILS_ON="requirements.txt", FAKE_PIP_SAYS="ERROR: broken").returncode == 1
    assert machine.run().returncode == 0
    assert machine.run().stdout == ""


def test_without_the_cpu_index_the_plain_package_is_taken(machine: Machine) -> None:
    done = machine.run(FAKE_PIP_FAILS_ON="torch==2.13.0+cpu", FAKE_PIP_SAYS="ERROR: No matching distribution")
    assert done.returncode == 0
    assert "taking the package index's" in done.stdout
    assert machine.pip_installs()[1].endswith(" torch==2.13.0")


@pytest.mark.parametrize(
    ("uname", "expected"), [("Darwin", "this machine is Darwin arm64"), ("Linux", "this machine is Linux arm64")]
)
def test_other_platforms_are_told(machine: Machine, uname: str, expected: str) -> None:
    machine.stub("uname", f'#!/bin/bash\n[ "$1" = -s ] && echo {uname} || echo arm64\n')
    assert f"{expected}; Linux on x86_64 is needed" in machine.error()


@pytest.mark.parametrize(
    ("getconf", "expected"),
    [("echo glibc 2.31", "glibc is 2.31; 2.35 or later is needed"), ("exit 1", "no glibc found")],
)
def test_an_old_or_other_libc_is_told(machine: Machine, getconf: str, expected: str) -> None:
    machine.stub("getconf", f"#!/bin/bash\n{getconf}\n")
    assert expected in machine.error()


def test_no_suitable_python_lists_what_was_found(machine: Machine) -> None:
    machine.stub("python3", FAKE_PYTHON)
    (machine.bin / "python3.11").unlink()
    assert "Python 3.11 or 3.12 is needed, found: python3 (3.13)" in machine.error(FAKE_VERSION="3.13")
    (machine.bin / "python3").unlink()
    assert "found: none; install python3.11" in machine.error()


def test_the_python_asked_for_must_fit(machine: Machine) -> None:
    old = machine.stub("oldpython", FAKE_PYTHON)
    assert f"PYTHON={old} is 3.9; set it to a Python 3.11 or 3.12" in machine.error(PYTHON=str(old), FAKE_VERSION="3.9")
    assert "PYTHON=/nowhere is not working" in machine.error(PYTHON="/nowhere")
    other = machine.stub("otherpython", FAKE_PYTHON)
    assert f"({other})" in machine.run(PYTHON=str(other), FAKE_VERSION="3.12").stdout


def test_a_missing_venv_module_names_the_package(machine: Machine) -> None:
    assert "install python3.11-venv (apt-get install python3.11-venv)" in machine.error(FAKE_NO_VENV="1")


def test_a_missing_libpython_is_told_unless_a_server_is_there(machine: Machine) -> None:
    assert machine.error(FAKE_NO_LIBPYTHON="1") == "error: libpython3.11.so.1.0 is missing\n"
    machine.stub("tritonserver", "#!/bin/bash\n")
    assert machine.run(FAKE_NO_LIBPYTHON="1").returncode == 0


def test_a_full_disk_is_told_before_anything_is_installed(machine: Machine) -> None:
    machine.stub("df", "#!/bin/bash\necho Filesystem\necho /dev/x 1000 900 102400 90% /\n")
    error = machine.error()
    assert "disk full: " in error
    assert "has 100 MiB free and set-up needs 4096 MiB" in error
    assert machine.pip_installs() == []


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk full while installing the packages"),
        (
            "WARNING: Retrying (Retry(total=0)) after NewConnectionError",
            "no network: pip could not download the packages",
        ),
        ("noise\nERROR: odd thing", "cannot install the packages: odd thing"),
    ],
)
def test_pip_failures_become_one_line(machine: Machine, says: str, expected: str) -> None:
    assert expected in machine.error(FAKE_PIP_FAILS_ON="requirements.txt", FAKE_PIP_SAYS=says)


def test_real_pip_without_network_is_one_line(machine: Machine, tmp_path: Path) -> None:
    for name in ("python3.11", "python3.12"):
        (machine.bin / name).unlink(missing_ok=True)
    environment = {
        "PYTHON": os.path.realpath("/proc/self/exe"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    assert "no network: pip could not download torch" in machine.error(**environment)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_running_install_too(machine: Machine, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        ["/bin/bash", str(SETUP)],
        env=machine.environment | {"FAKE_PIP_HANGS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while not machine.pip_installs() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    output, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (code, "interrupted\n"), output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_bad_arguments_and_values_are_refused(machine: Machine) -> None:
    assert "unknown argument --fast; use --dev or nothing" in machine.error("--fast")
    assert "INFLIGHT_DEVICE=tpu is not allowed; use cpu or cuda" in machine.error(INFLIGHT_DEVICE="tpu")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_names(path: Path) -> set[str]:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return {canonical(re.split(r"[\[=<>]", line)[0]) for line in lines if line}


def test_every_package_is_pinned() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    pinned = {canonical(name) for name in pins}
    for path in ROOT.glob("requirements*.txt"):
        assert requirement_names(path) <= pinned, path
    assert pins["numpy"] == "1.26.4"
    assert f"torch_version={pins['torch']}\n" in SETUP.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonical(re.split(r"[\[=<>]", item)[0]) for item in project["dependencies"]} - {"torch"}
    assert needed <= requirement_names(ROOT / "requirements.txt")
