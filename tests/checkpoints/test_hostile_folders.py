"""Folders in Hugging Face's format that lie: about sizes, in their JSON, with files that are none."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import load, load_or_refuse, refusal
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import build_tiny_model

pytestmark = pytest.mark.timeout(120)
Edit = Callable[[Path], object]
EMBEDDING = "model.embed_tokens.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "num_key_value_heads")  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    build_tiny_llama(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("value", [0, -1, 10**6, 10**9, 2**31 - 2, 2**63, 10**30, 10**400, 1e308, float("nan"), True])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_the_files_do_not_hold_takes_no_memory(key: str, value: Any, folder: Path) -> None:
    change(folder, **{key: value})
    line = refusal(lambda: load(folder))
    assert key in line or 0 < value < 2**31


@pytest.mark.parametrize(("name", "key"), [("mixtral", "num_local_experts"), ("qwen3_moe", "moe_intermediate_size"),
                                           ("mamba2", "state_size"), ("gpt2", "n_positions")])  # fmt: skip
@pytest.mark.parametrize("value", [10**6, 2**31 - 8])
def test_sizes_of_other_families(name: str, key: str, value: int, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    change(tmp_path, **{key: value})
    refusal(lambda: load(tmp_path))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 1e308},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_slow": 1e-308},
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1, "short_factor": [1.0] * 8,
         "long_factor": [1.0] * 8, "rope_theta": 1e4},
        {"rope_type": "linear", "factor": 10**400, "rope_theta": 1e4},
        {"rope_type": [[]], "rope_theta": 1e4},
    ],
)  # fmt: skip
def test_rotary_settings_that_cannot_be_computed(rope: dict[str, Any], folder: Path) -> None:
    change(folder, rope_parameters=rope)
    refusal(lambda: load(folder))


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    "value", [nested(800), [1] * 10**5, "x" * 10**6, {"a": "b\nc"}, "\ud800", {"k" * 10**5: 1}], ids=range(6)
)
@pytest.mark.parametrize(
    "key", ["hidden_size", "rope_parameters", "architectures", "quantization_config", "hidden_act"]
)
def test_whatever_a_value_is_the_message_is_one_line(key: str, value: Any, folder: Path) -> None:
    change(folder, **{key: value})
    refusal(lambda: load(folder))


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, '{"a":' * 10**5, '{"architectures": ["LlamaForCausalLM"], "hidden_size": ' + "9" * 5000 + "}",
     "\0", "", "{}", "null", '"' + "a" * 10**6],
    ids=range(8),
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_json_that_is_none(name: str, text: str, folder: Path) -> None:
    if name == INDEX:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / name).write_text(text)
    if (name, text) != ("generation_config.json", "{}"):
        assert name in refusal(lambda: load(folder)) or (name, text) == ("config.json", "{}")


FAKES: dict[str, Edit] = {
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", WEIGHTS, INDEX, "pytorch_model.bin"])
@pytest.mark.parametrize("fake", FAKES)
def test_what_is_no_file_is_not_read(fake: str, name: str, folder: Path) -> None:
    if name in (INDEX, "pytorch_model.bin"):
        (folder / WEIGHTS).unlink()
    (folder / name).unlink(missing_ok=True)
    FAKES[fake](folder / name)
    if (fake, name) != ("loop", "generation_config.json"):
        assert str(folder) in refusal(lambda: load(folder))


def tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, tuple[Any, bytes]] = {
    "overlap": ({EMBEDDING: tensor([2], [0, 8]), "b": tensor([2], [4, 12])}, bytes(12)),
    "beyond": ({EMBEDDING: tensor([96, 64], [0, 24576])}, b"1"),
    "twice": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":'
              b'[4,8]}}', bytes(8)),
    "product": ({EMBEDDING: tensor([2**40, 2**40], [0, 8])}, bytes(8)),
    "nothing": ({EMBEDDING: tensor([0, 2**62, 2**62], [0, 0])}, b""),
    "negative": ({EMBEDDING: tensor([-1, 64], [0, 8])}, bytes(8)),
    "no text": (b'{"\xff":1}', b""),
    "deep": (b'{"a":' * 10**5, b""),
    "name": ({"a." * 10**5: tensor([1], [0, 4])}, bytes(4)),
    "lines": ({"a\nb": tensor([1], [0, 4])}, bytes(4)),
    "spaces": (b"{}" + b" " * (1 << 20), b""),
    **{dtype: ({EMBEDDING: tensor([8], [0, size], dtype)}, bytes(size))
       for dtype, size in (("F4", 4), ("F8_E8M0", 8), ("C64", 64), ("BOOL", 8), ("I64", 64), ("Q", 8))},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(name: str, folder: Path) -> None:
    header, data = HEADERS[name]
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data)
    refusal(lambda: load(folder))


@pytest.mark.parametrize("length", [0, 1, 100, 10**8, 2**40, 2**63, 2**64 - 1])
def test_lengths_of_headers(length: int, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + b"{}")
    assert WEIGHTS in refusal(lambda: load(folder))


@pytest.mark.parametrize(
    ("tensor_name", "file"),
    [
        ("a\nb", "a.safetensors"),
        ("a", "b.safetensors"),
        ("a", "../a.safetensors"),
        ("a", "/etc/a.safetensors"),
        ("a", ".."),
        ("a", "b\0.safetensors"),
        ("a", "\ud800.safetensors"),
        ("a", "b" * 5000 + ".safetensors"),
        ("a", ["a.safetensors"]),
        ("a" * 10**5, "a.safetensors"),
    ],
    ids=range(10),
)
def test_indexes(tensor_name: str, file: Any, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {tensor_name: file}}))
    assert str(folder) in refusal(lambda: load(folder))


def test_damaged_bytes(good: Path, folder: Path) -> None:
    whole = (good / WEIGHTS).read_bytes()
    (header_size,) = struct.unpack("<Q", whole[:8])
    picker = random.Random(0)
    num_refused = 0
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(picker.choice((1, 1, 3))):
            data[picker.randrange(8 + header_size)] = picker.randrange(256)
        (folder / WEIGHTS).write_bytes(data[: picker.choice((len(data), picker.randrange(len(data))))])
        num_refused += load_or_refuse(folder) is not None
    assert num_refused > 80
