"""Models named by their id on the Hugging Face Hub, fetched from a server on this machine that speaks its protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from backend_engine.hub import local_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BOTH_KINDS = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same once more",
    "original/consolidated.00.pth": b"and again",
    "original/params.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "README.md": b"# A model",
}
REPOSITORIES = {
    "team/both": BOTH_KINDS,
    "team/old": {"config.json": b"{}", "pytorch_model.bin": b"weights"},
    "team/packed": {"small.Q4_0.gguf": b"GGUF", "large.Q8_0.gguf": b"GGUF too"},
}


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """The calls that ``huggingface_hub`` makes to list and fetch the files of a repository."""

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        is_api = parts[0] == "api"
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        files = REPOSITORIES.get(repo)
        name = "/".join(parts[4:])
        if files is None or (not is_api and name not in files):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if files is None else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not is_api:
            body = files[name]
        elif "tree" in parts:
            listed = [{"type": "file", "path": f, "size": len(files[f]), "oid": digest(files[f])} for f in files]
            body = json.dumps(listed).encode()
        else:
            siblings = [{"rfilename": file} for file in files]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json" if is_api else "application/octet-stream")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest(body)}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def fetch(model: str, cache: Path, endpoint: str, **more: str) -> subprocess.CompletedProcess[str]:
    """``local_path`` in a process of its own: the library reads its environment when it is imported."""
    code = (
        "import sys\nfrom backend_engine.errors import ModelLoadError\nfrom backend_engine.hub import local_path\n"
        "try:\n    print(local_path(sys.argv[1]))\nexcept ModelLoadError as error:\n    sys.exit(f'refused: {error}')\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **more}
    return subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, check=False, env=environment, timeout=120
    )


def found(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_a_model_is_fetched_with_one_kind_of_weights_and_kept(hub: str, tmp_path: Path) -> None:
    done = fetch("team/both", tmp_path, hub)
    folder = found(done)
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == wanted
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert "%" in done.stderr, "no progress was shown"
    assert found(fetch("team/both", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")) == folder
    assert found(fetch("team/both", tmp_path, "http://127.0.0.1:9")) == folder  # nobody listens there


def test_older_kinds_of_weights_and_single_files_are_fetched(hub: str, tmp_path: Path) -> None:
    assert (found(fetch("team/old", tmp_path, hub)) / "pytorch_model.bin").read_bytes() == b"weights"
    assert found(fetch("team/packed/small.Q4_0.gguf", tmp_path, hub)).read_bytes() == b"GGUF"


@pytest.mark.parametrize("model", ["team/none", "team/packed/absent.gguf"])
def test_what_the_hub_does_not_have_is_told_in_a_line(model: str, hub: str, tmp_path: Path) -> None:
    done = fetch(model, tmp_path, hub)
    assert done.returncode == 1
    refusal = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert refusal and f"model '{model}' is no path that exists, and could not be fetched" in refusal[0]


def test_without_an_answer_and_without_a_copy_it_is_told_in_a_line(tmp_path: Path) -> None:
    done = fetch("team/both", tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 1 and "refused: model 'team/both' is no path that exists" in done.stderr


@pytest.mark.parametrize("path", ["/no/such/folder", "models", "./team/both", "a/b/c", "../x", "team/both/"])
def test_paths_are_left_alone(path: str) -> None:
    assert local_path(path) == path


def test_a_folder_that_is_spelled_like_an_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "team" / "both").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_path("team/both") == "team/both"
