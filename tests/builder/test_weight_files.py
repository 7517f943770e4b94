"""Safetensors files written tensor by tensor: what the library reads, whatever sizes and dtypes follow each other."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend_engine.builder.weight_files import WeightFiles
from backend_engine.checkpoint.safetensors_reader import SafetensorsReader

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=40)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=12), st.integers(1, 300))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[tuple[int, ...], torch.dtype]], max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {f"t{i}.\u00e9": numbers(*kind, i) for i, kind in enumerate(kinds)}
    files = WeightFiles(folder, max_bytes)
    for name, tensor in tensors.items():
        files.add(name, tensor)
    files.close()
    found: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        part = load_file(path)
        sizes = [tensor.nbytes for tensor in part.values() if tensor.nbytes]
        assert sum(sizes) <= max_bytes or len(sizes) == 1
        assert not found.keys() & part.keys()
        found.update(part)
        reader = SafetensorsReader(path)
        assert all(torch.equal(reader.read(name), part[name]) for name in reader.names())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(paths) > 1) and len(list(folder.iterdir())) == len(paths) + index.exists()
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        assert places == {name: path.name for path in paths for name in load_file(path)}


def test_a_tensor_that_is_not_in_one_piece_and_one_that_is_larger_than_a_file(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, 100)
    table = torch.arange(60, dtype=torch.float32).view(6, 10)
    files.add("small", table[0, :2])
    files.add("turned", table.t())
    files.add("last", torch.tensor(3))
    files.close()
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [list(load_file(tmp_path / name)) for name in names] == [["small"], ["turned"], ["last"]]
    assert torch.equal(load_file(tmp_path / names[1])["turned"], table.t())
    assert load_file(tmp_path / names[2])["last"].shape == ()


def test_a_single_file_is_as_the_library_writes_it(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.float32), "b": torch.ones(2, 2)}
    files = WeightFiles(tmp_path)
    for name, tensor in tensors.items():
        files.add(name, tensor)
    files.close()
    save_file(tensors, tmp_path / "other", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "other").read_bytes()
