"""bitsandbytes checkpoints, written by the library itself: what is loaded is what the library makes of them."""

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats import packed_ints
from backend_engine.quantization.formats.bitsandbytes import BitsAndBytes, read
from backend_engine.quantization.schemes.codebook4 import Codebook4
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.weight_format import StoredTensors
from tests.support.packed_llama import check_packed_llama
from tests.support.weight_formats import WHERE, decoded, described, largest_temporary, load

MODULE = "model.layers.0.mlp.down_proj"
STATE = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
EIGHT = {"load_in_8bit": True}


def quantization(stored: StoredTensors, config: dict[str, Any], **changes: Any) -> BitsAndBytes:
    return read(HfConfig({"quant_method": "bitsandbytes", **config, **changes}, WHERE), stored)


def write4(
    shape: tuple[int, ...],
    kind: str = "nf4",
    nested: bool = False,
    block_size: int = 64,
    storage: torch.dtype = torch.uint8,
    seed: int = 0,
    std: float = 1.0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random weight as the library saves them, and what the library decodes."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
    packed, state = functional.quantize_4bit(
        weight, blocksize=block_size, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    parts = {f"{MODULE}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    # As one row with an even number of columns: the library compiles something for odd ones, which takes its time.
    state.shape = torch.Size((1, weight.numel() + weight.numel() % 2))
    decoded_row = functional.dequantize_4bit(packed, state).flatten()
    return {f"{MODULE}.weight": packed, **parts}, decoded_row[: weight.numel()].view(shape)


def write8(shape: tuple[int, int], seed: int = 0, std: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
    """The same for LLM.int8, through the library's layer."""
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    layer.to("cpu")
    tensors = {f"{MODULE}.{name}": tensor for name, tensor in layer.state_dict().items()}
    expected = functional.int8_vectorwise_dequant(tensors[f"{MODULE}.weight"], tensors[f"{MODULE}.SCB"])
    return tensors, expected


def with_state(tensors: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """The tensors with another quantization state, which keys with ``None`` are taken out of."""
    state = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
    data = json.dumps({key: value for key, value in state.items() if value is not None}).encode()
    return {**tensors, STATE: torch.tensor(list(data), dtype=torch.uint8)}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_four_bits_in_every_setting(kind: str, nested: bool, block_size: int) -> None:
    shape = (96, 256)
    tensors, expected = write4(shape, kind, nested, block_size)
    config = quantization(described(tensors), FOUR)
    packing, _ = load(config, tensors, MODULE, shape)
    assert torch.equal(decoded(config, tensors, MODULE, shape), expected)
    assert set(packing.scheme.components(256)) == {"codes", "scales"}


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 150),
    kind=st.sampled_from(["nf4", "fp4"]),
    nested=st.booleans(),
    block_size=st.sampled_from([64, 128, 4096]),
    seed=st.integers(0, 99),
)
def test_four_bits_of_any_shape_whatever_blocks_lie_over_the_ends_of_rows(
    rows: int, columns: int, kind: str, nested: bool, block_size: int, seed: int
) -> None:
    tensors, expected = write4((rows, columns), kind, nested, block_size, seed=seed)
    config = quantization(described(tensors), FOUR)
    assert torch.equal(decoded(config, tensors, MODULE, (rows, columns)), expected)


def test_stacked_weights() -> None:
    tensors, expected = write4((3, 8, 96))
    assert torch.equal(decoded(quantization(described(tensors), FOUR), tensors, MODULE, (3, 8, 96)), expected)


@pytest.mark.parametrize(("columns", "group_size"), [(128, 64), (96, 32), (80, 16), (100, 4), (50, None), (33, None)])
def test_rows_stay_packed_where_groups_are_worth_a_scale(columns: int, group_size: int | None) -> None:
    tensors, _ = write4((4, columns))
    packing = quantization(described(tensors), FOUR, bnb_4bit_compute_dtype="bfloat16").format_of(MODULE)
    assert packing is not None
    chosen = packing.scheme.for_columns(columns)  # type: ignore[attr-defined]
    if group_size is None:
        assert chosen == Plain(torch.bfloat16)
    else:
        assert isinstance(chosen, Codebook4) and chosen.group_size == group_size


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_stored_as_another_dtype(storage: torch.dtype) -> None:
    tensors, expected = write4((16, 128), storage=storage)
    assert tensors[f"{MODULE}.weight"].dtype == storage
    assert torch.equal(decoded(quantization(described(tensors), FOUR), tensors, MODULE, (16, 128)), expected)


def test_eight_bits() -> None:
    tensors, expected = write8((48, 80))
    assert f"{MODULE}.weight_format" in tensors
    weight = decoded(quantization(described(tensors), EIGHT), tensors, MODULE, (48, 80))
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0.0)
    exact = tensors[f"{MODULE}.weight"].float() * (tensors[f"{MODULE}.SCB"] / 127)[:, None]
    assert torch.equal(weight, exact)


def test_eight_bits_without_a_weight_format() -> None:
    tensors, expected = write8((48, 80))
    del tensors[f"{MODULE}.weight_format"]
    weight = decoded(quantization(described(tensors), EIGHT), tensors, MODULE, (48, 80))
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0.0)


def test_eight_bits_in_an_order_of_some_gpu_are_refused() -> None:
    tensors, _ = write8((48, 80))
    tensors[f"{MODULE}.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="weight_format is 2; expected 0, rows one after another"):
        load(quantization(described(tensors), EIGHT), tensors, MODULE, (48, 80))


@pytest.mark.parametrize("config", [FOUR, EIGHT])
def test_the_tensors_tell_what_is_packed(config: dict[str, Any]) -> None:
    tensors, _ = write4((16, 64)) if config is FOUR else write8((16, 64))
    others = {"lm_head.weight": torch.zeros(4, 4), f"{MODULE}.bias": torch.zeros(16)}
    read_config = quantization(described({**tensors, **others}), config, llm_int8_skip_modules=["lm_head"])
    assert read_config.format_of(MODULE) is not None
    assert read_config.format_of("lm_head") is None
    assert read_config.format_of(f"{MODULE}.bias") is None


@pytest.mark.parametrize("absent", ["", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4", ".nested_quant_map"])
def test_four_bits_that_lack_a_tensor_stay_packed(absent: str) -> None:
    tensors, _ = write4((16, 64), nested=True)
    del tensors[f"{MODULE}.weight{absent}"]
    packing = quantization(described(tensors), FOUR).format_of(MODULE)
    assert packing is not None
    assert not packing.leaves((16, 64))[f".weight{absent}"].is_optional


@pytest.mark.parametrize("absent", ["weight", "SCB"])
def test_eight_bits_that_lack_a_tensor_stay_packed(absent: str) -> None:
    tensors, _ = write8((16, 64))
    del tensors[f"{MODULE}.{absent}"]
    packing = quantization(described(tensors), EIGHT).format_of(MODULE)
    assert packing is not None
    assert not packing.leaves((16, 64))[f".{absent}"].is_optional


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "load_in_4bit is missing; expected true, or load_in_8bit true, not both"),
        ({**FOUR, **EIGHT}, "load_in_4bit is True; expected true, or load_in_8bit true, not both"),
        ({"load_in_4bit": 1}, "load_in_4bit is 1; expected true or false"),
        ({**FOUR, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'; expected one of fp4, nf4"),
        (
            {**FOUR, "bnb_4bit_compute_dtype": "int8"},
            "bnb_4bit_compute_dtype is 'int8'; expected one of bfloat16, float16, float32",
        ),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^{WHERE}: {message}$"):
        quantization(described({}), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [64, 16]}, r"shape \[64, 16\]; its tensors fit \[16, 64\]"),
        ({"shape": None}, r"shape None; its tensors fit \[16, 64\]"),
        ({"blocksize": 128}, "blocksize 128; its tensors fit 64"),
        ({"quant_type": "fp4"}, "quant_type 'fp4'; its tensors fit 'nf4'"),
        ({"nested_blocksize": 64}, "nested_blocksize 64; its tensors fit 256"),
        ({"nested_offset": "0"}, "nested_offset '0'; expected a number"),
        ({"nested_offset": None}, "nested_offset None; expected a number"),
        ({"nested_offset": float("nan")}, "nested_offset nan; expected a number"),
    ],
)
def test_quantization_states_that_contradict_the_tensors_are_refused(changes: dict[str, Any], message: str) -> None:
    tensors = with_state(write4((16, 64), nested=True)[0], **changes)
    with pytest.raises(ValueError, match=f"^quantization state has {message}$"):
        load(quantization(described(tensors), FOUR), tensors, MODULE, (16, 64))


@pytest.mark.parametrize(
    ("text", "message"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "is not a JSON object")]
)
def test_quantization_states_that_are_none_are_refused(text: bytes, message: str) -> None:
    tensors, _ = write4((16, 64))
    tensors[STATE] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"^quantization state {message}$"):
        load(quantization(described(tensors), FOUR), tensors, MODULE, (16, 64))


def test_another_codebook_is_refused() -> None:
    tensors, _ = write4((16, 64))
    tensors[f"{MODULE}.weight.quant_map"][3] += 0.01
    with pytest.raises(ValueError, match=r"^quant_map is not that of nf4$"):
        load(quantization(described(tensors), FOUR), tensors, MODULE, (16, 64))


def test_shapes_that_contradict_the_config_show_in_the_leaves() -> None:
    tensors, _ = write4((16, 64))
    packing = quantization(described(tensors), FOUR).format_of(MODULE)
    assert packing is not None
    assert packing.leaves((16, 128))[".weight"].shape == (1024, 1)
    wide, _ = write4((16, 64), storage=torch.float32)
    packing = quantization(described(wide), FOUR).format_of(MODULE)
    assert packing is not None
    with pytest.raises(ValueError, match=r"a weight of shape \[1, 3\] does not fill whole numbers of F32"):
        packing.leaves((1, 3))


@pytest.mark.parametrize(("columns", "nested"), [(512, True), (512, False), (525, True)])
def test_unpacking_needs_little_memory(monkeypatch: pytest.MonkeyPatch, columns: int, nested: bool) -> None:
    shape = (256, columns)
    tensors, expected = write4(shape, nested=nested)
    monkeypatch.setattr(packed_ints, "_CHUNK_NUMBERS", 1024)
    packing, parts = load(quantization(described(tensors), FOUR), tensors, MODULE, shape)
    assert torch.equal(packing.scheme.decode(parts), expected)
    leaves = {name.removeprefix(MODULE): tensor for name, tensor in tensors.items()}
    # Scales are 4 bytes for 64 numbers.
    assert largest_temporary(lambda: packing.unpack(leaves, shape), leaves) <= 10 * 1024


@pytest.mark.parametrize("name", ["nf4", "fp4, nested", "int8"])
def test_logits_of_a_llama_are_those_of_the_decoded_one(name: str, tmp_path: Path) -> None:
    def pack(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
        if name == "int8":
            return write8(shape, seed, std=0.1)
        return write4(shape, name[:3], nested="nested" in name, seed=seed, std=0.1)

    config = EIGHT if name == "int8" else FOUR
    check_packed_llama(tmp_path, {"quant_method": "bitsandbytes", **config}, MODULE, pack)
