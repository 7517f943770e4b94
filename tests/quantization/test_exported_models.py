"""Whole models in FP8 and as ModelOpt exports them: the engine answers as transformers does with decoded weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from backend_engine.errors import ModelLoadError
from tests.support.engine_driver import EngineDriver
from tests.support.parity import check, prompt
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import build_tiny_model, reference_logits

# Leaves of a weight by the ending of their names, and the weight that they stand for.
Packed = tuple[dict[str, Tensor], Tensor]
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def float8(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def pack_float8_blocks(weight: Tensor, block: tuple[int, int] = (24, 40)) -> Packed:
    rows, columns = (torch.arange(size) // height for size, height in zip(weight.shape, block, strict=True))
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
    full = scales[rows][:, columns]
    codes = float8(weight / full)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * full


def pack_float8(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    codes = float8(weight / scale)
    leaves = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.02)}
    return leaves, codes.float() * scale


def pack_float8_rows(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1) / 448
    codes = float8(weight / scales[:, None])
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales[:, None]


def pack_nvfp4(weight: Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, 16))
    scale = weight.abs().max() / (6 * 448)
    scales = float8(groups.abs().amax(-1) / 6 / scale)
    full = (scales.float() * scale).unsqueeze(-1)
    codes = ((groups / full).abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    values = torch.where(groups < 0, -FP4[codes], FP4[codes])
    signed = (codes + 8 * (groups < 0)).flatten(1)
    leaves = {
        ".weight": (signed[:, ::2] + 16 * signed[:, 1::2]).to(torch.uint8),
        ".weight_scale": scales,
        ".weight_scale_2": scale,
        ".input_scale": torch.tensor(0.01),
    }
    return leaves, (values * full).flatten(1)


def pack_awq(weight: Tensor) -> Packed:
    factors = (torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    groups = (weight / factors.float()).unflatten(1, (-1, 16))
    scales = groups.abs().amax(-1) / 7
    codes = (groups / scales.unsqueeze(-1)).round().clamp(-8, 7)
    signed = codes.flatten(1).to(torch.int64) % 16
    leaves = {
        ".weight": (signed[::2] + 16 * signed[1::2]).to(torch.uint8),
        ".weight_scale": scales,
        ".pre_quant_scale": factors,
    }
    return leaves, (codes * scales.unsqueeze(-1)).flatten(1) * factors.float()


def pack_int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round()
    leaves = {".weight": codes.to(torch.int8), ".weight_scale": scales, ".input_scale": torch.tensor(0.03)}
    return leaves, codes * scales[:, None]


def round_float8(x: Tensor) -> Tensor:
    return float8(x / 0.02).float() * 0.02


def round_float8_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return float8(x / scale).float() * scale


def round_int8(x: Tensor) -> Tensor:
    return (x / 0.03).round().clamp(-128, 127) * 0.03


def export(
    folder: Path,
    model: nn.Module,
    pack: Callable[[Tensor], Packed],
    config: dict[str, Any],
    rounding: Callable[[Tensor], Tensor] | None = None,
    prefix: str = "model.layers.",
) -> dict[str, Tensor]:
    """Write the folder's linear layers in packed form, and let the reference compute with what they stand for."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    modules = dict(model.named_modules())
    for name in [name for name in tensors if name.startswith(prefix) and tensors[name].ndim == 2]:
        module = name.removesuffix(".weight")
        if not isinstance(modules.get(module), nn.Linear):
            continue
        leaves, weight = pack(tensors.pop(name).float())
        tensors |= {module + ending: leaf.contiguous() for ending, leaf in leaves.items()}
        modules[module].weight.data.copy_(weight)
        if rounding is not None:
            modules[module].register_forward_pre_hook(lambda module, args: (rounding(args[0]),))
    save_file(tensors, path, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    return tensors


def answer_as_the_reference(folder: Path, model: Any, is_rounded: bool = False) -> None:
    """Where inputs are rounded, a number that lies between two steps may now and then come to the other one."""
    driver = EngineDriver(folder)
    ids = prompt(21)
    output = driver.generate(driver.add(0, ids), 6, chunk=16)
    if not is_rounded:
        check(driver, model, 0, ids, output)
        return
    expected = reference_logits(model, ids, output)
    difference = (torch.stack(driver.logits[0]) - expected).abs() / expected.std()
    assert float(difference.median()) < 1e-4 and float(difference.max()) < 0.05, difference


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.embed_tokens"]}


@pytest.mark.parametrize(
    ("pack", "config", "rounding"),
    [
        pytest.param(pack_float8_blocks, FP8_BLOCKS, None, id="fp8 blocks"),
        pytest.param(pack_float8, FP8_STATIC, round_float8, id="fp8 static"),
        pytest.param(pack_float8_rows, {"quant_method": "fbgemm_fp8"}, round_float8_tokens, id="fbgemm_fp8"),
        pytest.param(pack_float8, modelopt("FP8"), round_float8, id="modelopt FP8"),
        pytest.param(pack_nvfp4, modelopt("NVFP4"), None, id="modelopt NVFP4"),
        pytest.param(pack_awq, modelopt("W4A16_AWQ"), None, id="modelopt W4A16_AWQ"),
        pytest.param(pack_int8, modelopt("W8A8_SQ_PER_CHANNEL"), round_int8, id="modelopt W8A8"),
    ],
)
def test_a_packed_llama_answers_as_its_decoded_weights_do(
    tmp_path: Path,
    pack: Callable[[Tensor], Packed],
    config: dict[str, Any],
    rounding: Callable[[Tensor], Tensor] | None,
) -> None:
    model = build_tiny_llama(tmp_path)
    tensors = export(tmp_path, model, pack, config, rounding)
    assert tensors["model.layers.0.mlp.down_proj.weight"].element_size() == 1
    answer_as_the_reference(tmp_path, model, is_rounded=rounding is not None)


def test_an_export_with_its_config_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    export(tmp_path, model, pack_nvfp4, {})
    body = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": body}))
    described = json.loads((tmp_path / "config.json").read_text())
    del described["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    answer_as_the_reference(tmp_path, model)


def test_attention_may_have_another_algorithm_than_the_rest(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.1.mlp."
    export(tmp_path, model, pack_nvfp4, {}, prefix=mlp)
    layers = {
        **{f"{attention}{name}_proj": {"quant_algo": "FP8"} for name in "qkvo"},
        **{f"{mlp}{name}_proj": {"quant_algo": "NVFP4", "group_size": 16} for name in ("gate", "up", "down")},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    export(tmp_path, model, pack_float8, config, round_float8, prefix=attention)
    answer_as_the_reference(tmp_path, model, is_rounded=True)


def test_latent_attention_and_numbered_experts_may_be_in_blocks_of_float8(tmp_path: Path) -> None:
    model = build_tiny_model("deepseek_v3", tmp_path)
    config = {**FP8_BLOCKS, "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stacks = dict(model.named_parameters())
    for name in [name for name in tensors if ".experts." in name]:
        module = name.removesuffix(".weight")
        layer, _, expert, kind = module.rsplit(".", 3)
        leaves, weight = pack_float8_blocks(tensors.pop(name).float())
        tensors |= {module + ending: leaf for ending, leaf in leaves.items()}
        if kind == "down_proj":
            stacks[f"{layer}.experts.down_proj"].data[int(expert)].copy_(weight)
        else:
            half = slice(0, len(weight)) if kind == "gate_proj" else slice(len(weight), None)
            stacks[f"{layer}.experts.gate_up_proj"].data[int(expert), half].copy_(weight)
    save_file(tensors, path, {"format": "pt"})
    stored = export(tmp_path, model, pack_float8_blocks, config)
    assert stored["model.layers.1.self_attn.kv_b_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.mlp.experts.7.up_proj.weight"].dtype == torch.float8_e4m3fn
    answer_as_the_reference(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({".weight_scale_inv": None}, "does not hold tensor model.layers.1.mlp.up_proj.weight_scale_inv"),
        ({".weight_scale_inv": torch.ones(3, 3)}, "up_proj.weight_scale_inv has shape [3, 3]; config.json asks for"),
        ({".weight_scale_inv": torch.full((5, 2), float("nan"))}, "weight_scale_inv has numbers that are not finite"),
        ({".weight": torch.ones(112, 64, dtype=torch.int8)}, "up_proj.weight has dtype I8; expected one of F8_E4M3"),
    ],
)
def test_a_weight_that_is_not_whole_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    tensors = export(tmp_path, build_tiny_llama(tmp_path), pack_float8_blocks, FP8_BLOCKS)
    for ending, tensor in change.items():
        name = "model.layers.1.mlp.up_proj" + ending
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError) as refused:
        EngineDriver(tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
