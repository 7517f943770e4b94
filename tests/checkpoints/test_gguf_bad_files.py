"""Damaged GGUF files: each fault is one line that names the file and the culprit, and costs no memory."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend_engine.checkpoint.gguf_checkpoint import open_gguf
from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.gguf import read
from backend_engine.quantization.weight_format import StoredTensors

HIDDEN, VOCAB = 32, 20
MAX_BYTES = 64 << 20
COUNTS_AT, FIRST_KEY_AT = 8, 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a tiny Llama with a tensor of each kind of storage."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    random = np.random.default_rng(0)
    for name, rows, kind in (
        ("token_embd", VOCAB, Type.Q8_0),
        ("output_norm", 0, Type.F32),
        ("blk.0.attn_norm", 0, Type.F32),
        ("blk.0.attn_q", 32, Type.Q4_0),
        ("blk.0.attn_k", 16, Type.F16),
        ("blk.0.attn_v", 16, Type.BF16),
        ("blk.0.attn_output", 32, Type.Q5_1),
    ):
        data = random.standard_normal((rows, HIDDEN) if rows else HIDDEN).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_all(path: Path) -> int:
    """Open the file and decode every tensor; the number of them."""
    (reader,) = open_gguf(path).open_tensors()
    infos = {name: reader.describe(name) for name in reader.names()}
    quantization = read(HfConfig({"quant_method": "gguf"}), StoredTensors(infos, str(path)))
    for name, info in infos.items():
        tensor = reader.read(name)
        assert tuple(tensor.shape) == info.shape
        packing = quantization.format_of(name.removesuffix(".weight"))
        if packing is not None:
            block, num_bytes = gguf.GGML_QUANT_SIZES[Type[info.dtype]]
            shape = (*info.shape[:-1], info.shape[-1] // num_bytes * block)
            packing.scheme.decode(packing.unpack({".weight": tensor}, shape))
    return len(infos)


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        read_all(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text.replace(str(path), "FILE")


def tensor_entry(data: bytes, name: str) -> int:
    """Where what follows the tensor's name begins: number of dimensions, dimensions, type, offset."""
    full = f"{name}.weight".encode()
    return data.index(struct.pack("<Q", len(full)) + full) + 8 + len(full)


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def test_the_whole_file_is_fine(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    assert read_all(path) == 7


def q(value: int) -> bytes:
    return struct.pack("<Q", value)


Breaking = Callable[[bytes], bytes]
BROKEN: dict[str, tuple[Breaking, str]] = {
    "nothing": (lambda data: b"", "FILE is empty; expected a GGUF file"),
    "magic": (lambda data: b"GGML" + data[4:], "FILE begins with b'GGML'"),
    "version 1": (lambda data: patched(data, 4, b"\x01\0\0\0"), "FILE has GGUF version 1; expected version 2 or 3"),
    "big-endian": (lambda data: patched(data, 4, b"\0\0\0\x03"), "FILE is big-endian"),
    "2^60 tensors": (lambda data: patched(data, COUNTS_AT, q(1 << 60)), "FILE"),
    "2^60 keys": (lambda data: patched(data, COUNTS_AT + 8, q(1 << 60)), "FILE is cut off or corrupt"),
    "a key of 2^62 bytes": (lambda data: patched(data, FIRST_KEY_AT, q(1 << 62)), "FILE is cut off or corrupt"),
    "half a header": (lambda data: data[:200], "FILE is cut off or corrupt"),
    "half the tensors": (lambda data: data[:-2000], "FILE is cut off: it has"),
    "an offset behind the end": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 24, q(1 << 40)),
        "tensor blk.0.attn_q.weight of 576 bytes begins at",
    ),
    "an offset of 2^64 - 32": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 24, q((1 << 64) - 32)),
        "tensor blk.0.attn_q.weight of 576 bytes begins at",
    ),
    "one tensor over another": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 24, q(32)),
        "FILE: tensors token_embd.weight and blk.0.attn_q.weight lie over each other",
    ),
    "an odd offset": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 24, q(33)),
        "FILE: tensor blk.0.attn_q.weight begins at 33",
    ),
    "an unknown type": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 20, b"\xe7\0\0\0"),
        "FILE: tensor blk.0.attn_q.weight is of type 231; expected one of 0, 1, 2",
    ),
    "a type without a decoder": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_k") + 20, struct.pack("<I", Type.I8)),
        "FILE: tensor model.layers.0.self_attn.k_proj.weight is of type I8; expected one of F64",
    ),
    "2^62 columns": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 4, q(1 << 62)),
        "FILE is cut off: it has",
    ),
    "no columns": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 4, q(0)),
        "FILE: tensor blk.0.attn_q.weight has shape [32, 0]; expected sizes of at least 1",
    ),
    "rows of half a block": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q") + 4, q(48)),
        "FILE: tensor blk.0.attn_q.weight has rows of 48; expected a multiple of 32 for Q4_0",
    ),
    "one name twice": (
        lambda data: data.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"),
        "FILE: tensor blk.0.attn_k.weight is there twice",
    ),
    "a name that is no text": (lambda data: data.replace(b"attn_v.weight", b"attn_\xff.weight"), "expected UTF-8 text"),
    "a name of two lines": (
        lambda data: data.replace(b"attn_v.weight", b"attn_\n.weight"),
        r"is called 'blk.0.attn_\n.weight'; expected at most 1000 characters that can be printed",
    ),
    "nine dimensions": (
        lambda data: patched(data, tensor_entry(data, "blk.0.attn_q"), b"\x09"),
        "FILE: tensor blk.0.attn_q.weight has 9 dimensions; expected 4 at most",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_refused_in_one_line(name: str, whole: bytes, tmp_path: Path) -> None:
    damage, message = BROKEN[name]
    data = damage(whole)
    assert data != whole
    tracemalloc.start()
    try:
        assert message in refusal(tmp_path / "model.gguf", data)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def test_an_alignment_that_is_too_small_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_key_value("general.alignment", 4, Kind.UINT32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "FILE: general.alignment is 4; expected a power of two" in refusal(path, path.read_bytes())


def test_a_file_that_shrinks_after_it_was_opened_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    (reader,) = open_gguf(path).open_tensors()
    path.write_bytes(whole[:1000])
    with pytest.raises(ModelLoadError, match=r"tensor blk.0.attn_output.weight cannot be read"):
        reader.read("model.layers.0.self_attn.o_proj.weight")


def test_writing_to_a_tensor_does_not_change_the_file(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    (reader,) = open_gguf(path).open_tensors()
    reader.read("model.norm.weight").zero_()
    assert path.read_bytes() == whole


def parts(tmp_path: Path, whole: bytes, **changed: int) -> Path:
    """A split file of two parts, the second without tensors."""
    values = {"split.no": 1, "split.count": 2, "split.tensors.count": 7, **changed}
    first = tmp_path / "model-00001-of-00002.gguf"
    extra = b""
    for key, value in ({**values, "split.no": 0}).items():
        extra += q(len(key)) + key.encode() + struct.pack("<II", Kind.UINT32, value)
    counts = struct.unpack_from("<QQ", whole, COUNTS_AT)
    header_end = tensor_entry(whole, "token_embd") - 8 - len("token_embd.weight")
    rest = whole[header_end:]
    # The data section begins at the next multiple of 32 behind the list of tensors, which moves with the new keys.
    list_end = tensor_entry(whole, "blk.0.attn_output") + 4 + 16 + 4 + 8
    tensors, data = whole[header_end:list_end], whole[-(-list_end // 32) * 32 :]
    assert rest.startswith(tensors)
    head = whole[:COUNTS_AT] + q(counts[0]) + q(counts[1] + 3) + whole[FIRST_KEY_AT:header_end] + extra + tensors
    first.write_bytes(head + bytes(-len(head) % 32) + data)
    writer = gguf.GGUFWriter(tmp_path / "model-00002-of-00002.gguf", "llama")
    for key, value in values.items():
        writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return first


def test_parts_that_fit_are_read(whole: bytes, tmp_path: Path) -> None:
    assert read_all(parts(tmp_path, whole)) == 7


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"split.count": 3}, "split.count is 3; expected 2, as many as the files' names say"),
        ({"split.no": 0}, "split.no is 0; expected 1, as the file's name says"),
        ({"split.tensors.count": 9}, "split.tensors.count is 9; expected 7, as many as the parts hold"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changed: dict[str, int], message: str, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_all(parts(tmp_path, whole, **changed))
    assert message in str(caught.value)


def test_a_missing_part_is_named(whole: bytes, tmp_path: Path) -> None:
    first = parts(tmp_path, whole)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002.gguf does not belong to a whole model"):
        read_all(first)


def test_a_tensor_in_two_parts_is_refused(whole: bytes, tmp_path: Path) -> None:
    first = parts(tmp_path, whole)
    second = tmp_path / "model-00002-of-00002.gguf"
    second.write_bytes(
        first.read_bytes().replace(b"split.no" + struct.pack("<II", 4, 0), b"split.no" + struct.pack("<II", 4, 1))
    )
    with pytest.raises(ModelLoadError, match=r"^tensor token_embd.weight is in two files, model-00001.*model-00002"):
        read_all(first)


def check_damage(path: Path, data: bytes) -> None:
    """The file is read or refused, and nothing else."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read_all(path)
    except ModelLoadError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_BYTES, peak


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_read_or_refused(data: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    header = whole.index(b"blk.0.attn_output.weight") + 64
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        damaged[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(damaged))) if data.draw(st.booleans()) else len(damaged)
    check_damage(tmp_path / "model.gguf", bytes(damaged[:end]))
