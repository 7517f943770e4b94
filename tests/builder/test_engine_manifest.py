"""engine.json: what was written is read, what was changed is refused, and a later format says who reads it."""

import dataclasses
import hashlib
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backend_engine
from backend_engine.config import engine_manifest
from backend_engine.config.build_config import PRECISIONS, BuildConfig
from backend_engine.config.engine_manifest import (
    ENGINE_FILE,
    FORMAT_VERSION,
    EngineManifest,
    FileEntry,
    PartForm,
    manifest_text,
    read_manifest,
)
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.errors import ModelLoadError
from tests.support.engine_folders import some_manifest

PRINTABLE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.isprintable)
NAMES = PRINTABLE.filter(lambda name: name[0] != "." and not {"/", "\\"} & set(name) and name != ENGINE_FILE)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PRINTABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PRINTABLE, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(PRINTABLE, JSON_VALUES, max_size=4)
SIZES = st.integers(1, 2**31 - 1)
POSITIVE = st.floats(min_value=1e-30, max_value=1e30)
MANIFESTS = st.builds(
    EngineManifest,
    architecture=PRINTABLE,
    build=st.builds(
        BuildConfig,
        *(SIZES | st.none() for _ in range(4)),
        precision=st.sampled_from(PRECISIONS),
        tensor_parallel_size=SIZES,
        pipeline_parallel_size=SIZES,
        plugins=st.lists(PRINTABLE, max_size=3).map(tuple),
    ),
    quantization=OBJECTS,
    kv_cache_dtype=st.sampled_from(sorted(KV_FORMATS)) | st.none(),
    kv_scales=st.dictionaries(st.integers(0, 9999), st.tuples(POSITIVE, POSITIVE), max_size=4),
    packed=st.dictionaries(
        PRINTABLE, st.lists(st.builds(PartForm, OBJECTS, SIZES), min_size=1, max_size=2).map(tuple), max_size=3
    ),
    versions=st.dictionaries(PRINTABLE, PRINTABLE, max_size=3),
    files=st.dictionaries(
        NAMES,
        st.builds(FileEntry, st.integers(0, 2**63 - 1), st.binary(min_size=32, max_size=32).map(bytes.hex)),
        max_size=3,
    ),
    built=st.datetimes().map(lambda time: time.isoformat()),
)


def put(folder: Path, values: Any) -> None:
    """engine.json with a right checksum, of whatever content."""
    text = json.dumps(values, sort_keys=True, indent=1) + "\n"
    checksum = hashlib.sha256(text.encode()).hexdigest()
    if isinstance(values, dict):
        text = json.dumps({**values, "checksum": checksum}, sort_keys=True, indent=1) + "\n"
    (folder / ENGINE_FILE).write_text(text)


def values_of(manifest: EngineManifest) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(manifest_text(manifest))
    del values["checksum"]
    return values


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_manifest(folder)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 2000 and str(folder / ENGINE_FILE) in line, line
    return line


def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("engine")

    @given(MANIFESTS)
    def check(manifest: EngineManifest) -> None:
        text = manifest_text(manifest)
        (folder / ENGINE_FILE).write_text(text)
        assert read_manifest(folder) == manifest
        assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
        put(folder, values_of(manifest))
        assert (folder / ENGINE_FILE).read_text() == text

    check()


def test_every_byte_counts(tmp_path: Path) -> None:
    text = manifest_text(some_manifest()).encode()
    (tmp_path / ENGINE_FILE).write_bytes(text)
    assert read_manifest(tmp_path) == some_manifest()
    for i in range(len(text)):
        for flipped in {text[i] ^ 0x20, text[i] ^ (1 << i % 8)}:
            (tmp_path / ENGINE_FILE).write_bytes(text[:i] + bytes((flipped,)) + text[i + 1 :])
            refusal(tmp_path)
    for changed in (text[:-1], text + b"\n", text + b" ", b"\n" + text, text.replace(b"\n", b"\r\n"), text * 2, b""):
        (tmp_path / ENGINE_FILE).write_bytes(changed)
        refusal(tmp_path)
    (tmp_path / ENGINE_FILE).write_text(json.dumps(json.loads(text)))
    assert "was changed after it was written; build the folder again" in refusal(tmp_path)


def test_a_changed_value_is_told_as_that(tmp_path: Path) -> None:
    text = manifest_text(some_manifest())
    (tmp_path / ENGINE_FILE).write_text(text.replace('"max_batch_size": 8', '"max_batch_size": 9'))
    assert refusal(tmp_path) == f"{tmp_path}/engine.json was changed after it was written; build the folder again"


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize("reader", ["0.7.1", None, 5, "a\nb", "x" * 1000])
def test_a_later_format_says_who_reads_it(reader: Any, has_checksum: bool, tmp_path: Path) -> None:
    """Whatever else is in it, and however it is checked."""
    values = {"format_version": FORMAT_VERSION + 1, "readable_by": reader, "new": {"things": [1]}}
    put(tmp_path, values)
    if not has_checksum:
        (tmp_path / ENGINE_FILE).write_text(json.dumps(values))
    needed = "0.7.1 or later" if reader == "0.7.1" else "of a later version"
    assert refusal(tmp_path) == (
        f"{tmp_path}/engine.json has format_version 2; this version of Inflight ({backend_engine.__version__}) reads "
        f"up to 1; it takes Inflight {needed}"
    )


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


SCHEME = {"kind": "x"}
DIGEST = "ab" * 32
BAD_VALUES: list[tuple[tuple[str, ...], Any, str]] = [
    (("format_version",), 0, "format_version is 0; expected an integer of at least 1"),
    (("format_version",), True, "format_version is True; expected an integer"),
    (("format_version",), "1", "format_version is '1'; expected an integer"),
    (("readable_by",), "", "readable_by is ''; expected 1 to 500 printable characters"),
    (("architecture",), ["a"], "architecture is ['a']; expected 1 to 500 printable"),
    (("architecture",), "a\nb", "architecture is 'a\\nb'; expected 1 to 500 printable"),
    (("architecture",), "x" * 501, "expected 1 to 500 printable"),
    (("build",), [], "build is []; expected an object"),
    (("build", "max_batch_size"), 0, "build: max_batch_size is 0; expected an integer of at least 1"),
    (("build", "max_seq_len"), 1.0, "build: max_seq_len is 1.0; expected an integer"),
    (("build", "max_num_tokens"), 2**31, "build: max_num_tokens is 2147483648; expected an integer of at most"),
    (("build", "tensor_parallel_size"), None, "build: tensor_parallel_size is missing; expected an integer"),
    (("build", "pipeline_parallel_size"), -1, "build: pipeline_parallel_size is -1; expected an integer"),
    (("build", "precision"), "auto", "build: precision is 'auto'; expected one of bfloat16, float16, float32"),
    (("build", "plugins"), "a", "build: plugins is 'a'; expected a list of names"),
    (("build", "plugins"), [1], "build: plugins is 1; expected 1 to 500 printable"),
    (("build", "speed"), 1, "build: the key 'speed' is not known; expected max_batch_size, "),
    (("quantization",), None, "quantization is None; expected an object"),
    (("quantization",), {"a": nested(9)}, "quantization is nested too deeply"),
    (("quantization",), {"a": "b\x1b[2J"}, "quantization is 'b\\x1b[2J'; expected texts of at most 500 printable"),
    (("quantization",), {"\u202e": 1}, "quantization is '\\u202e'; expected texts"),
    (("kv_cache_dtype",), "fp9", "kv_cache_dtype is 'fp9'; expected one of "),
    (("kv_scales",), {"-1": [1.0, 1.0]}, "kv_scales: a key is '-1'; expected a layer, from 0 to 9999"),
    (("kv_scales",), {"01": [1.0, 1.0]}, "kv_scales: a key is '01'; expected a layer"),
    (("kv_scales",), {"10000": [1.0, 1.0]}, "kv_scales: a key is '10000'; expected a layer"),
    (("kv_scales",), {"\u0663": [1.0, 1.0]}, "kv_scales: a key is '\u0663'; expected a layer"),
    (("kv_scales",), {"0": [1.0]}, "kv_scales: 0 is [1.0]; expected a list of 2 numbers"),
    (("kv_scales",), {"0": [1.0, 0.0]}, "kv_scales: 0 is [1.0, 0.0]; expected a list of 2 numbers above 0"),
    (("packed",), {"a\n": [{"scheme": SCHEME, "num_rows": 1}]}, "packed: name of a parameter is 'a\\n'; expected"),
    (("packed",), {"a": []}, "packed: a is []; expected a list of at least one part"),
    (("packed",), {"a": {"0": 1}}, "packed: a is {'0': 1}; expected a list"),
    (("packed",), {"a": [5]}, "packed: a: part 0 is 5; expected an object with num_rows, scheme"),
    (("packed",), {"a": [{"scheme": SCHEME}]}, "packed: a: part 0: num_rows is missing"),
    (("packed",), {"a": [{"scheme": SCHEME, "num_rows": 0}]}, "packed: a: part 0: num_rows is 0; expected"),
    (("packed",), {"a": [{"scheme": "x", "num_rows": 1}]}, "packed: a: part 0: scheme is 'x'; expected an object"),
    (("packed",), {"a": [{"scheme": {"k": nested(9)}, "num_rows": 1}]}, "part 0: scheme is nested too deeply"),
    (("versions",), {"torch": 2}, "versions: torch is 2; expected 1 to 500 printable"),
    (("versions",), {"": "2"}, "versions: name is ''; expected 1 to 500 printable"),
    (("files",), {"a": [1, DIGEST]}, "files: a is [1, '"),
    (("files",), {"a": {"num_bytes": -1, "sha256": DIGEST}}, "files: a: num_bytes is -1; expected the size"),
    (("files",), {"a": {"num_bytes": 2**63, "sha256": DIGEST}}, "files: a: num_bytes is 9223372036854775808; "),
    (("files",), {"a": {"num_bytes": 1.0, "sha256": DIGEST}}, "files: a: num_bytes is 1.0; expected the size"),
    (("files",), {"a": {"num_bytes": 1, "sha256": DIGEST.upper()}}, "expected 64 hexadecimal digits, lower case"),
    (("files",), {"a": {"num_bytes": 1, "sha256": DIGEST + "\n"}}, "expected 64 hexadecimal digits"),
    (("files",), {"a": {"num_bytes": 1, "sha256": None}}, "files: a: sha256 is None; expected 64"),
    (("built",), "yesterday", "built is 'yesterday'; expected a date in ISO 8601"),
    (("built",), 20260131, "built is 20260131; expected"),
    (("new",), 1, "the key 'new' is not known; expected architecture, build, built, checksum, "),
    (("n\new",), 1, "the key 'n\\new' is not known"),
]


@pytest.mark.parametrize(("keys", "value", "words"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_values_that_no_engine_folder_has(keys: tuple[str, ...], value: Any, words: str, tmp_path: Path) -> None:
    values = values_of(some_manifest())
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    put(tmp_path, values)
    assert words in refusal(tmp_path)


@pytest.mark.parametrize("key", sorted(values_of(some_manifest())))
def test_a_key_that_is_missing(key: str, tmp_path: Path) -> None:
    values = values_of(some_manifest())
    del values[key]
    put(tmp_path, values)
    assert f"{key} is missing; expected architecture, " in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\nb", "a\0", "\ud800", "x" * 256, "é" * 128,
     ENGINE_FILE, "a\x7f", "\u202egpj.exe"],
    ids=range(16),
)  # fmt: skip
def test_names_that_no_file_of_the_folder_has(name: str, tmp_path: Path) -> None:
    put(tmp_path, {**values_of(some_manifest()), "files": {name: {"num_bytes": 1, "sha256": DIGEST}}})
    assert "files: a name is " in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not what was written (Expecting value"),
        ("{", "is not what was written (Expecting property name"),
        ("é", "is not what was written ('ascii' codec"),
        ("[" * 10**5, "nested too deeply"),
        ("[]", "holds a list; expected a JSON object"),
        ("null", "holds a NoneType; expected a JSON object"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ('{"a": 1, "a": 1}', "a key stands twice in one object"),
        ('{"a": ' + "9" * 5000 + "}", "is not what was written (Exceeds the limit"),
        ("[" + "1," * (1 << 22) + "1]", "holds more than 4194304 values"),
        ('{"format_version": 1}', "was changed after it was written"),
    ],
    ids=range(11),
)
def test_files_that_are_none(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / ENGINE_FILE).write_text(text)
    assert words in refusal(tmp_path)


FAKES: dict[str, Callable[[Path], object]] = {
    "none": lambda path: None,
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("fake", FAKES)
def test_what_is_no_file_is_not_read(fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_manifest, "_MAX_FILE", 1 << 20)
    FAKES[fake](tmp_path / ENGINE_FILE)
    assert "cannot be read" in refusal(tmp_path)


def test_nothing_is_written_that_could_not_be_read() -> None:
    for manifest in (
        some_manifest(files={"../a": FileEntry(1, DIGEST)}),
        some_manifest(build=BuildConfig()),
        some_manifest(kv_scales={0: (1.0, -1.0)}),
    ):
        with pytest.raises(ModelLoadError, match=r"engine\.json: "):
            manifest_text(manifest)
    with pytest.raises(ValueError, match="Out of range float"):
        manifest_text(some_manifest(quantization={"a": float("nan")}))


def test_the_manifest_holds_what_was_built_for() -> None:
    """Every field of a build, whichever there are."""
    values = values_of(some_manifest())["build"]
    assert set(values) == {field.name for field in dataclasses.fields(BuildConfig)}


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert backend_engine.__version__ == project["version"]
