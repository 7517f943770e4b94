"""Files of torch.save: every tensor as torch itself reads it, and nothing run, guessed or read beyond the file."""

import io
import os
import pickle
import struct
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend_engine.checkpoint.torch_file import DTYPE_NAMES, TorchFileReader
from backend_engine.errors import ModelLoadError

OLD = {"_use_new_zipfile_serialization": False}
NEW_DTYPES = {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}


def tensors(is_old: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(5, 7, generator=generator) * 3
    result = {name: random.to(dtype) for dtype, name in DTYPE_NAMES.items() if not (is_old and dtype in NEW_DTYPES)}
    wide = torch.arange(100.0).reshape(10, 10)
    result |= {"cut": wide[2:5, 1:4], "turned": wide.T, "every": wide[::3, ::2], "shared": wide}
    return result | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "own": torch.nn.Parameter(random)}


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "module"])
@pytest.mark.parametrize("is_old", [False, True])
def test_tensors_are_what_torch_reads(is_old: bool, wrapper: str | None, tmp_path: Path) -> None:
    path, wanted = tmp_path / "pytorch_model.bin", tensors(is_old)
    content: Any = OrderedDict(wanted)
    if wrapper:
        content = {wrapper: content, "epoch": 3, "loss": 0.5, "names": ["a"]}
    torch.save(content, path, **(OLD if is_old else {}))
    reader = TorchFileReader(path)
    assert reader.names() == list(wanted)
    by_torch = torch.load(path, weights_only=True)
    by_torch = by_torch[wrapper] if wrapper else by_torch
    for name, tensor in wanted.items():
        found = reader.read(name)
        assert reader.describe(name).shape == tuple(tensor.shape) == tuple(found.shape)
        assert reader.describe(name).dtype == DTYPE_NAMES[tensor.dtype]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.double(), by_torch[name].double()), name
        reader.release(found)
        assert torch.equal(found.double(), tensor.detach().double()), name


def test_a_module_with_versions_of_its_parts(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(module.state_dict(), tmp_path / "a.bin")
    reader = TorchFileReader(tmp_path / "a.bin")
    for name, tensor in module.state_dict().items():
        assert torch.equal(reader.read(name), tensor)


def resident(path: Path) -> int:
    """Bytes of the mapped file that are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1]) * 1024


def test_memory_is_mapped_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save({"a": torch.ones(1 << 21), "b": torch.ones(1 << 21)}, path)
    reader = TorchFileReader(path)
    assert resident(path) < 1 << 22
    for name in ("a", "b", "a"):
        tensor = reader.read(name)
        assert tensor.sum() == 1 << 21
        assert 1 << 23 <= resident(path) < 12 << 20
        reader.release(tensor)
        assert resident(path) < 1 << 22


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(3).to_sparse(), "tensor x is sparse"),
        (torch.eye(3).to_sparse_csr(), "tensor x is sparse"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "tensor x is quantized"),
        (torch.ones(3, dtype=torch.complex64), "tensor x has dtype torch.complex64"),
        (torch.ones(3, device="meta"), "tensor x is without values"),
        (torch.ones(3, dtype=torch.complex64).conj(), "tensor x is a conjugated"),
        (torch.nn.Linear(2, 2), "an object of type torch.nn.modules.linear.Linear, which is not loaded"),
        (3, "holds a int under 'x'"),
        ({"y": torch.ones(1)}, "holds a dict under 'x'"),
        ([torch.ones(1)], "holds a list under 'x'"),
    ],
)  # fmt: skip
def test_values_that_are_no_dense_tensors(value: Any, message: str, tmp_path: Path) -> None:
    torch.save({"x": value}, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", message)


@pytest.mark.parametrize(
    "content", [torch.ones(2), [torch.ones(2)], {}, {1: torch.ones(2)}, {"model": {}, "module": {}}]
)
def test_contents_that_are_no_dict_of_tensors(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", "a.bin holds")


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        TorchFileReader(path)
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(path) in str(caught.value)


class Reduced:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


ATTACKS = {
    "os.system": (Reduced(os.system, ("touch {target}",)), "posix.system"),
    "eval": (Reduced(eval, ("open('{target}', 'w')",)), "builtins.eval"),
    "exec": (Reduced(exec, ("open('{target}', 'w')",)), "builtins.exec"),
    "open": (Reduced(open, ("{target}", "w")), "io.open"),
    "getattr": (Reduced(getattr, (os, "system")), "builtins.getattr"),
    "torch.load": (Reduced(torch.load, ("{target}",)), "torch.serialization.load"),
    "loads": (Reduced(pickle.loads, (b"",)), "pickle.loads"),
    "subprocess": (Reduced(subprocess.Popen, (["touch", "{target}"],)), "subprocess.Popen"),
    "bytearray": (Reduced(bytearray, (1 << 40,)), "builtins.bytearray"),
}


def with_target(value: Any, target: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{target}", str(target))
    if isinstance(value, tuple | list):
        return type(value)(with_target(item, target) for item in value)
    return Reduced(*with_target(value.parts, target)) if isinstance(value, Reduced) else value


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_a_pickle_names_is_run(attack: str, is_old: bool, tmp_path: Path) -> None:
    value, refused_name = ATTACKS[attack]
    target = tmp_path / "written"
    if attack == "getattr":
        value = Reduced(getattr, ("", "join"))
    torch.save({"x": with_target(value, target)}, tmp_path / "a.bin", **(OLD if is_old else {}))
    refused(tmp_path / "a.bin", f"holds an object of type {refused_name}, which is not loaded; expected tensors")
    assert not target.exists()


def make_zip(path: Path, data: bytes, members: dict[str, bytes] | None = None, **how: Any) -> Path:
    with zipfile.ZipFile(path, "w", **how) as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in (members or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def tensor_pickle(
    offset: int, shape: tuple[Any, ...], stride: tuple[Any, ...], numel: int = 6, key: str = "0"
) -> bytes:
    """A dict of one tensor "x" as torch would describe it."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, stride, False, OrderedDict())

    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if isinstance(value, Storage) else None

    Pickler(buffer, 2).dump({"x": Tensor()})
    return buffer.getvalue()


SIX = struct.pack("<6f", *range(6))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tensor_pickle(0, (7,), (1,)), "asks for 7 elements of a storage that holds 6"),
        (tensor_pickle(1, (2, 3), (3, 1)), "asks for 7 elements"),
        (tensor_pickle(0, (2, 2), (1 << 62, 1)), "of a storage that holds 6"),
        (tensor_pickle(0, (1 << 40, 1 << 40), (0, 0)), "of a storage that holds 6"),
        (tensor_pickle(0, (7,), (1,), numel=7), "asks for 7 elements of a storage that holds 6"),
        (tensor_pickle(-1, (2,), (1,)), "offset -1"),
        (tensor_pickle(0, (2,), (-1,)), "stride (-1,)"),
        (tensor_pickle(0, (-2,), (1,)), "shape (-2,)"),
        (tensor_pickle(0, (2.0,), (1,)), "shape (2.0,)"),
        (tensor_pickle(0, (2,), (1, 1)), "stride (1, 1)"),
        (tensor_pickle(0, (2,), (1,), key="9"), "lies in storage 9, which the file does not hold"),
    ],
)
def test_tensors_that_reach_beyond_their_storage(data: bytes, message: str, tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.bin", data, {"data/0": SIX})
    refused(path, message)


def test_an_expanded_view_costs_no_more_than_it_holds(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.bin", tensor_pickle(0, (2, 3), (0, 1)), {"data/0": SIX})
    assert TorchFileReader(path).read("x").tolist() == [[0, 1, 2], [0, 1, 2]]


def test_zip_files_that_torch_does_not_write(tmp_path: Path) -> None:
    data, path = tensor_pickle(0, (6,), (1,)), tmp_path / "a.bin"
    assert TorchFileReader(make_zip(path, data, {"data/0": SIX})).read("x").tolist() == [0, 1, 2, 3, 4, 5]
    refused(make_zip(path, data, {"data/0": b"\0" * 10000}, compression=zipfile.ZIP_DEFLATED), "is compressed")
    with pytest.warns(UserWarning, match="Duplicate name"):
        make_zip(path, data, {"data/0": SIX, "data/1": SIX})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("archive/data/0", SIX)
    refused(path, "member 'archive/data/0' is there twice")
    refused(make_zip(path, data, {"data/0": SIX, "byteorder": b"big"}), "has byteorder b'big'")
    refused(make_zip(path, data, {"data/0": SIX, "constants.pkl": b"."}), "is a TorchScript program")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    refused(path, "has no data.pkl")


def test_members_that_overlap(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.bin", tensor_pickle(0, (6,), (1,)), {"data/0": SIX, "data/1": SIX})
    content = bytearray(path.read_bytes())
    first, second = (content.rindex(f"archive/data/{i}".encode()) for i in range(2))
    content[second - 4 : second] = content[first - 4 : first]
    path.write_bytes(content)
    refused(path, "overlaps the member before it")


def test_notes_at_places_that_would_take_memory(tmp_path: Path) -> None:
    data = b"\x80\x02}r\xff\xff\xff\x7f."
    refused(make_zip(tmp_path / "a.bin", data), "LONG_BINPUT 2147483647")


@pytest.mark.parametrize("is_old", [False, True])
def test_every_beginning_of_a_file_is_refused(is_old: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save({"x": torch.arange(40.0), "y": torch.ones(3)}, path, **(OLD if is_old else {}))
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        refused(path, "a.bin")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(is_old=st.booleans(), place=st.integers(0, 1 << 16), value=st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_only_a_value(is_old: bool, place: int, value: int, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    torch.save({"x": torch.arange(8.0), "y": torch.ones(2, 2)[:, 1]}, path, **(OLD if is_old else {}))
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(data)
    try:
        reader = TorchFileReader(path)
    except ModelLoadError as error:
        assert "\n" not in str(error)
        return
    for name in reader.names():
        assert tuple(reader.read(name).shape) == reader.describe(name).shape


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    refused(tmp_path / "none.bin", "cannot be read")
    refused(tmp_path, "cannot be read")
