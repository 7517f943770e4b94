"""``scripts/compat``: environments are made once, unavailable clients say why, checks judge, the table is written."""

import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from compat import client_check, client_env, llama_index, perf_analyzer_env, run_all, upstream_clients
from compat.client_check import FAILED, PASSED, UNAVAILABLE, CheckError, Outcome, Target
from compat.client_env import ClientUnavailableError
from compat.compat_table import BEGIN, END, Row, TableError, merge, read_rows, rows_of, update_page

DAY = date(2026, 2, 3)
SCRIPTS = Path(client_check.__file__).parent
Pip = Callable[[Path, list[str]], None]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compat"


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of the pip calls that ``client_env`` makes, none of which is carried out."""
    calls: list[list[str]] = []
    monkeypatch.setattr(client_env, "run_pip", lambda python, arguments: calls.append(list(arguments)))
    return calls


def complete(folder: Path, requirements: list[str]) -> None:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / client_env.MARKER).write_text(json.dumps(client_env.wanted(requirements)))


def test_an_environment_is_reused_only_while_it_fits(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    assert client_env.decide(folder, ["a==1"]) == "create"
    folder.mkdir()
    assert client_env.decide(folder, ["a==1"]) == "rebuild"  # cut short: no marker
    complete(folder, ["a==1"])
    assert client_env.decide(folder, ["a==1"]) == "reuse"
    assert client_env.decide(folder, ["a==2"]) == "rebuild"
    marker = folder / client_env.MARKER
    marker.write_text(marker.read_text().replace(client_env.wanted([])["python"], "3.9.1"))  # type: ignore[arg-type]
    assert client_env.decide(folder, ["a==1"]) == "rebuild"
    marker.write_text("{")
    assert client_env.decide(folder, ["a==1"]) == "rebuild"
    (folder / "bin" / "python").unlink()
    marker.write_text(json.dumps(client_env.wanted(["a==1"])))
    assert client_env.decide(folder, ["a==1"]) == "rebuild"


def test_an_environment_is_made_once(cache: Path, pip_calls: list[list[str]]) -> None:
    env = client_env.client_env("thing", ["a==1", "b"])
    assert env.folder == cache / "thing" and env.python.exists()
    client_env.client_env("thing", ["a==1", "b"])
    assert pip_calls == [["install", "a==1", "b"]]
    client_env.client_env("thing", ["a==2"])
    assert pip_calls[1:] == [["install", "a==2"]]


def test_a_failed_install_leaves_nothing_that_looks_complete(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(python: Path, arguments: list[str]) -> None:
        raise ClientUnavailableError("pip failed: ERROR: no such package")

    monkeypatch.setattr(client_env, "run_pip", fail)
    with pytest.raises(ClientUnavailableError, match="no such package"):
        client_env.client_env("thing", ["a==1"])
    assert client_env.decide(cache / "thing", ["a==1"]) == "rebuild"


def test_pips_last_error_is_the_reason(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'WARNING: slow' >&2\necho 'ERROR: first' >&2\necho 'ERROR: last' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ClientUnavailableError, match=r"^pip failed: ERROR: last$"):
        client_env.run_pip(python, ["install", "a"])


def test_one_file_is_taken_out_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(python: Path, arguments: list[str]) -> None:
        (folder,) = [word.removeprefix("--dest=") for word in arguments if word.startswith("--dest=")]
        assert "--platform=some_tag" in arguments and arguments[-1] == "thing==1"
        with zipfile.ZipFile(Path(folder) / "thing-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("thing/tool.py", "print(1)\n")

    monkeypatch.setattr(client_env, "run_pip", download)
    target = tmp_path / "kept" / "tool.py"
    assert client_env.wheel_member("thing==1", "thing/tool.py", target, "some_tag").read_text() == "print(1)\n"
    assert [path.name for path in target.parent.iterdir()] == ["tool.py"]
    monkeypatch.setattr(client_env, "run_pip", lambda *_: pytest.fail("it is there already"))
    assert client_env.wheel_member("thing==1", "thing/tool.py", target, "some_tag") == target
    monkeypatch.setattr(client_env, "run_pip", download)
    with pytest.raises(ClientUnavailableError, match=r"thing-1-py3-none-any.whl holds no thing/other.py"):
        client_env.wheel_member("thing==1", "thing/other.py", tmp_path / "other.py", "some_tag")


@pytest.mark.parametrize(("version", "old"), [((2, 36), True), ((2, 38), False), ((2, 41), False), ((3, 0), False)])
def test_an_old_c_library_needs_the_newer_loader(version: tuple[int, int], old: bool) -> None:
    assert perf_analyzer_env.needs_newer_loader(version) == old


def test_another_c_library_cannot_run_it() -> None:
    with pytest.raises(ClientUnavailableError, match="needs glibc, which this system does not use"):
        perf_analyzer_env.needs_newer_loader(None)


def test_the_c_librarys_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.confstr", lambda name: "glibc 2.36")
    assert perf_analyzer_env.glibc_version() == (2, 36)
    monkeypatch.setattr("os.confstr", lambda name: "musl")
    assert perf_analyzer_env.glibc_version() is None


def test_the_mirror_is_the_one_apt_uses() -> None:
    listing = "Docker\thttp://a/\nDebian\thttp://mirror/debian-security/\nDebian\thttp://mirror/debian/\n"
    assert perf_analyzer_env.pick_mirror(listing) == ("Debian", "http://mirror/debian/")
    with pytest.raises(ClientUnavailableError, match="apt knows no Debian or Ubuntu archive"):
        perf_analyzer_env.pick_mirror("Docker\thttp://a/\n")


def test_the_launcher_goes_through_the_loader_only_when_there_is_one() -> None:
    direct = perf_analyzer_env.launcher(Path("/c/perf_analyzer"), None)
    assert direct == '#!/bin/sh\nexec "/c/perf_analyzer" "$@"\n'
    aside = perf_analyzer_env.launcher(Path("/c/perf_analyzer"), Path("/n/lib"))
    assert 'exec "/n/lib/ld-linux-x86-64.so.2" --library-path "/n/lib:/lib' in aside
    assert aside.endswith('"/c/perf_analyzer" "$@"\n')


def test_missing_tools_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(ClientUnavailableError, match=r"needs glibc 2\.38, and apt-get is missing"):
        perf_analyzer_env.newer_libraries()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ClientUnavailableError, match="built for x86_64 only, this is aarch64"):
        perf_analyzer_env.find_perf_analyzer()


def test_every_failure_becomes_an_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        raise CheckError("it said no")

    def missing() -> str:
        raise ClientUnavailableError("pip failed")

    good = client_check.guarded("tool", "1", "a run", lambda: "fast")
    bad = client_check.guarded("tool", "1", "a run", fails)
    absent = client_check.guarded("tool", "1", "a run", missing)
    assert [each.result for each in (good, bad, absent)] == [PASSED, FAILED, UNAVAILABLE]
    assert client_check.report([good]) == 0
    assert client_check.report([good, absent]) == 2
    assert client_check.report([good, absent, bad]) == 1
    assert client_check.report([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tool 1: passed: a run (fast)" and lines[-1] == "tool 1: failed: a run (it said no)"


def test_a_client_that_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_check.run_client([sys.executable, "-c", "print('ok')"]) == "ok\n"
    script = tmp_path / "tool.py"
    script.write_text("import sys; print('a reason'); sys.exit('wrong')")
    with pytest.raises(CheckError, match=r"^tool.py ended with 1: a reason / wrong$"):
        client_check.run_client([sys.executable, script])
    monkeypatch.setattr(client_check, "CLIENT_TIMEOUT_S", 0.2)
    with pytest.raises(CheckError, match=r"did not end within 0.2 s"):
        client_check.run_client([sys.executable, "-c", "import time; time.sleep(20)"])
    assert client_check.last_json('noise\n{"a": 1}\n') == {"a": 1}
    with pytest.raises(CheckError, match="no JSON: 'noise'"):
        client_check.last_json("noise\n")


@pytest.fixture
def answering() -> Iterator[Callable[[str], Target]]:
    """Starts servers that answer every POST with one text."""
    servers: list[ThreadingHTTPServer] = []

    def start(text: str) -> Target:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"text_output": text}).encode())

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return Target(f"127.0.0.1:{servers[-1].server_address[1]}", "127.0.0.1:1", Path("/model"), "Count")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_reference_must_have_text(answering: Callable[[str], Target]) -> None:
    assert client_check.reference_text(answering(" 1 2")) == " 1 2"
    with pytest.raises(CheckError, match="answers 'Count' with nothing to compare with"):
        client_check.reference_text(answering(""))
    with pytest.raises(CheckError, match="cannot be reached"):
        client_check.reference_text(Target("127.0.0.1:9", "127.0.0.1:1", Path("/model")))


def test_upstream_scenarios_expect_the_servers_own_text(answering: Callable[[str], Target]) -> None:
    scenarios = {each.name: each for each in upstream_clients.end_to_end_scenarios(answering(" 1 2 3"), "ensemble")}
    assert scenarios["stop words"].flags[-1] == '[" 1 2"]'
    assert scenarios["batch"].flags[-1] == '[" 1 2 3", " 1 2 3"]'
    assert '["Count", "CountCount"]' in scenarios["batch"].flags
    with pytest.raises(CheckError, match="the output has \"0 \\[b' 1'\\]\""):
        scenarios["bad words"].check("0 [b' 1']\n0 [b' 2']\n")
    scenarios["bad words"].check("0 [b' 9']\n")
    with pytest.raises(CheckError, match="the output has no 'kv_cache_alloc_new_blocks'"):
        scenarios["perf metrics"].check("Received an error from server:\n")
    with pytest.raises(CheckError, match="two words are needed"):
        upstream_clients.end_to_end_scenarios(answering(" one"), "ensemble")


def test_a_folder_without_the_clients_is_named(tmp_path: Path) -> None:
    outcomes = upstream_clients.check(Target("127.0.0.1:9", "127.0.0.1:1", tmp_path), tmp_path)
    assert [outcome.result for outcome in outcomes] == [UNAVAILABLE] * 3
    assert "give a checkout of tag v0.19.0" in outcomes[0].notes


def page(folder: Path, table: str = "") -> Path:
    path = folder / "page.md"
    path.write_text(f"# Head\n\n{BEGIN}\n{table}\n{END}\n\ntail\n")
    return path


def test_the_page_gets_a_table_and_keeps_the_rest(tmp_path: Path) -> None:
    path = page(tmp_path)
    rows = rows_of([Outcome("tool", "1.0", "`a|b`", PASSED, "two\nlines")], DAY)
    update_page(path, rows, keep_old=False)
    text = path.read_text()
    assert "| tool | 1.0 | `a\\|b` | passed | 2026-02-03 | two lines |" in text
    assert text.startswith("# Head\n\n" + BEGIN) and text.endswith(END + "\n\ntail\n")
    assert read_rows(text) == [Row("tool", "1.0", "`a|b`", "passed", "2026-02-03", "two lines")]
    update_page(path, rows, keep_old=False)
    assert path.read_text() == text


def test_rows_that_were_not_run_again_stay_when_asked(tmp_path: Path) -> None:
    path = page(tmp_path)
    old = rows_of([Outcome("a", "1", "x", PASSED), Outcome("b", "1", "x", FAILED, "no")], DAY)
    update_page(path, old, keep_old=True)
    new = rows_of([Outcome("b", "2", "x", PASSED), Outcome("c", "1", "x", PASSED)], DAY)
    update_page(path, new, keep_old=True)
    assert [(row.client, row.version, row.result) for row in read_rows(path.read_text())] == [
        ("a", "1", "passed"), ("b", "2", "passed"), ("c", "1", "passed"),
    ]  # fmt: skip
    update_page(path, new, keep_old=False)
    assert [row.client for row in read_rows(path.read_text())] == ["b", "c"]
    assert merge([], new) == new


def test_a_page_without_markers_or_with_a_broken_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="needs the two lines"):
        read_rows("# nothing")
    broken = page(tmp_path, "| client |\n|---|\n| only one |").read_text()
    with pytest.raises(TableError, match="has 1 cells, expected 6"):
        read_rows(broken)


def test_the_projects_page_can_be_read_and_names_every_client() -> None:
    text = run_all.PAGE.read_text()
    assert all(len(row.cells()) == 6 for row in read_rows(text))
    for name in (*run_all.DECOUPLED, run_all.UPSTREAM):
        assert f"`scripts/compat/{name}.py`" in text, name
        assert (SCRIPTS / f"{name}.py").is_file()


@pytest.mark.parametrize(
    ("whole", "deltas", "result"),
    [
        (" 1 2 3", [" 1", " 2", " 3"], PASSED),
        (" 1 2", [" 1", " 2", " 3"], FAILED),
        (" 1 2 3", [" 1", " 3"], FAILED),
        (" 1 2 3", [" 1 2 3"], FAILED),
    ],
)
def test_a_client_that_shows_other_text_or_one_piece_fails(
    answering: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch, whole: str, deltas: list[str], result: str
) -> None:
    monkeypatch.setattr(llama_index, "client_env", lambda *_: client_env.ClientEnv(Path("/env")))
    output = json.dumps({"whole": whole, "deltas": deltas})
    monkeypatch.setattr(llama_index, "run_client", lambda command: output)
    (outcome,) = llama_index.check(answering(" 1 2 3"))
    assert outcome.result == result, outcome


def test_asking_for_upstream_clients_needs_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all.main(["--only", "upstream_clients"]) == 1
    assert capsys.readouterr().err == "error: --only upstream_clients needs --upstream CHECKOUT\n"


@pytest.mark.parametrize("name", ["litellm", "tritonclient", "upstream_clients", "run_all"])
def test_each_runs_as_a_script_beside_packages_of_the_same_name(name: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
