"""ModelOpt's exports, written here as its export code writes them: every algorithm is loaded as what it stands for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats import packed_ints
from backend_engine.quantization.formats.modelopt import read
from backend_engine.quantization.weight_format import Quantization, StoredTensors
from tests.support.weight_formats import WHERE, described, largest_temporary, load

MODULE = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 8, 64
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def exported(tensors: dict[str, Tensor], algorithm: str | None, old: bool = False, **more: Any) -> Quantization:
    """As config.json has it, or hf_quant_config.json."""
    body = {"quant_algo": algorithm, **more}
    whole = {"producer": {"name": "modelopt"}, "quantization": body} if old else {**body, "config_groups": {}}
    return read(HfConfig({**whole, "quant_method": "modelopt"}, WHERE), described(tensors))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def named(**leaves: Tensor) -> dict[str, Tensor]:
    return {f"{MODULE}.{name}": tensor for name, tensor in leaves.items()}


def write_float8(scale_shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    codes = (torch.randn(ROWS, COLUMNS, generator=rng()) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape, generator=rng(1)) + 0.25
    return named(weight=codes, weight_scale=scale), codes.float() * scale.reshape(-1, 1)


def write_nvfp4(group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=rng())
    scales = (torch.rand(ROWS, COLUMNS // group_size, generator=rng(1)) * 400).to(torch.float8_e4m3fn)
    scale = torch.tensor(2.0**-9)
    values = torch.tensor((*FP4, *(-v for v in FP4)))[codes]
    weight = values * (scales.float() * scale).repeat_interleave(group_size, 1)
    packed = (codes[:, 1::2] * 16 + codes[:, ::2]).to(torch.uint8)
    return named(weight=packed, weight_scale=scales, weight_scale_2=scale), weight


def write_int4(group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-8, 8, (ROWS, COLUMNS), generator=rng())
    scales = torch.rand(ROWS, COLUMNS // group_size, generator=rng(1)) + 0.25
    packed = torch.zeros(ROWS // 2, COLUMNS, dtype=torch.uint8)
    for row in range(ROWS):
        for column in range(COLUMNS):
            packed[row // 2, column] += int(codes[row, column]) % 16 << (4 * (row % 2))
    return named(weight=packed, weight_scale=scales), codes.float() * scales.repeat_interleave(group_size, 1)


def write_int8() -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), generator=rng()).to(torch.int8)
    scales = torch.rand(ROWS, generator=rng(1)) + 0.25
    return named(weight=codes, weight_scale=scales), codes.float() * scales.unsqueeze(1)


def write_microscaled(algorithm: str) -> tuple[dict[str, Tensor], Tensor]:
    exponents = torch.randint(110, 130, (ROWS, COLUMNS // 32), generator=rng(1))
    powers = torch.pow(2.0, exponents - 127).repeat_interleave(32, 1)
    if algorithm == "MXFP8":
        codes = (torch.randn(ROWS, COLUMNS, generator=rng()) * 60).to(torch.float8_e4m3fn)
        return named(weight=codes, weight_scale=exponents.to(torch.uint8)), codes.float() * powers
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=rng())
    values = torch.tensor((*FP4, *(-v for v in FP4)))[codes]
    packed = (codes[:, 1::2] * 16 + codes[:, ::2]).to(torch.uint8)
    return named(weight=packed, weight_scale=exponents.to(torch.uint8)), values * powers


def write(algorithm: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a random weight, and the weight."""
    match algorithm:
        case "FP8":
            return write_float8(())
        case "FP8_PER_CHANNEL_PER_TOKEN" | "fp8_pc_pt":
            return write_float8((ROWS,))
        case "W4A16_AWQ" | "W4A8_AWQ" | "int4_awq":
            return write_int4(32)
        case "W8A16" | "W8A8_SQ_PER_CHANNEL" | "int8_sq" | "int8_wo":
            return write_int8()
        case "W4A8_NVFP4_FP8":
            return write_nvfp4(32)
        case "NVFP4" | "NVFP4_AWQ" | "W4A16_NVFP4":
            return write_nvfp4(16)
        case _:
            return write_microscaled(algorithm)


def product(found: Quantization, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    packing, parts = load(found, tensors, MODULE, (ROWS, COLUMNS))
    return packing.scheme.multiply(packing.scheme.prepare(parts), x)


def inputs() -> Tensor:
    """Tokens of very different sizes."""
    return torch.randn(5, COLUMNS, generator=rng(2)) * torch.tensor([0.01, 0.5, 1.0, 2.0, 30.0]).unsqueeze(1)


WEIGHT_ONLY = ("MXFP4", "mxfp4", "MXFP8", "NVFP4", "NVFP4_AWQ", "W4A16_AWQ", "W4A16_NVFP4", "W4A8_MXFP4_FP8", "W8A16")
STATIC_FP8 = ("FP8", "W4A8_AWQ", "W4A8_NVFP4_FP8")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("algorithm", [*WEIGHT_ONLY, "int4_awq", "int8_wo"])
def test_algorithms_of_weights_alone_multiply_with_what_they_stand_for(algorithm: str, old: bool) -> None:
    tensors, weight = write(algorithm)
    found = exported(tensors, algorithm, old)
    packing, parts = load(found, tensors, MODULE, (ROWS, COLUMNS))
    assert torch.equal(packing.scheme.decode(parts), weight)
    torch.testing.assert_close(product(found, tensors, inputs()), inputs() @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale_shape", [(), (1,)])
@pytest.mark.parametrize("algorithm", STATIC_FP8)
def test_inputs_are_rounded_to_float8_with_the_stored_scale(algorithm: str, scale_shape: tuple[int, ...]) -> None:
    tensors, weight = write(algorithm)
    tensors |= named(input_scale=torch.full(scale_shape, 0.005))
    if algorithm == "W4A8_AWQ":
        tensors |= named(weight_scale_2=torch.full(scale_shape, 0.01))
    found = exported(tensors, algorithm)
    packing, parts = load(found, tensors, MODULE, (ROWS, COLUMNS))
    assert torch.equal(packing.scheme.decode(parts), weight)
    rounded = (inputs() / 0.005).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.005
    torch.testing.assert_close(product(found, tensors, inputs()), rounded @ weight.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["FP8_PER_CHANNEL_PER_TOKEN", "fp8_pc_pt"])
def test_inputs_are_rounded_to_float8_token_by_token(algorithm: str) -> None:
    tensors, weight = write(algorithm)
    scale = inputs().abs().amax(1, keepdim=True) / 448
    rounded = (inputs() / scale).to(torch.float8_e4m3fn).float() * scale
    found = exported(tensors, algorithm)
    torch.testing.assert_close(product(found, tensors, inputs()), rounded @ weight.t(), rtol=1e-4, atol=1e-3)
    for row in range(5):
        alone = product(found, tensors, inputs()[row : row + 1])
        torch.testing.assert_close(alone[0], rounded[row] @ weight.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["W8A8_SQ_PER_CHANNEL", "int8_sq"])
@pytest.mark.parametrize("has_factors", [False, True])
def test_smooth_quant_multiplies_its_input_by_factors_and_rounds_it_to_integers(
    algorithm: str, has_factors: bool
) -> None:
    tensors, weight = write(algorithm)
    factors = torch.rand(COLUMNS, generator=rng(3)).bfloat16() + 0.5
    tensors |= named(input_scale=torch.tensor(0.02))
    if has_factors:
        tensors |= named(pre_quant_scale=factors)
    scaled = inputs() * factors.float() if has_factors else inputs()
    rounded = (scaled / 0.02).round().clamp(-128, 127) * 0.02
    found = exported(tensors, algorithm)
    torch.testing.assert_close(product(found, tensors, inputs()), rounded @ weight.t(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "NVFP4_AWQ"])
def test_awq_multiplies_its_input_by_factors(algorithm: str) -> None:
    tensors, weight = write(algorithm)
    factors = torch.rand(COLUMNS, generator=rng(3)).bfloat16() + 0.5
    tensors |= named(pre_quant_scale=factors)
    found = exported(tensors, algorithm)
    expected = (inputs() * factors.float()) @ weight.t()
    torch.testing.assert_close(product(found, tensors, inputs()), expected, rtol=1e-4, atol=1e-3)
    packing, parts = load(found, tensors, MODULE, (ROWS, COLUMNS))
    torch.testing.assert_close(inputs() @ packing.scheme.decode(parts).t(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scale_shape", [(2, 3), (2, 1, 3, 1)])
def test_float8_in_blocks_has_a_scale_for_128_rows_and_columns(scale_shape: tuple[int, ...]) -> None:
    codes = (torch.randn(200, 300, generator=rng()) * 60).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape, generator=rng(1)) + 0.25
    tensors = named(weight=codes, weight_scale=scales)
    for algorithm in ("FP8_PB_WO", "fp8_pb_wo"):
        packing, parts = load(exported(tensors, algorithm), tensors, MODULE, (200, 300))
        by_column = scales.reshape(2, 3).repeat_interleave(128, 1)[:, :300]
        expected = codes.float() * by_column.repeat_interleave(128, 0)[:200]
        assert torch.equal(packing.scheme.decode(parts), expected)


@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_float8_of_a_single_block_may_have_a_plain_number(scale_shape: tuple[int, ...]) -> None:
    tensors, weight = write_float8(scale_shape)
    packing, parts = load(exported(tensors, "fp8_pb_wo"), tensors, MODULE, (ROWS, COLUMNS))
    assert torch.equal(packing.scheme.decode(parts), weight)


def test_the_calibrated_range_of_an_input_that_stays_as_it_is_counts_as_known() -> None:
    tensors, weight = write("NVFP4")
    tensors |= named(input_scale=torch.tensor(0.001))
    found = exported(tensors, "NVFP4", group_size=16)
    packing = found.format_of(MODULE)
    assert packing is not None and packing.leaves((ROWS, COLUMNS))[".input_scale"].is_optional
    torch.testing.assert_close(product(found, tensors, inputs()), inputs() @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("old", [False, True])
def test_layers_may_have_algorithms_of_their_own(old: bool) -> None:
    attention, experts = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"
    int8, weight8 = write_int8()
    fp4, weight4 = write_nvfp4(16)
    tensors = {name.replace(MODULE, attention): tensor for name, tensor in int8.items()}
    tensors |= {name.replace(MODULE, experts): tensor for name, tensor in fp4.items()}
    tensors |= {"model.layers.0.mlp.gate.weight": torch.zeros(4, 8, dtype=torch.uint8)}
    layers = {
        attention: {"quant_algo": "W8A16"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    found = exported(tensors, "MIXED_PRECISION", old, quantized_layers=layers)
    for module, expected in ((attention, weight8), (experts, weight4)):
        packing, parts = load(found, tensors, module, (ROWS, COLUMNS))
        assert torch.equal(packing.scheme.decode(parts), expected)
    assert found.format_of("model.layers.0.mlp.gate") is None


@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_modules_that_are_listed_or_plain_are_not_packed(key: str) -> None:
    codes = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    names = ("model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "vision.fc1")
    tensors = {f"{name}.weight": codes for name in names} | {"lm_head.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    found = exported(tensors, "FP8", **{key: ["*.gate", "model.layers.1.*", "vision*"]})
    modules = [name.removesuffix(".weight") for name in tensors]
    assert [name for name in modules if found.format_of(name)] == ["model.layers.11.mlp.up_proj"]


def test_a_weight_with_a_tensor_missing_keeps_its_format() -> None:
    tensors = {f"{MODULE}.weight": torch.zeros(ROWS, COLUMNS).to(torch.float8_e4m3fn)}
    packing = exported(tensors, "FP8").format_of(MODULE)
    assert packing is not None
    leaves = packing.leaves((ROWS, COLUMNS))
    assert {name: (leaf.shape, leaf.is_optional) for name, leaf in leaves.items()} == {
        ".weight": ((ROWS, COLUMNS), False),
        ".weight_scale": ((), False),
        ".input_scale": ((), False),
    }
    for algorithm, scale in (("NVFP4", (ROWS, COLUMNS // 16)), ("W4A16_AWQ", (ROWS, 1)), ("W8A16", (ROWS,))):
        packing = exported({}, algorithm, group_size=64 if algorithm == "W4A16_AWQ" else None).format_of(MODULE)
        assert packing is not None
        assert packing.leaves((ROWS, COLUMNS))[".weight_scale"].shape == scale


def test_the_size_of_groups_is_the_configs_where_it_has_one() -> None:
    tensors, _ = write_int4(32)
    for size, expected in ((16, (ROWS, 4)), (None, (ROWS, 2)), (0, (ROWS, 2))):
        packing = exported(tensors, "W4A16_AWQ", group_size=size).format_of(MODULE)
        assert packing is not None
        assert packing.leaves((ROWS, COLUMNS))[".weight_scale"].shape == expected


@pytest.mark.parametrize(
    ("shape", "group_size", "rest"),
    [((7, 64), 32, "7 x 64"), ((8, 63), 21, "8 x 63"), ((8, 64), 48, "groups of 48")],
)
def test_integers_of_four_bits_need_pairs_and_whole_groups(shape: tuple[int, int], group_size: int, rest: str) -> None:
    packing = exported({}, "W4A16_AWQ", group_size=group_size).format_of(MODULE)
    assert packing is not None
    with pytest.raises(ValueError, match=f"ModelOpt's four-bit integers need even numbers .*{rest}"):
        packing.leaves(shape)


def test_unpacking_integers_needs_little_memory_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_ints, "_CHUNK_NUMBERS", 1 << 10)
    shape = (1024, 256)
    tensors = named(
        weight=torch.randint(0, 256, (512, 256), dtype=torch.uint8, generator=rng()), weight_scale=torch.ones(1024, 2)
    )
    packing = exported(tensors, "W4A16_AWQ").format_of(MODULE)
    assert packing is not None
    leaves = {name.removeprefix(MODULE): tensor for name, tensor in tensors.items()}
    assert largest_temporary(lambda: packing.unpack(leaves, shape), leaves) <= 1 << 11


@pytest.mark.parametrize(
    ("kv_cache", "dtype"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "INT8"}, "int8"),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "fp8"),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "int"}}, "int8"),
        ({"kv_cache_scheme": "INT8"}, "int8"),
        ({"kv_cache_quant_algo": None}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_the_kv_cache_is_what_the_export_was_made_for(kv_cache: dict[str, Any], dtype: str | None, old: bool) -> None:
    assert exported({}, "FP8", old, **kv_cache).kv_cache_dtype == dtype


@pytest.mark.parametrize("old", [False, True])
def test_an_export_may_have_a_quantized_kv_cache_alone(old: bool) -> None:
    found = exported({f"{MODULE}.weight": torch.zeros(8, 8)}, None, old, kv_cache_quant_algo="FP8")
    assert (found.format_of(MODULE), found.format_of("lm_head"), found.kv_cache_dtype) == (None, None, "fp8")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"quant_algo": "NVFP4_SVD"}, "quant_algo is 'NVFP4_SVD'; expected one of FP8, FP8_PB_WO, "),
        ({"quant_algo": 8}, "quant_algo is 8; expected one of FP8, "),
        ({}, "quant_algo is missing; expected one of FP8, "),
        ({"quant_algo": "NVFP4", "group_size": -1}, "group_size is -1; expected an integer of at least 0"),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; expected a list of names"),
        ({"quant_algo": "FP8", "ignore": [1]}, "ignore is [1]; expected a list of names"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing; expected an object with modules"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]}, "quantized_layers is ['a']; expected an object"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "FP2"}}},
            "quantized_layers: a.b: quant_algo is 'FP2'; expected one of FP8, ",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}},
            "quantized_layers: a.b is {}; expected an object with a quant_algo",
        ),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'; expected FP8 or INT8"),
        (
            {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4, "type": ["float"]}},
            "kv_cache_scheme is {'num_bits': 4, 'type': ['float']}; expected FP8 or INT8",
        ),
        ({"quant_algo": "FP8", "kv_cache_scheme": 8}, "kv_cache_scheme is 8; expected FP8 or INT8"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_values_that_are_not_known_are_refused_in_one_line(body: dict[str, Any], message: str, old: bool) -> None:
    config = {"quant_method": "modelopt", **({"quantization": {"quant_algo": None, **body}} if old else body)}
    with pytest.raises(ModelLoadError) as refused:
        read(HfConfig(config, WHERE), StoredTensors({}, WHERE))
    where = f"{WHERE}: quantization" if old else WHERE
    assert str(refused.value).startswith(f"{where}: {message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_an_input_scale_that_makes_no_sense_is_refused(scale: float) -> None:
    tensors, _ = write("FP8")
    tensors |= named(input_scale=torch.tensor(scale))
    with pytest.raises(ValueError, match=r"\.input_scale is .*, and must be above 0"):
        load(exported(tensors, "FP8"), tensors, MODULE, (ROWS, COLUMNS))
