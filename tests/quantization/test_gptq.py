"""GPTQ checkpoints, written here by the published layout: what is loaded is what they stand for, number by number."""

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
from backend_engine.quantization.formats.gptq import Gptq, read
from backend_engine.quantization.schemes.inputs import ReorderedInput
from backend_engine.quantization.weight_format import StoredTensors
from tests.support.packed_llama import check_packed_llama
from tests.support.weight_formats import WHERE, decoded, described, largest_temporary, load, words_of

MODULE = "model.layers.0.mlp.down_proj"
CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def quantization(stored: StoredTensors, **changes: Any) -> Gptq:
    return read(HfConfig({**CONFIG, **changes}, WHERE), stored)


def write(
    shape: tuple[int, int],
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    less: int = 1,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random weight, and the weight. ``less``: what is taken off the zero points."""
    rng = torch.Generator().manual_seed(seed)
    rows, columns = shape
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    codes = torch.randint(0, 1 << bits, shape, generator=rng)
    # Less one, a zero point of 0 is not to be told from the largest in every bit width.
    zeros = torch.randint(less, 1 << bits, (groups, rows), generator=rng)
    if sym:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scales = (torch.rand(groups, rows, generator=rng) + 0.1).to(dtype)
    group_of = torch.arange(columns) // size
    if act_order:
        group_of = group_of[torch.randperm(columns, generator=rng)]
    weight = (codes - zeros.t()[:, group_of]).float() * scales.t()[:, group_of].float()
    tensors = {
        f"{MODULE}.qweight": words_of(codes, bits).t().contiguous(),
        f"{MODULE}.qzeros": words_of(zeros - less, bits),
        f"{MODULE}.scales": scales,
        f"{MODULE}.g_idx": group_of.to(torch.int32),
    }
    return tensors, weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 64])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_every_setting_gives_the_weight(bits: int, group_size: int, sym: bool, act_order: bool) -> None:
    tensors, weight = write((64, 128), bits, group_size, sym, act_order)
    config = quantization(described(tensors), bits=bits, group_size=group_size, sym=sym, desc_act=act_order)
    assert torch.equal(decoded(config, tensors, MODULE, (64, 128)), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("act_order", [True, False])
def test_scales_keep_the_dtype_they_are_stored_in(dtype: torch.dtype, act_order: bool) -> None:
    tensors, weight = write((16, 64), act_order=act_order, dtype=dtype)
    config = quantization(described(tensors), desc_act=act_order)
    packing, parts = load(config, tensors, MODULE, (16, 64))
    assert parts["scales"].dtype == dtype
    assert torch.equal(packing.scheme.decode(parts), weight)


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 5),
    group_size=st.integers(1, 80),
    act_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_even_with_a_last_group_that_is_shorter(
    bits: int, rows: int, columns: int, group_size: int, act_order: bool, seed: int
) -> None:
    shape = (32 * rows, 32 * columns)
    tensors, weight = write(shape, bits, group_size, sym=False, act_order=act_order, seed=seed)
    config = quantization(described(tensors), bits=bits, group_size=group_size, desc_act=act_order)
    assert torch.equal(decoded(config, tensors, MODULE, shape), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_in_version_2_zero_points_are_stored_as_they_are(bits: int, key: str) -> None:
    tensors, weight = write((32, 64), bits, sym=False, less=0)
    config = quantization(described(tensors), bits=bits, sym=False, **{key: "gptq_v2"})
    assert torch.equal(decoded(config, tensors, MODULE, (32, 64)), weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_0_that_borrowed_from_their_neighbour(bits: int) -> None:
    tensors, weight = write((32, 64), bits, sym=False, less=0)
    # GPTQModel takes the ones off whole words.
    ones = sum(1 << (i * bits) for i in range(32 // bits))
    tensors[f"{MODULE}.qzeros"] -= ones
    config = quantization(described(tensors), bits=bits, sym=False)
    assert torch.equal(decoded(config, tensors, MODULE, (32, 64)), weight)


def test_three_bits_less_one_wrap_within_each_zero_point() -> None:
    tensors, _ = write((32, 64), 3, sym=False)
    tensors[f"{MODULE}.qzeros"] = words_of(torch.full((2, 32), 7), 3)
    _, parts = load(quantization(described(tensors), bits=3), tensors, MODULE, (32, 64))
    assert not parts["zeros"].any()


def test_without_g_idx_columns_are_in_order() -> None:
    tensors, weight = write((16, 64))
    del tensors[f"{MODULE}.g_idx"]
    assert torch.equal(decoded(quantization(described(tensors)), tensors, MODULE, (16, 64)), weight)


def test_act_order_in_the_config_with_columns_in_order() -> None:
    tensors, weight = write((16, 64))
    assert torch.equal(decoded(quantization(described(tensors), desc_act=True), tensors, MODULE, (16, 64)), weight)


def test_a_config_silent_about_act_order_allows_for_it() -> None:
    tensors, weight = write((16, 64), act_order=True)
    config = read(HfConfig({"bits": 4, "group_size": 32}, WHERE), described(tensors))
    packing = config.format_of(MODULE)
    assert packing is not None and isinstance(packing.scheme, ReorderedInput)
    assert torch.equal(decoded(config, tensors, MODULE, (16, 64)), weight)


def test_one_group_needs_no_order() -> None:
    tensors, _ = write((16, 64), group_size=-1, act_order=True)
    packing = quantization(described(tensors), group_size=-1, desc_act=True).format_of(MODULE)
    assert packing is not None and not isinstance(packing.scheme, ReorderedInput)


def test_columns_out_of_order_against_the_config_are_refused() -> None:
    tensors, _ = write((16, 64), act_order=True)
    with pytest.raises(ValueError, match="g_idx spreads groups over the row, which desc_act false rules out"):
        load(quantization(described(tensors)), tensors, MODULE, (16, 64))


@pytest.mark.parametrize("first", [0, 5, -1])
def test_groups_of_unequal_size_are_refused(first: int) -> None:
    tensors, _ = write((16, 64), act_order=True)
    groups = tensors[f"{MODULE}.g_idx"]
    groups[groups.tolist().index(1)] = first
    with pytest.raises(ValueError, match="g_idx does not have groups of 32 columns, numbered from 0"):
        load(quantization(described(tensors), desc_act=True), tensors, MODULE, (16, 64))


def test_the_tensors_tell_what_is_packed() -> None:
    tensors, _ = write((16, 64))
    plain = torch.zeros(16, 64)
    config = quantization(described({**tensors, "lm_head.weight": plain, f"{MODULE}.bias": torch.zeros(16)}))
    assert config.format_of("lm_head") is None
    assert config.format_of(f"{MODULE}.bias") is None
    assert config.format_of(MODULE) is not None
    packed_head = {name.replace(MODULE, "lm_head"): tensor for name, tensor in tensors.items()}
    assert quantization(described(packed_head), lm_head=True).format_of("lm_head") is not None


@pytest.mark.parametrize("absent", ["qweight", "qzeros", "scales"])
def test_a_weight_that_lacks_a_tensor_stays_packed(absent: str) -> None:
    tensors, _ = write((16, 64))
    del tensors[f"{MODULE}.{absent}"]
    packing = quantization(described(tensors)).format_of(MODULE)
    assert packing is not None
    assert not packing.leaves((16, 64))[f".{absent}"].is_optional


def test_with_act_order_the_order_must_be_there() -> None:
    tensors, _ = write((16, 64))
    packing = quantization(described(tensors), desc_act=True).format_of(MODULE)
    assert packing is not None and not packing.leaves((16, 64))[".g_idx"].is_optional


def test_dynamic_rules_give_modules_settings_of_their_own() -> None:
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(5)]
    written = [
        write((32, 64)),
        write((32, 64), bits=8, group_size=16),
        write((32, 64), act_order=True),
        write((32, 64), bits=3, group_size=-1),
        write((32, 64)),
    ]
    tensors = {
        name.replace(MODULE, module): tensor
        for module, (parts, _) in zip(names, written, strict=True)
        for name, tensor in parts.items()
    }
    dynamic = {
        r"+:model\.layers\.1\.": {"bits": 8, "group_size": 16},
        r".*\.2\.mlp": {"desc_act": True},
        r".*\.[23]\.mlp": {"bits": 3, "group_size": -1},
        r"-:.*\.4\.": {},
    }
    config = quantization(described(tensors), dynamic=dynamic)
    for module, (_, weight) in list(zip(names, written, strict=True))[:4]:
        assert torch.equal(decoded(config, tensors, module, (32, 64)), weight), module
    assert config.format_of(names[4]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits is 5; expected 2, 3, 4 or 8"),
        ({"bits": None}, "bits is missing; expected 2, 3, 4 or 8"),
        ({"bits": "4"}, "bits is '4'; expected 2, 3, 4 or 8"),
        ({"bits": True}, "bits is True; expected 2, 3, 4 or 8"),
        ({"bits": 4.0}, "bits is 4.0; expected 2, 3, 4 or 8"),
        ({"bits": [4]}, "bits is .4.; expected 2, 3, 4 or 8"),
        ({"group_size": 0}, "group_size is 0; expected a number of columns, or -1 for a whole row"),
        ({"group_size": -2}, "group_size is -2; expected a number of columns, or -1 for a whole row"),
        ({"group_size": None}, "group_size is missing; expected a number of columns, or -1 for a whole row"),
        ({"desc_act": "yes"}, "desc_act is 'yes'; expected true or false"),
        ({"sym": 1}, "sym is 1; expected true or false"),
        ({"lm_head": "x"}, "lm_head is 'x'; expected true or false"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; expected one of gptq, gptq_v2"),
        ({"format": "bitblas"}, "format is 'bitblas'; expected one of gptq, gptq_v2"),
        ({"is_marlin_format": True}, "is_marlin_format is True; expected False"),
        ({"pack_dtype": "int64"}, "pack_dtype is 'int64'; expected 'int32'"),
        ({"adapter": {"rank": 8}}, "adapter is .*; expected no such key"),
        ({"dynamic": []}, "dynamic is .*; expected an object"),
        ({"dynamic": {"+:a(": {"bits": 8}}}, r"dynamic: \+:a\( is .*; expected a regular expression as its name"),
        ({"dynamic": {"a": {"bits": 7}}}, "dynamic: a: bits is 7; expected 2, 3, 4 or 8"),
        ({"dynamic": {"a": {"group_size": 0}}}, "dynamic: a: group_size is 0; expected a number of columns"),
        ({"dynamic": {"a": 8}}, "dynamic: a is 8; expected an object"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^{WHERE}: {message}"):
        quantization(described({}), **changes)


@pytest.mark.parametrize(
    ("bits", "shape", "unit"),
    [(3, (32, 48), 32), (3, (16, 64), 32), (4, (12, 64), 8), (8, (64, 6), 4), (2, (8, 64), 16), (4, (2, 32, 32), 8)],
)
def test_shapes_that_do_not_fill_words_are_refused(bits: int, shape: tuple[int, ...], unit: int) -> None:
    packing = quantization(described({f"{MODULE}.qweight": torch.zeros(1)}), bits=bits).format_of(MODULE)
    assert packing is not None
    with pytest.raises(
        ValueError, match=f"GPTQ of {bits} bits needs rows and columns in multiples of {unit}, not shape"
    ):
        packing.leaves(shape)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [True, False])
def test_unpacking_needs_little_memory(monkeypatch: pytest.MonkeyPatch, bits: int, act_order: bool) -> None:
    shape = (256, 512)
    tensors, weight = write(shape, bits, act_order=act_order)
    monkeypatch.setattr(packed_ints, "_CHUNK_NUMBERS", 2048)
    config = quantization(described(tensors), bits=bits, desc_act=act_order)
    packing, parts = load(config, tensors, MODULE, shape)
    assert torch.equal(packing.scheme.decode(parts), weight)
    leaves = {name.removeprefix(MODULE): tensor for name, tensor in tensors.items()}
    # What goes by groups is 1 / 32 of the weight's numbers, what goes by columns less.
    assert largest_temporary(lambda: packing.unpack(leaves, shape), leaves) <= 10 * 2048


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("act_order", [True, False])
def test_logits_of_a_llama_are_those_of_the_decoded_one(bits: int, act_order: bool, tmp_path: Path) -> None:
    def pack(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
        tensors, weight = write(shape, bits, 16, sym=False, act_order=act_order, seed=seed)
        # As small as weights are.
        factor = 2.0 ** -(bits + 2)
        tensors[f"{MODULE}.scales"] *= factor
        return tensors, weight * factor

    config = {**CONFIG, "bits": bits, "group_size": 16, "desc_act": act_order, "sym": False}
    check_packed_llama(tmp_path, config, MODULE, pack)
