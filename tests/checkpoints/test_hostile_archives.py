"""NeMo's archives and YAML: members that lead out, headers that lie, mappings that grow; and damaged GGUF files."""

import gzip
import io
import random
import tarfile
from pathlib import Path

import pytest

from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from tests.checkpoints.test_megatron import build
from tests.support import megatron_writer as writer
from tests.support.hostile import load, load_or_refuse, refusal
from tests.support.tiny_gguf import build_tiny, write_gguf

pytestmark = pytest.mark.timeout(120)


def laughs(entry: str, last: str) -> str:
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{i}: &a{i} {entry.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 40)]
    return "\n".join([*lines, last])


YAMLS = {
    "lists of lists": laughs("[{}]", "hidden_size: *a39"),
    "keys of keys": laughs("[{}]", "? *a39\n: 1"),
    "merged": laughs("{{<<: [{}]}}", "hidden_size: 1"),
    "in itself": "hidden_size: &a [*a]",
    "deep": "hidden_size: " + "[" * 10000,
    "deep mappings": "\n".join(" " * i + "a:" for i in range(500)),
    "an object": "hidden_size: !!python/object/apply:os.system ['touch /tmp/x']",
    "a name": "hidden_size: !!python/name:os.system",
    "a truth": "hidden_size: !!bool maybe",
    "no integer": "hidden_size: !!int ''",
    "no number": "hidden_size: !!float ''",
    "sixties": "hidden_size: !!float 1" + ":1" * 400,
    "digits": "hidden_size: " + "9" * 5000,
    "no time": "hidden_size: !!timestamp never",
    "no day": "hidden_size: 2000-99-99",
    "a binary": "hidden_size: !!binary ä",
    "a zero": "hidden_size: \0",
    "a list as a key": "? [a]\n: 1",
    "not text": "\ud800",
    "huge": "a: " + "b" * (1 << 19),
    "empty": "",
    "a word": "word",
}


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.parametrize("file", ["model_config.yaml", "context/model.yaml"])
def test_yaml(name: str, file: str, tmp_path: Path) -> None:
    data = YAMLS[name].encode(errors="surrogatepass")
    path = writer.pack(tmp_path / "a.nemo", {file: data, "model_weights.ckpt": b""})
    assert "model" in refusal(lambda: open_checkpoint(path))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writer.pack(tmp_path_factory.mktemp("nemo") / "a.nemo", writer.nemo1_files(build("llama")))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    build_tiny("llama", folder)
    return write_gguf(folder, folder / "a.gguf")


def test_what_is_damaged_here_is_whole(archive: Path, gguf: Path) -> None:
    assert load_or_refuse(archive) is None and load_or_refuse(gguf) is None


PAX = {
    "path": {"path": "../../x"},
    "lines": {"path": "a\nb"},
    "size": {"size": "9" * 18},
    "no size": {"size": "many"},
    "sparse": {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "x",
        "GNU.sparse.realsize": "9" * 15,
    },
    "map": {"GNU.sparse.map": "1,2,x"},
    "digits": {"comment": "1" * (1 << 19)},
    "spaces": {"comment": " " * (1 << 19) + "1 ="},
}


@pytest.mark.parametrize("name", PAX)
def test_headers_of_tar_files(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.nemo", "w", format=tarfile.PAX_FORMAT, pax_headers={}) as written:
        info = tarfile.TarInfo("model_config.yaml")
        info.pax_headers = PAX[name]
        info.size = 4
        written.addfile(info, io.BytesIO(b"a: b"))
    assert "a.nemo" in refusal(lambda: open_checkpoint(tmp_path / "a.nemo")) or name in ("digits", "spaces", "no size")


def test_archives_that_grow(tmp_path: Path) -> None:
    path = tmp_path / "a.nemo"
    path.write_bytes(gzip.compress(bytes(1 << 28), 9))
    assert "unpacks to more than" in refusal(lambda: open_checkpoint(path))
    path.write_bytes(gzip.compress(gzip.compress(bytes(1 << 20), 9)))
    refusal(lambda: open_checkpoint(path))


@pytest.mark.parametrize("kind", ["archive", "gguf"])
def test_damaged_bytes(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    whole = request.getfixturevalue(kind)
    data, path, picker = whole.read_bytes(), tmp_path / whole.name, random.Random(1)
    num_refused = 0
    for _ in range(60):
        found = bytearray(data)
        for _ in range(picker.choice((1, 2, 5))):
            width = picker.choice((1, 4, 8))
            at = picker.randrange(picker.choice((600, 4000)))
            found[at : at + width] = picker.choice((0, 255, picker.randrange(256))).to_bytes(1, "little") * width
        path.write_bytes(found[: picker.choice((len(found), len(found), picker.randrange(len(found))))])
        num_refused += load_or_refuse(path) is not None
    assert num_refused > 20
    path.write_bytes(data[: len(data) // 2])
    refusal(lambda: load(path))
