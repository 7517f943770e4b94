"""Headers of GGUF files: values and tensors are those that the gguf package reads; broken ones are refused."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from backend_engine.config.gguf_metadata import find_gguf, read_gguf_header, split_files
from backend_engine.errors import ModelLoadError

SCALARS: dict[str, Any] = {
    "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4_000_000_000, "int32": -2_000_000_000,
    "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 1e300, "bool": True, "string": "né 中",
}  # fmt: skip


def write(path: Path, alignment: int = 32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        getattr(writer, f"add_{kind}")(f"one.{kind}", value)
    writer.add_array("many.texts", ["a", "", "né"])
    writer.add_array("many.integers", [1, -2, 3])
    writer.add_array("many.numbers", [0.5, -1.25])
    writer.add_array("many.bools", [True, False])
    for i, shape in enumerate(((3,), (2, 64), (2, 3, 4))):
        writer.add_tensor(f"blk.{i}.weight", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 128])
def test_values_and_tensors_are_those_of_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    path = write(tmp_path / "a.gguf", alignment)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(header) == keys and header.get("one.nothing") is None and "one.nothing" not in header
    for key in keys:
        value, expected = header.get(key), reader.fields[key].contents()
        assert value == (tuple(expected) if isinstance(expected, list) else expected)
    assert {kind: header.get(f"one.{kind}") for kind in SCALARS} == SCALARS
    assert len(header.tensors) == len(reader.tensors) == 3
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert (ours.name, ours.dims) == (theirs.name, tuple(theirs.shape.tolist()))
        assert (ours.type_id, ours.offset) == (theirs.tensor_type.value, theirs.data_offset)


def test_typed_values(tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path / "a.gguf"))
    assert header.text("one.string") == "né 中" and header.text("x", "y") == "y"
    assert header.count("one.uint8") == 200 and header.count("x", 5) == 5
    assert header.flag("one.bool", False) and not header.flag("x", False)
    assert header.texts("many.texts") == ("a", "", "né")
    assert header.integers("many.integers") == (1, -2, 3) == header.numbers("many.integers")
    assert header.numbers("many.numbers") == (0.5, -1.25)
    for read, key, words in (
        (header.text, "one.int8", "is -100; expected a text"),
        (header.text, "many.texts", "is an array of 3; expected a text"),
        (header.count, "one.int8", "is -100; expected an integer of at least 0"),
        (header.count, "one.bool", "is True; expected an integer"),
        (header.count, "x", "is missing; expected an integer"),
        (header.texts, "one.string", "is 'né 中'; expected an array of texts"),
        (header.integers, "many.bools", "is an array of 2; expected an array of integers"),
        (header.numbers, "many.texts", "is an array of 3; expected an array of numbers"),
    ):
        with pytest.raises(ModelLoadError) as caught:
            read(key)
        assert str(caught.value).startswith(f"{tmp_path}/a.gguf: {key} {words}")


def test_broken_tensor_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    first = whole.index(b"blk.0.weight") + len(b"blk.0.weight")
    alignment = whole.index(b"general.alignment") + len(b"general.alignment") + 4
    broken = {
        "tensor blk.1.weight is there twice": whole.replace(b"blk.2.weight", b"blk.1.weight"),
        "tensor blk.0.weight has 5 dimensions; expected 4 at most": (
            whole[:first] + struct.pack("<I", 5) + whole[first + 4 :]
        ),
        "tensor blk.0.weight begins at 7; expected each once, at multiples of 32": (
            whole[: first + 16] + struct.pack("<Q", 7) + whole[first + 24 :]
        ),
        "general.alignment is 12; expected a power of two": (
            whole[:alignment] + struct.pack("<I", 12) + whole[alignment + 4 :]
        ),
        "tensor blk.2.weight goes on behind them": whole[: whole.index(b"blk.2.weight") + 20],
        "tensor 2 of 3 goes on behind them": whole[: whole.index(b"blk.1.weight") + 5],
    }
    for words, data in broken.items():
        path.write_bytes(data)
        with pytest.raises(ModelLoadError) as caught:
            read_gguf_header(path)
        assert words in str(caught.value) and str(caught.value).startswith(str(path))
    with pytest.raises(ModelLoadError, match=r"none\.gguf cannot be read: No such file"):
        read_gguf_header(tmp_path / "none.gguf")


def test_the_parts_of_a_model(tmp_path: Path) -> None:
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in (*names, "mmproj-m.gguf", "notes.txt"):
        (tmp_path / name).touch()
    parts = [tmp_path / name for name in names]
    assert split_files(parts[1]) == parts and split_files(tmp_path / "mmproj-m.gguf") == [tmp_path / "mmproj-m.gguf"]
    assert find_gguf(tmp_path) == parts[0] and find_gguf(parts[2]) == parts[2]
    assert find_gguf(tmp_path / "notes.txt") is None
    (tmp_path / "empty").mkdir()
    assert find_gguf(tmp_path / "empty") is None
    beyond = tmp_path / "m-00004-of-00003.gguf"
    with pytest.raises(ModelLoadError, match=r"m-00004-of-00003\.gguf does not belong to a whole model; expected 3"):
        split_files(beyond)
