"""Packed weights through the loader: what is filled, what is left alone, what is refused before anything is read."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine.errors import ModelLoadError
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.weight_memory import weight_bytes
from tests.support.engine_driver import EngineDriver
from tests.support.parity import check_folder
from tests.support.tiny_llama import build_tiny_llama

Tensors = dict[str, torch.Tensor]
PROJECTIONS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
Q0, UP1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of 16 x 16 in E4M3: codes, scales, and the weight that they stand for."""
    rows, columns = weight.shape
    blocks = weight.view(rows // 16, 16, columns // 16, 16)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    decoded = (codes.float() * scales[:, None, :, None]).view(rows, columns)
    return codes.view(rows, columns), scales, decoded


def export(folder: Path, leave: Callable[[str], bool] = lambda name: False, **overrides: Any) -> Any:
    """A tiny Llama in FP8 by blocks; ``leave`` says which projections stay plain. Returns the decoded reference."""
    model = build_tiny_llama(folder, **overrides)
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name in [name for name in tensors if PROJECTIONS.fullmatch(name) and not leave(name)]:
        codes, scales, decoded = pack(tensors.pop(name))
        tensors[name], tensors[name + "_scale_inv"] = codes, scales
        state[name].copy_(decoded)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=FP8)
    return model


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    "leave",
    [
        lambda name: False,
        lambda name: "k_proj" in name,  # one part of a fused layer
        lambda name: "gate_proj" in name,
        lambda name: ".0." in name,  # a whole layer
    ],
    ids=["all", "keys", "gates", "first layer"],
)
def test_what_an_export_left_plain_stays_plain(leave: Callable[[str], bool], tmp_path: Path) -> None:
    check_folder(tmp_path, export(tmp_path, leave))


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_take_the_memory_of_their_codes(tied: bool, tmp_path: Path) -> None:
    export(tmp_path / "packed", tie_word_embeddings=tied, num_hidden_layers=4)
    build_tiny_llama(tmp_path / "plain", tie_word_embeddings=tied, num_hidden_layers=4)
    packed, plain = (load_model(tmp_path / name, "float32", "cpu").model for name in ("packed", "plain"))
    projections = sum(p.numel() for n, p in build_tiny_llama(tmp_path / "x", num_hidden_layers=4).named_parameters()
                      if PROJECTIONS.fullmatch(n))  # fmt: skip
    # Three bytes less for each weight, and a float32 scale for every 16 of a row.
    assert weight_bytes(plain) - weight_bytes(packed) == projections * 3 - projections // 16 * 4


def change(edit: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(lambda t: t.pop(Q0 + ".weight_scale_inv")), rf"does not hold tensor {Q0}\.weight_scale_inv, which"),
        (change(lambda t: t.pop(Q0 + ".weight")), rf"does not hold tensor {Q0}\.weight, which parameter layers\.0\."),
        (
            change(lambda t: t.update({Q0 + ".weight_scale_inv": t[Q0 + ".weight_scale_inv"][:2]})),
            rf"model\.safetensors: tensor {Q0}\.weight_scale_inv has shape \[2, 4\]; .* asks for \[4, 4\]",
        ),
        (
            change(lambda t: t.update({UP1 + ".weight": t[UP1 + ".weight"][:, :32]})),
            rf"model\.safetensors: tensor {UP1}\.weight has shape \[112, 32\]; .* asks for \[112, 64\]",
        ),
        (
            change(lambda t: t.update({UP1 + ".weight": t[UP1 + ".weight"].view(torch.int8)})),
            rf"model\.safetensors: tensor {UP1}\.weight has dtype I8; expected one of F8_E4M3",
        ),
        (
            change(lambda t: t.update({UP1 + ".qzeros": torch.zeros(3)})),
            rf"model\.safetensors: tensor {UP1}\.qzeros, shape \[3\], has no place in the model",
        ),
        (
            lambda folder: change_config(folder, quantization_config={**FP8, "modules_to_not_convert": [Q0]}),
            rf"model\.safetensors: tensor {Q0}\.weight has dtype F8_E4M3; expected one of F64",
        ),
        (
            lambda folder: change_config(folder, quantization_config=None),
            r"tensor model\.layers\.\d\.\S+ has dtype F8_E4M3; expected one of F64",
        ),
        (
            lambda folder: change_config(folder, quantization_config={"quant_method": "quip"}),
            r"quantization_config: quant_method is 'quip'; expected one of awq, bitsandbytes, compressed-tensors, ",
        ),
        (lambda folder: change_config(folder, quantization_config="fp8"), "quantization_config is 'fp8'; expected an"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_in_one_line(edit: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    export(tmp_path)
    edit(tmp_path)
    with pytest.raises(ModelLoadError, match=message) as error:
        EngineDriver(tmp_path)
    assert "\n" not in str(error.value)


def test_biases_of_zeros_beside_packed_weights_are_let_be(tmp_path: Path) -> None:
    model = export(tmp_path)
    change(lambda t: t.update({Q0 + ".bias": torch.zeros(64)}))(tmp_path)
    check_folder(tmp_path, model)
    change(lambda t: t.update({Q0 + ".bias": torch.ones(64)}))(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"tensor {Q0}\.bias, shape \[64\], has no place in the model"):
        EngineDriver(tmp_path)


def test_a_scale_that_is_nan_is_refused(tmp_path: Path) -> None:
    export(tmp_path)
    change(lambda t: t[Q0 + ".weight_scale_inv"].fill_(torch.nan))(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: weight {Q0}\.weight: .*not finite"):
        load_model(tmp_path, "float32", "cpu")


def test_the_transformers_backend_runs_a_packed_folder_decoded(tmp_path: Path) -> None:
    model = export(tmp_path)
    check_folder(tmp_path, model, model_backend="transformers")


def test_a_folder_of_pytorch_files_runs_with_either_backend(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    check_folder(tmp_path, model)
    check_folder(tmp_path, model, model_backend="transformers")


def test_scales_of_the_kv_cache_are_read_and_not_taken_for_weights(tmp_path: Path) -> None:
    export(tmp_path)
    scales = {"model.layers.1.self_attn.k_scale": 0.5, "model.layers.1.self_attn.v_proj.output_scale": 0.25}
    change(lambda t: t.update({name: torch.tensor(value) for name, value in scales.items()}))(tmp_path)
    loaded = load_model(tmp_path, "float32", "cpu")
    assert loaded.kv_scales == {1: (0.5, 0.25)}
    change(lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}))(tmp_path)
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\.self_attn\.k_scale is 0\.0; expected a number"):
        load_model(tmp_path, "float32", "cpu")


def test_the_inspector_says_how_each_kind_of_layer_is_kept(tmp_path: Path) -> None:
    export(tmp_path, lambda name: "k_proj" in name)
    command = [sys.executable, "scripts/inspect_checkpoint.py", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert lines["quantization"].strip() == "fp8" and lines["architecture"].strip() == "LlamaForCausalLM"
    assert "2 x Float8(dtype float8_e4m3fn, group_size 16)" in lines["model.layers.N.self_attn.q_proj.weight"]
    assert "2 x F32" in lines["model.layers.N.self_attn.k_proj.weight"]
    change(lambda t: t.pop(Q0 + ".weight_scale_inv"))(tmp_path)
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and failed.stderr.startswith("we would not run it: ")
    assert "weight_scale_inv" in failed.stderr and failed.stderr.count("\n") == 1
