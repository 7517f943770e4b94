"""Pickles that would never end, fill the memory or break the stack, in every file of a checkpoint that is one."""

import pickle
import shutil
import struct
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.checkpoint.pickle_size import MAX_DEPTH, MAX_VALUES
from backend_engine.checkpoint.torch_file import TorchFileReader
from backend_engine.checkpoint.torch_pickle import read_pickle
from backend_engine.config.hf_config import MAX_LAYERS
from tests.checkpoints.test_megatron import build
from tests.support import megatron_writer as writer
from tests.support.hostile import load, refusal

pytestmark = pytest.mark.timeout(120)
PROTOCOL, END = b"\x80\x02", b"."


def doubled(times: int, first: bytes = b")") -> bytes:
    """A tuple of two of a tuple of two ..., 2 ** times in all: the first from the note of the one before."""
    return first + b"".join(b"r" + struct.pack("<I", i) + b"j" + struct.pack("<I", i) + b"\x86" for i in range(times))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def whole_number(num_bytes: int) -> bytes:
    return b"\x8b" + struct.pack("<I", num_bytes) + b"\xff" * (num_bytes - 1) + b"\x7f"


def function(name: str) -> bytes:
    room, _, last = name.rpartition(".")
    return f"c{room}\n{last}\n".encode()


FLOATS, ORDERED = function("torch.FloatStorage"), function("collections.OrderedDict")
ENCODED = function("_codecs.encode") + b"h\x01" + text("latin1") + b"\x86R0"
TENSOR = function("torch._utils._rebuild_tensor_v2")
STORAGE = b"(" + text("storage") + function("torch.FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"


def described(offset: bytes, shape: bytes, stride: bytes) -> bytes:
    """A dict with a tensor of these numbers."""
    return b"}" + text("x") + TENSOR + b"(" + STORAGE + offset + shape + stride + b"\x89}tRs"


BOMBS: dict[str, bytes] = {
    "a key that is hashed for ever": b"}" + doubled(100) + b"K\x01s",
    "a key in a set": b"c__builtin__\nfrozenset\n(]" + doubled(100) + b"atR",
    "a key that is deep": b"}" + b")" + b"\x85" * 10**6 + b"K\x01s",
    "a storage named so": b"(" + text("storage") + FLOATS + doubled(100) + text("c") + b"K\x04tQ",
    "a device named so": function("torch.device") + doubled(100) + b"\x85R",
    "a shape of texts": b"]q\x00" + text("x" * 10**6) + b"q\x01" + (function("torch.Size") + b"h\x01\x85Ra") * 5000,
    "many sets of one list": b"](" + b"K\x01" * 10**5 + b"eq\x01a" + (b"c__builtin__\nset\nh\x01\x85R0") * 5000,
    "many dicts of one": b"}" + text("a") + b"K\x01sq\x01" + (ORDERED + b"h\x01\x85R0") * 5000,
    "many encoded texts": text("x" * 10**6) + b"q\x01" + ENCODED * 5000,
    "a name with lines": b"\x8c\x03a\nb\x8c\x03c\nd\x93",
    "a long name": text("a" * 10**6) + text("b") + b"\x93",
    "a number without end": described(whole_number(10**6), b"K\x01\x85", b"K\x01\x85"),
    "a size without end": described(b"K\x00", whole_number(10**6) + b"\x85", b"K\x01\x85"),
    "a step without end": described(b"K\x00", b"K\x02\x85", whole_number(10**6) + b"\x85"),
    "a negative step": described(b"K\x00", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "steps of nothing": described(b"K\x00", b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85", b"K\x00\x85"),
    "hundreds of dimensions": described(b"K\x00", b"(" + b"K\x01" * 500 + b"t", b"(" + b"K\x01" * 500 + b"t"),
    "a note far away": b"K\x01r\xff\xff\xff\x7f",
    "no mark": b"t",
    "an empty stack": b"0",
    "a recall of nothing": b"h\x05",
    "a frame beyond": b"\x95" + b"\xff" * 8,
    "a text beyond": b"\x8d" + b"\xff" * 7 + b"\x7f",
    "a list in itself as a key": b"}]q\x00h\x00ah\x00K\x01s",
    "a class without an object": b"}" + text("x") + function("collections.OrderedDict") + b"}bs",
    "names with lines": b"}" + text("a\nb") + b"K\x01s",
}  # fmt: skip


def write_zip(path: Path, data: bytes, storage: bytes = bytes(16)) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/data/0", storage)
    return path


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_in_files_of_torch(name: str, tmp_path: Path) -> None:
    data = PROTOCOL + BOMBS[name] + END
    assert "a.bin" in refusal(lambda: TorchFileReader(write_zip(tmp_path / "a.bin", data)))
    head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    (tmp_path / "old.bin").write_bytes(head + data + pickle.dumps(["0"], 2) + bytes(24))
    assert "old.bin" in refusal(lambda: TorchFileReader(tmp_path / "old.bin"))


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_in_descriptions_of_distributed_checkpoints(name: str, tmp_path: Path) -> None:
    writer.save_nemo2(tmp_path, build("llama"))
    (metadata,) = tmp_path.rglob(".metadata")
    metadata.write_bytes(PROTOCOL + BOMBS[name] + END)
    assert str(tmp_path) in refusal(lambda: open_checkpoint(tmp_path))


def test_what_is_within_the_bounds_is_read() -> None:
    deep: object = ()
    for _ in range(MAX_DEPTH - 1):
        deep = (deep,)
    values = {"random": (3, tuple(range(625)), None), "wide": tuple(range(MAX_VALUES - 1)), "deep": deep}
    for protocol in (2, 4, 5):
        assert read_pickle(pickle.dumps(values, protocol), "here").root == values
    shared = ["x"] * 10
    assert read_pickle(pickle.dumps([shared] * 1000, 2), "here").root == [shared] * 1000


def test_dicts_that_are_walked_for_ever(tmp_path: Path) -> None:
    """Each holds the next a hundred times, and none a tensor."""
    inner: dict[str, object] = {}
    for _ in range(6):
        inner = {f"k{i}": inner for i in range(100)}
    torch.save({"model": inner, "args": writer.arguments(build("llama"), 1, 1)}, tmp_path / "model_optim_rng.pt")
    folder = tmp_path / "release" / "mp_rank_00"
    folder.mkdir(parents=True)
    shutil.move(tmp_path / "model_optim_rng.pt", folder)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert "more than" in refusal(lambda: open_checkpoint(tmp_path))


SIZES = (0, -1, MAX_LAYERS + 1, 2**31 - 1, 10**30, "2", 1.5, float("nan"), True)
KEYS = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "max_position_embeddings")


@pytest.mark.parametrize("key", KEYS)
def test_arguments_that_the_tensors_do_not_bear_out(key: str, tmp_path: Path) -> None:
    model = build("llama")
    for value in SIZES:
        arguments = vars(writer.arguments(model, 1, 1)) | {key: value}
        path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(exist_ok=True)
        state = writer.fused(writer.core_state(model))
        torch.save({"args": arguments, "model": state, "checkpoint_version": 3.0}, path)
        nemo = writer.pack(tmp_path / "a.nemo", writer.nemo1_files(model, **{key: value}))
        if key != "max_position_embeddings" or not isinstance(value, int) or not 0 < value < 2**31:
            refusal(lambda: load(tmp_path))
            refusal(partial(load, nemo))


def test_zip_files_that_lie(tmp_path: Path) -> None:
    whole = write_zip(tmp_path / "a.bin", PROTOCOL + described(b"K\x00", b"K\x02\x85", b"K\x01\x85") + END)
    assert TorchFileReader(whole).names() == ["x"]
    data = whole.read_bytes()
    central = data.index(b"PK\x01\x02")
    for at, value in ((20, b"\xff" * 8), (24, b"\xff" * 4), (42, b"\xf0\xff\xff\xff"), (28, b"\xff\xff"),
                      (10, b"\x08\0"),
                      (8, b"\x01\0"), (6, b"\xff\xff"), (46, b"a\n")):  # fmt: skip
        (tmp_path / "b.bin").write_bytes(data[: central + at] + value + data[central + at + len(value) :])
        refusal(lambda: TorchFileReader(tmp_path / "b.bin"))
    for cut in range(0, len(data), 17):
        (tmp_path / "b.bin").write_bytes(data[:cut])
        refusal(lambda: TorchFileReader(tmp_path / "b.bin"))
