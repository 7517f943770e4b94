"""``EngineManifest``: engine.json, what an engine folder says of itself and of its files.

Written by ``builder/``, read by whoever opens such a folder. The file carries a checksum of its own text; every fault
is a ``ModelLoadError`` of one line. Opens no other file of the folder.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import backend_engine
from backend_engine.config.build_config import PRECISIONS, BuildConfig
from backend_engine.config.hf_config import MAX_INTEGER, MAX_LAYERS, HfConfig
from backend_engine.config.json_values import check_bounded, check_keys, is_text, mapping, refusal, text
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.config.regular_files import read_regular
from backend_engine.errors import ModelLoadError, one_line, shown

ENGINE_FILE = "engine.json"
FORMAT_VERSION = 1
READABLE_BY = "0.1.0"
"""The first version of Inflight that reads ``FORMAT_VERSION``."""
_MAX_FILE = 1 << 28
_MAX_VALUES = 1 << 22  # of which a few hundred bytes each are made
_MAX_NAME_BYTES = 255
_MAX_SIZE = (1 << 63) - 1
_MAX_DEPTH = 8
_CHECKSUM_LINE = re.compile(rb'\n "checksum": "([0-9a-f]{64})",(?=\n)')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")


class PartForm(NamedTuple):
    """``num_rows`` rows of a packed parameter. ``scheme``: their form, as ``quantization/scheme_json.py`` reads it."""

    scheme: Mapping[str, Any]
    num_rows: int


class FileEntry(NamedTuple):
    """A file of the folder: its size, and the SHA-256 of its bytes in lower-case hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """architecture: the class that config.json names. build: every field a value, but ``max_*`` may be ``None``.
    quantization: a summary for people, any JSON object. kv_cache_dtype: a name of ``KV_FORMATS``, ``None`` = not
    stated. kv_scales: scale of keys and of values by layer. packed: the parts of each packed parameter of the whole
    model. versions: of the programs that wrote the folder. files: of the folder but engine.json, by name. built: a date
    in ISO 8601, or with the time. format_version, readable_by: of the file's format, and the first Inflight that reads
    it.
    """

    architecture: str
    build: BuildConfig
    quantization: Mapping[str, Any]
    kv_cache_dtype: str | None
    kv_scales: Mapping[int, tuple[float, float]]
    packed: Mapping[str, tuple[PartForm, ...]]
    versions: Mapping[str, str]
    files: Mapping[str, FileEntry]
    built: str
    format_version: int = FORMAT_VERSION
    readable_by: str = READABLE_BY


_BUILD_KEYS = frozenset(field.name for field in fields(BuildConfig))
_KEYS = frozenset({"checksum", *(field.name for field in fields(EngineManifest))})


def manifest_text(manifest: EngineManifest) -> str:
    """Text of engine.json: JSON with sorted keys, indented by 1, in which ``checksum`` is the SHA-256 of the text
    without its line. Raises ``ModelLoadError`` for a value that ``read_manifest`` would refuse.
    """
    values = {
        **vars(manifest),
        "build": asdict(manifest.build),
        "kv_scales": {str(layer): list(scales) for layer, scales in manifest.kv_scales.items()},
        "packed": {name: [part._asdict() for part in parts] for name, parts in manifest.packed.items()},
        "files": {name: entry._asdict() for name, entry in manifest.files.items()},
    }
    checksum = hashlib.sha256(_canonical(values).encode()).hexdigest()
    written = _canonical({**values, "checksum": checksum})
    _parse(json.loads(written), ENGINE_FILE)
    return written


def read_manifest(folder: Path) -> EngineManifest:
    """engine.json of the folder. Raises ``ModelLoadError`` (one line: the file, key, value and what is allowed) when it
    is of a later format, was changed since it was written, or says what no engine folder can be.
    """
    path = folder / ENGINE_FILE
    try:
        data = read_regular(path, _MAX_FILE)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MAX_VALUES:
        raise ModelLoadError(f"{path} holds more than {_MAX_VALUES} values; expected fewer")
    try:
        values = json.loads(data.decode("ascii"), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise ModelLoadError(f"{path} holds values nested too deeply; build the folder again") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not what was written ({one_line(error)}); build the folder again") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds a {type(values).__name__}; expected a JSON object")
    _refuse_later_format(values, path)
    found = _CHECKSUM_LINE.search(data)
    if found is None or hashlib.sha256(data[: found.start()] + data[found.end() :]).hexdigest().encode() != found[1]:
        raise ModelLoadError(f"{path} was changed after it was written; build the folder again")
    return _parse(values, str(path))


def _canonical(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, indent=1, allow_nan=False) + "\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return values


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _refuse_later_format(values: Mapping[str, Any], path: Path) -> None:
    """Before anything else of it is looked at, since a later format may have other keys and another checksum."""
    version, reader = values.get("format_version"), values.get("readable_by")
    if type(version) is not int or version <= FORMAT_VERSION:
        return
    needed = f"{reader} or later" if is_text(reader) else "of a later version"
    raise ModelLoadError(
        f"{path} has format_version {shown(version)}; this version of Inflight ({backend_engine.__version__}) reads up "
        f"to {FORMAT_VERSION}; it takes Inflight {needed}"
    )


def _parse(values: Mapping[str, Any], where: str) -> EngineManifest:
    check_keys(values, _KEYS, where)
    config = HfConfig(values, where)
    dtype = config.get("kv_cache_dtype")
    check_bounded(values["quantization"], f"{where}: quantization", _MAX_DEPTH)
    return EngineManifest(
        format_version=config.integer("format_version", at_most=FORMAT_VERSION),
        readable_by=text(values["readable_by"], f"{where}: readable_by"),
        architecture=text(values["architecture"], f"{where}: architecture"),
        build=_build_config(mapping(values, "build", where), f"{where}: build"),
        quantization=mapping(values, "quantization", where),
        kv_cache_dtype=None if dtype is None else config.choice("kv_cache_dtype", KV_FORMATS),
        kv_scales=dict(_kv_scales(k, v, where) for k, v in mapping(values, "kv_scales", where).items()),
        packed={
            text(name, f"{where}: packed: name of a parameter"): _parts(parts, f"{where}: packed: {name}")
            for name, parts in mapping(values, "packed", where).items()
        },
        versions={
            text(name, f"{where}: versions: name"): text(version, f"{where}: versions: {name}")
            for name, version in mapping(values, "versions", where).items()
        },
        files={
            _file_name(name, where): _file_entry(entry, f"{where}: files: {name}")
            for name, entry in mapping(values, "files", where).items()
        },
        built=_date(values["built"], f"{where}: built"),
    )


def _build_config(values: Mapping[str, Any], where: str) -> BuildConfig:
    check_keys(values, _BUILD_KEYS, where)
    config = HfConfig(values, where)
    plugins = values["plugins"]
    if not isinstance(plugins, list):
        raise refusal(f"{where}: plugins", plugins, "a list of names")
    return BuildConfig(
        **{name: None if values[name] is None else config.integer(name) for name in _LIMITS},
        tensor_parallel_size=config.integer("tensor_parallel_size"),
        pipeline_parallel_size=config.integer("pipeline_parallel_size"),
        precision=config.choice("precision", PRECISIONS),
        plugins=tuple(text(name, f"{where}: plugins") for name in plugins),
    )


def _kv_scales(key: str, value: Any, where: str) -> tuple[int, tuple[float, float]]:
    is_layer = re.fullmatch(r"0|[1-9][0-9]{0,8}", key) is not None and int(key) < MAX_LAYERS
    if not is_layer:
        raise refusal(f"{where}: kv_scales: a key", key, f"a layer, from 0 to {MAX_LAYERS - 1}")
    keys, values = HfConfig({key: value}, f"{where}: kv_scales").numbers(key, 2)
    return int(key), (keys, values)


def _parts(parts: Any, where: str) -> tuple[PartForm, ...]:
    if not isinstance(parts, list) or not parts:
        raise refusal(where, parts, "a list of at least one part")
    return tuple(_part(part, f"{where}: part {i}") for i, part in enumerate(parts))


def _part(part: Any, where: str) -> PartForm:
    check_keys(part, frozenset(PartForm._fields), where)
    scheme = mapping(part, "scheme", where)
    check_bounded(scheme, f"{where}: scheme", _MAX_DEPTH)
    return PartForm(scheme, HfConfig(part, where).integer("num_rows", at_most=MAX_INTEGER))


def _file_entry(entry: Any, where: str) -> FileEntry:
    check_keys(entry, frozenset(FileEntry._fields), where)
    num_bytes, sha256 = entry["num_bytes"], entry["sha256"]
    if type(num_bytes) is not int or not 0 <= num_bytes <= _MAX_SIZE:
        raise refusal(f"{where}: num_bytes", num_bytes, "the size of a file")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise refusal(f"{where}: sha256", sha256, "64 hexadecimal digits, lower case")
    return FileEntry(num_bytes, sha256)


def _file_name(name: str, where: str) -> str:
    """Nothing that could lead out of the folder, be left out of a listing, or spoil a message."""
    is_plain = is_text(name) and len(name.encode()) <= _MAX_NAME_BYTES and not set(name) & {"/", "\\"}
    if not is_plain or name.startswith(".") or name == ENGINE_FILE:
        allowed = f"names of files of the folder, not hidden, and not {ENGINE_FILE}"
        raise refusal(f"{where}: files: a name", name, allowed)
    return name


def _date(value: Any, where: str) -> str:
    try:
        datetime.fromisoformat(text(value, where))
    except ValueError:
        raise refusal(where, value, "a date in ISO 8601") from None
    return str(value)
