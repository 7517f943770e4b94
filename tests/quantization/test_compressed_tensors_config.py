"""Which modules of a compressed-tensors checkpoint are packed, and how."""

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from backend_engine.quantization.schemes.rounding import round_tokens
from tests.support.compressed_layers import compress, config, int4_tensors, read_config, reference_weight, unpack
from tests.support.tiny_llama import TINY

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
OUT, IN = 16, 64


def test_a_llama_whose_parts_differ() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    groups = {
        "values": {"targets": ["re:.*v_proj$"], "weights": {**INT4, "symmetric": False}},
        "keys": {"targets": ["re:.*k_proj$"], "weights": FP8, "input_activations": STATIC},
        "others": {"targets": ["Linear"], "weights": INT8, "input_activations": TOKEN},
        "one": {"targets": ["model.layers.1.mlp.down_proj"], "weights": {**INT8, "num_bits": 6}},
        "table": {"targets": ["Embedding"], "weights": {**INT4, "num_bits": 8}},
    }
    ignore = ["lm_head", "re:.*layers.0.mlp.gate.*"]
    found = compress(model, groups, ignore)
    assert found.config["format"] == "mixed-precision"
    quantization = read_config(found.config, found.tensors)
    kinds = set()
    used: set[str] = set()
    for name, module in model.named_modules():
        packing = quantization.format_of(name)
        is_quantized = hasattr(module, "quantization_scheme")
        assert (packing is not None) == is_quantized, name
        if packing is None:
            used.update(n for n in found.tensors if n in (f"{name}.weight", f"{name}.bias"))
            continue
        weight: Any = module
        shape = tuple(weight.weight_shape.tolist()) if hasattr(weight, "weight_shape") else tuple(weight.weight.shape)
        components = unpack(packing, name, found.tensors, shape)
        assert torch.equal(packing.scheme.decode(components), reference_weight(weight)), name
        kinds.add(packing.scheme)
        used.update(name + ending for ending in packing.leaves(shape))
    assert quantization.format_of("lm_head") is None
    assert quantization.format_of("model.layers.0.mlp.gate_proj") is None
    assert quantization.format_of("model.layers.1.mlp.gate_proj") is not None
    assert len(kinds) == 5
    assert set(found.tensors) <= used


def test_a_name_counts_more_than_an_expression_and_that_more_than_a_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": {**INT4, "num_bits": 2}},
        "b": {"targets": ["re:.*proj"], "weights": {**INT4, "num_bits": 3}},
        "c": {"targets": ["model.proj"], "weights": INT4},
    }
    names = ["model.proj", "other.proj", "dense", "embed_tokens"]
    stored = {name: tensor for module in names for name, tensor in int4_tensors(module).items()}
    quantization = read_config({**config(), "config_groups": groups}, stored)
    bits = [getattr(quantization.format_of(name), "bits", None) for name in names]
    assert bits == [4, 3, 2, None]


def test_the_later_of_two_groups_for_the_same_modules_counts() -> None:
    groups = {f"g{bits}": {"targets": ["Linear"], "weights": {**INT4, "num_bits": bits}} for bits in (2, 4)}
    packing = read_config({**config(), "config_groups": groups}, int4_tensors()).format_of("proj")
    assert getattr(packing, "bits", None) == 4


def test_what_is_stored_tells_what_is_packed() -> None:
    stored = {
        **int4_tensors(),
        "proj.bias": torch.zeros(OUT),
        "gate.weight": torch.zeros(8, IN),
        "norm.weight": torch.ones(IN),
    }
    quantization = read_config(config(), stored)
    assert quantization.format_of("proj") is not None
    for module in ("proj.bias", "gate", "norm", "absent"):
        assert quantization.format_of(module) is None
    del stored["proj.weight_packed"]
    partly = read_config(config(), stored).format_of("proj")
    assert partly is not None and ".weight_packed" in partly.leaves((OUT, IN))


def test_ignored_modules_are_plain_by_name_expression_and_class() -> None:
    for ignore in (["proj"], ["re:pro"], ["Linear"]):
        assert read_config(config(ignore=ignore), int4_tensors()).format_of("proj") is None
    assert read_config(config(ignore=["re:ro", "roj", "Embedding"]), int4_tensors()).format_of("proj") is not None


def test_columns_of_a_group_that_are_not_neighbours() -> None:
    """As version 0.9.0 wrote GPTQ's act-order: every column where it was, and its group in ``weight_g_idx``."""
    groups = torch.arange(IN).div(16, rounding_mode="floor")[torch.randperm(IN, generator=torch.manual_seed(1))]
    by_group = groups.argsort()
    for bits, is_symmetric in ((4, True), (8, True), (4, False), (3, False)):
        layer = nn.ModuleDict({"proj": nn.Linear(IN, OUT, bias=False)})
        weights = {**INT4, "num_bits": bits, "symmetric": is_symmetric}
        found = compress(layer, {"group_0": {"targets": ["Linear"], "weights": weights}})
        proj: Any = layer["proj"]
        sorted_weight = reference_weight(proj)
        codes = unpack_from_int32(found.tensors["proj.weight_packed"], bits, torch.Size((OUT, IN)))
        stored = {
            **found.tensors,
            "proj.weight_packed": pack_to_int32(codes[:, by_group.argsort()].contiguous(), bits),
            "proj.weight_g_idx": groups.to(torch.int32),
        }
        declared = copy.deepcopy(found.config)
        declared["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        packing = read_config(declared, stored).format_of("proj")
        assert packing is not None
        components = unpack(packing, "proj", stored, (OUT, IN))
        expected = sorted_weight[:, by_group.argsort()]
        assert torch.equal(packing.scheme.decode(components), expected)
        x = torch.randn(3, IN)
        torch.testing.assert_close(packing.scheme.multiply(packing.scheme.prepare(components), x), x @ expected.T)


def test_groups_of_columns_that_are_not_as_described_are_refused() -> None:
    stored = {**int4_tensors(), "proj.weight_g_idx": torch.zeros(IN, dtype=torch.int32)}
    packing = read_config(config({"weights": {**INT4, "actorder": "group"}}), stored).format_of("proj")
    assert packing is not None
    with pytest.raises(ValueError, match="weight_g_idx does not put 16 columns into each group"):
        unpack(packing, "proj", stored, (OUT, IN))


def test_an_order_of_columns_that_was_never_set_is_none() -> None:
    stored = {**int4_tensors(), "proj.weight_g_idx": torch.full((IN,), -1, dtype=torch.int32)}
    plain = read_config(config(), int4_tensors()).format_of("proj")
    packing = read_config(config({"weights": {**INT4, "actorder": "weight"}}), stored).format_of("proj")
    assert plain is not None and packing is not None
    decoded = packing.scheme.decode(unpack(packing, "proj", stored, (OUT, IN)))
    bare = {name: tensor for name, tensor in stored.items() if "g_idx" not in name}
    assert torch.equal(decoded, plain.scheme.decode(unpack(plain, "proj", bare, (OUT, IN))))


def test_zero_points_that_are_not_packed_as_in_version_0_9_0() -> None:
    layer = nn.ModuleDict({"proj": nn.Linear(IN, OUT, bias=False)})
    found = compress(layer, {"group_0": {"targets": ["Linear"], "weights": {**INT4, "symmetric": False}}})
    packed = found.tensors["proj.weight_zero_point"]
    zeros = unpack_from_int32(packed, 4, torch.Size((OUT, IN // 16)), packed_dim=0)
    stored = {**found.tensors, "proj.weight_zero_point": zeros.contiguous()}
    packing = read_config(found.config, stored).format_of("proj")
    assert packing is not None
    decoded = packing.scheme.decode(unpack(packing, "proj", stored, (OUT, IN)))
    assert torch.equal(decoded, reference_weight(layer["proj"]))


def test_zero_points_of_what_is_symmetric_must_be_zero() -> None:
    stored = {**int4_tensors(), "proj.weight_zero_point": torch.zeros(OUT, IN // 16, dtype=torch.int8)}
    packing = read_config(config(), stored).format_of("proj")
    assert packing is not None
    unpack(packing, "proj", stored, (OUT, IN))
    stored["proj.weight_zero_point"][3, 1] = 1
    with pytest.raises(ValueError, match="weight_zero_point is not 0, but"):
        unpack(packing, "proj", stored, (OUT, IN))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_in_any_shape(shape: tuple[int, ...]) -> None:
    stored = {
        "proj.weight": torch.randn(OUT, IN).to(torch.float8_e4m3fn),
        "proj.weight_scale": torch.full(shape, 0.5),
        "proj.input_scale": torch.full(shape, 0.25),
    }
    declared = config({"weights": FP8, "input_activations": STATIC}, format="float-quantized")
    packing = read_config(declared, stored).format_of("proj")
    assert packing is not None
    components = unpack(packing, "proj", stored, (OUT, IN))
    assert components["input_scale"].tolist() == [0.25]
    assert torch.equal(packing.scheme.decode(components), stored["proj.weight"].float() * 0.5)


def test_values_that_make_no_sense_are_refused() -> None:
    def refused(declared: dict[str, Any], stored: dict[str, Tensor], message: str) -> None:
        packing = read_config(declared, stored).format_of("proj")
        assert packing is not None
        with pytest.raises(ValueError, match=message):
            unpack(packing, "proj", stored, (OUT, IN))

    refused(
        config(), {**int4_tensors(), "proj.weight_shape": torch.tensor([OUT, IN + 1])}, r"weight_shape is \[16, 65\]"
    )
    static = config({"weights": FP8, "input_activations": STATIC}, format="float-quantized")
    floats = {"proj.weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn), "proj.weight_scale": torch.ones(1)}
    refused(static, {**floats, "proj.input_scale": torch.zeros(1)}, "input_scale is 0.0; expected a number above 0")
    few = config({"weights": {**INT8, "num_bits": 4}}, format="int-quantized")
    wide = {"proj.weight": torch.full((OUT, IN), 9, dtype=torch.int8), "proj.weight_scale": torch.ones(OUT, 1)}
    refused(few, wide, "do not fit into 4 bits")


def test_shapes_that_a_form_cannot_have_are_refused() -> None:
    packing = read_config(config(), int4_tensors()).format_of("proj")
    assert packing is not None
    with pytest.raises(ValueError, match="groups of 16 columns do not divide its 40"):
        packing.leaves((OUT, 40))
    odd = read_config(config({"weights": {**INT8, "num_bits": 4}}), int4_tensors()).format_of("proj")
    assert odd is not None
    with pytest.raises(ValueError, match="4 bits need an even number of columns, not 33"):
        odd.leaves((OUT, 33))


def test_the_last_group_of_an_input_may_be_shorter() -> None:
    """llm-compressor writes FP8 by blocks of 128 for inputs of 576 columns."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)
    parts = [round_tokens(part, "fp8", None) for part in x.split(16, 1)]
    assert [part.shape[1] for part in parts] == [16, 16, 8]
    assert torch.equal(round_tokens(x, "fp8", None, group_size=16), torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        (None, None),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}, "fp8"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}, "int8"),
    ],
)
def test_the_kv_cache(scheme: dict[str, Any] | None, dtype: str | None) -> None:
    assert read_config(config(kv_cache_scheme=scheme), int4_tensors()).kv_cache_dtype == dtype
    alone = read_config({"config_groups": {}, "format": "dense", "kv_cache_scheme": scheme}, {})
    assert alone.kv_cache_dtype == dtype
    assert alone.format_of("proj") is None


def test_what_changes_nothing_is_accepted() -> None:
    values: dict[str, Any] = {
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
        "transform_config": {"config_groups": {}},
        "global_compression_ratio": 1.5,
        "version": "0.20.1",
        "quantization_status": "frozen",
    }
    weights = {**INT4, "observer": "minmax", "observer_kwargs": {"a": 1}, "actorder": "static", "dynamic": False}
    group = {"weights": weights, "input_activations": None, "output_activations": None, "format": "pack-quantized"}
    assert read_config(config(group, format="mixed-precision", **values), int4_tensors()).format_of("proj") is not None
    assert read_config(config(sparsity_config={}, transform_config={}), int4_tensors()).format_of("proj") is not None
