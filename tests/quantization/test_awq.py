"""AWQ checkpoints, written here by the published layouts: what is loaded is what they stand for, number by number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats import packed_ints
from backend_engine.quantization.formats.awq import Awq, read
from backend_engine.quantization.weight_format import StoredTensors
from tests.support.packed_llama import check_packed_llama
from tests.support.weight_formats import WHERE, decoded, described, largest_temporary, load, words_of

MODULE = "model.layers.0.mlp.down_proj"
CONFIG: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
# Where column j of eight is put in a word of the gemm version, which holds columns 0, 2, 4, 6, 1, 3, 5, 7.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def quantization(stored: StoredTensors, **changes: Any) -> Awq:
    return read(HfConfig({**CONFIG, **changes}, WHERE), stored)


def padded_width(columns: int, group_size: int) -> int:
    """Groups of a row in the gemv versions, padding included: whole words, two or four of them for small groups."""
    multiple = {32: 4, 64: 2}.get(group_size, 1) * 8
    return -(-(columns // group_size) // multiple) * multiple


def write(
    shape: tuple[int, int],
    version: str = "gemm",
    group_size: int = 32,
    has_zeros: bool = True,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random weight, and the weight."""
    rng = torch.Generator().manual_seed(seed)
    rows, columns = shape
    size = columns if group_size == -1 else group_size
    groups = columns // size
    codes = torch.randint(0, 16, shape, generator=rng)
    zeros = torch.randint(0, 16, (rows, groups), generator=rng) if has_zeros else torch.full((rows, groups), 8)
    # Eighths, so that scale times zero point is exact in any dtype.
    scales = (torch.randint(1, 16, (rows, groups), generator=rng) / 8).to(dtype)
    group_of = torch.arange(columns) // size
    weight = (codes - zeros[:, group_of]).float() * scales[:, group_of].float()
    if version == "gemm":
        tensors = {
            "qweight": words_of(codes.t(), 4, PLACES),
            "qzeros": words_of(zeros.t(), 4, PLACES),
            "scales": scales.t().contiguous(),
        }
    else:
        padding = torch.zeros(rows, padded_width(columns, size) - groups, dtype=torch.int64)
        padded_scales = torch.cat((scales, padding.to(dtype)), 1)
        if version == "gemv":
            qzeros = words_of(torch.cat((zeros, padding), 1), 4)
            tensors = {"qweight": words_of(codes, 4), "qzeros": qzeros, "scales": padded_scales}
        else:
            offsets = torch.cat((-scales * zeros, padding), 1).to(dtype)
            tensors = {"qweight": interleaved(codes), "qzeros": offsets.t(), "scales": padded_scales.t()}
    if not has_zeros:
        del tensors["qzeros"]
    return {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, weight


def interleaved(codes: Tensor) -> Tensor:
    """int16 ``[rows / 4, columns]``, code by code: 64 columns of four rows take 64 words."""
    rows, columns = codes.shape
    words = [[0] * columns for _ in range(rows // 4)]
    for row in range(rows):
        for column in range(columns):
            pair, is_odd = divmod(column % 32, 2)
            place = column % 64 // 32 * 32 + pair % 4 * 8 + is_odd * 4 + pair // 4
            word, nibble = divmod(row % 4 * 64 + place, 4)
            words[row // 4][column // 64 * 64 + word] |= int(codes[row, column]) << (4 * nibble)
    return torch.tensor(words, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_setting_gives_the_weight(version: str, group_size: int, dtype: torch.dtype) -> None:
    shape = (16, 384)
    tensors, weight = write(shape, version, group_size, dtype=dtype)
    config = quantization(described(tensors), version=version, group_size=group_size)
    assert torch.equal(decoded(config, tensors, MODULE, shape), weight)
    assert load(config, tensors, MODULE, shape)[1]["scales"].dtype == dtype


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 5), size=st.integers(1, 12), seed=st.integers(0, 99))
def test_any_shape_of_whole_groups(rows: int, groups: int, size: int, seed: int) -> None:
    shape = (8 * rows, 2 * size * groups)
    tensors, weight = write(shape, group_size=2 * size, seed=seed)
    config = quantization(described(tensors), group_size=2 * size)
    assert torch.equal(decoded(config, tensors, MODULE, shape), weight)


@settings(max_examples=20, deadline=None)
@given(
    version=st.sampled_from(["gemv", "gemv_fast"]),
    rows=st.integers(1, 3),
    groups=st.integers(1, 40),
    size=st.sampled_from([64, 128]),
)
def test_any_number_of_groups_however_padded(version: str, rows: int, groups: int, size: int) -> None:
    shape = (4 * rows, size * groups)
    tensors, weight = write(shape, version, size)
    config = quantization(described(tensors), version=version, group_size=size)
    assert torch.equal(decoded(config, tensors, MODULE, shape), weight)


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_without_zero_points_they_are_in_the_middle(version: str) -> None:
    tensors, weight = write((16, 128), version, has_zeros=False)
    config = quantization(described(tensors), version=version, zero_point=False)
    assert torch.equal(decoded(config, tensors, MODULE, (16, 128)), weight)


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_zero_points_that_are_stored_count_whatever_the_config_says(version: str) -> None:
    tensors, weight = write((16, 128), version)
    config = quantization(described(tensors), version=version, zero_point=False)
    assert torch.equal(decoded(config, tensors, MODULE, (16, 128)), weight)


@pytest.mark.parametrize("changes", [{"version": "llm-awq"}, {"backend": "llm-awq"}])
def test_llm_awq_calls_its_zeros_by_another_name(changes: dict[str, str]) -> None:
    tensors, weight = write((16, 128), "gemv_fast")
    tensors[f"{MODULE}.scaled_zeros"] = tensors.pop(f"{MODULE}.qzeros")
    assert torch.equal(decoded(quantization(described(tensors), **changes), tensors, MODULE, (16, 128)), weight)


@pytest.mark.parametrize("version", ["GEMM", "exllama", "ipex", None])
def test_other_names_of_gemm(version: str | None) -> None:
    tensors, weight = write((16, 128))
    config = quantization(described(tensors), version=version)
    assert torch.equal(decoded(config, tensors, MODULE, (16, 128)), weight)


def test_names_of_older_and_newer_writers() -> None:
    tensors, weight = write((16, 128), "gemv")
    config = read(HfConfig({"w_bit": 4, "q_group_size": 32, "version": "GEMV"}, WHERE), described(tensors))
    assert torch.equal(decoded(config, tensors, MODULE, (16, 128)), weight)
    config = read(HfConfig({"bits": 4, "group_size": 32, "checkpoint_format": "gemv"}, WHERE), described(tensors))
    assert torch.equal(decoded(config, tensors, MODULE, (16, 128)), weight)


def test_the_tensors_tell_what_is_packed() -> None:
    tensors, _ = write((16, 128))
    stored = described(
        {**tensors, "model.layers.0.mlp.gate.weight": torch.zeros(4, 16), f"{MODULE}.bias": torch.zeros(1)}
    )
    # Such a list means whatever has "gate" in its name, but for what was packed all the same.
    config = quantization(stored, modules_to_not_convert=["gate", "down"])
    assert config.format_of("model.layers.0.mlp.gate") is None
    assert config.format_of(f"{MODULE}.bias") is None
    assert config.format_of(MODULE) is not None


@pytest.mark.parametrize("absent", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_a_weight_that_lacks_a_tensor_stays_packed(version: str, absent: str) -> None:
    tensors, _ = write((16, 128), version)
    del tensors[f"{MODULE}.{absent}"]
    packing = quantization(described(tensors), version=version).format_of(MODULE)
    assert packing is not None
    assert not packing.leaves((16, 128))[f".{absent}"].is_optional


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits is 3; expected 4"),
        ({"bits": None}, "bits is missing; expected 4"),
        ({"bits": None, "w_bit": 8}, "w_bit is 8; expected 4"),
        ({"group_size": 0}, "group_size is 0; expected a number of columns, or -1 for a whole row"),
        ({"group_size": True}, "group_size is True; expected a number of columns, or -1 for a whole row"),
        ({"group_size": None, "q_group_size": -3}, "q_group_size is -3; expected a number of columns, or -1"),
        ({"zero_point": "no"}, "zero_point is 'no'; expected true or false"),
        (
            {"version": "marlin"},
            "version is 'marlin'; expected one of exllama, gemm, gemv, gemv_fast, ipex, llm-awq",
        ),
        ({"version": 2}, "version is 2; expected one of exllama, gemm"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^{WHERE}: {message}"):
        quantization(described({}), **changes)


@pytest.mark.parametrize(
    ("version", "group_size", "shape", "message"),
    [
        ("gemm", 32, (12, 64), "rows in multiples of 8 and columns in multiples of 2, not shape .12, 64."),
        ("gemm", 32, (2, 16, 64), "not shape .2, 16, 64."),
        ("gemm", 32, (16, 48), "whole groups of 32 columns, not 48 columns"),
        ("gemv", 32, (16, 60), "columns in multiples of 8, not shape .16, 60."),
        ("gemv", 16, (16, 64), "groups of 32, 64, 128 or more columns, not 16"),
        ("gemv", 96, (16, 192), "groups of 32, 64, 128 or more columns, not 96"),
        ("gemv", -1, (16, 24), "groups of 32, 64, 128 or more columns, not 24"),
        ("gemv_fast", 32, (6, 64), "rows in multiples of 4 and columns in multiples of 64, not shape .6, 64."),
        ("gemv_fast", 32, (8, 96), "rows in multiples of 4 and columns in multiples of 64, not shape .8, 96."),
    ],
)
def test_shapes_that_a_version_cannot_have_are_refused(
    version: str, group_size: int, shape: tuple[int, ...], message: str
) -> None:
    stored = described({f"{MODULE}.qweight": torch.zeros(1)})
    packing = quantization(stored, version=version, group_size=group_size).format_of(MODULE)
    assert packing is not None
    with pytest.raises(ValueError, match=message):
        packing.leaves(shape)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_unpacking_needs_little_memory(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    shape = (128, 512)
    tensors, weight = write(shape, version)
    monkeypatch.setattr(packed_ints, "_CHUNK_NUMBERS", 4096)
    packing, parts = load(quantization(described(tensors), version=version), tensors, MODULE, shape)
    assert torch.equal(packing.scheme.decode(parts), weight)
    leaves = {name.removeprefix(MODULE): tensor for name, tensor in tensors.items()}
    # What goes by groups is 1 / 32 of the weight's numbers.
    assert largest_temporary(lambda: packing.unpack(leaves, shape), leaves) <= 10 * 4096


def test_logits_of_a_llama_are_those_of_the_decoded_one(tmp_path: Path) -> None:
    def pack(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
        tensors, weight = write(shape, group_size=16, seed=seed)
        # As small as weights are.
        tensors[f"{MODULE}.scales"] /= 64
        return tensors, weight / 64

    check_packed_llama(tmp_path, {**CONFIG, "group_size": 16}, MODULE, pack)
