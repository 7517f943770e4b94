"""A quantized model as a Hugging Face folder: what comes out of our loader, and of transformers, is what went in."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from backend_engine.builder.new_folder import new_folder
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.errors import ConfigError
from backend_engine.layers.linear import Linear
from backend_engine.layers.routing import Router
from backend_engine.model_engine.memory_plan import outline
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.native_backend import family_of
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.model_source import ModelSource
from backend_engine.models.weight_rules import LoadTarget
from backend_engine.plugins.catalog import ARCHITECTURES
from backend_engine.post_training.export import (
    FP8_KV_SCHEME,
    QuantizedModel,
    QuantizedWeight,
    export_bytes,
    stacked_together,
    write_quantized,
)
from backend_engine.post_training.source_weights import SourceWeights
from backend_engine.quantization.grids.float8_grid import Float8Grid
from backend_engine.quantization.grids.int_grid import IntGrid
from backend_engine.quantization.grids.nvfp4_grid import Nvfp4Grid
from backend_engine.quantization.grids.weight_grid import WeightGrid, per_group
from tests.support.engine_driver import EngineDriver
from tests.support.parity import prompt
from tests.support.tiny_gguf import build_tiny, packed_as, write_gguf
from tests.support.tiny_models import TINY_MODELS, build_tiny_model, reference_logits

TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GRIDS: dict[str, tuple[WeightGrid, dict[str, Any] | None]] = {
    "int8_rows": (IntGrid(8, None, True), None),
    "int8_inputs": (IntGrid(8, None, True, is_packed=False), TOKEN),
    "int4_groups": (IntGrid(4, 16, True), None),
    "int4_zeros": (IntGrid(4, 8, False), None),
    "float8": (Float8Grid(), {**TOKEN, "type": "float"}),
    "nvfp4": (Nvfp4Grid(), None),
}
NATIVE = [name for name, row in TINY_MODELS.items() if row.architecture in ARCHITECTURES]
# Of each way in which a family's rules take rows out of the checkpoint's tensors one, for the other grids.
SHAPES = ("gpt2", "gpt_neox", "granite_hybrid", "phi3", "mixtral")


def parameters(folder: Path) -> dict[str, Tensor]:
    """Every parameter of a folder, decoded, as the loader fills it; before the layers prepare anything."""
    checkpoint = open_checkpoint(folder)
    source = SourceWeights.of(checkpoint)
    found: dict[str, Tensor] = {}
    for name, target in source.targets.items():
        found[name] = torch.full(target.shape, torch.nan)
    for name, copies in source.plan.copies.items():
        packing = source.stored.format_of(name)
        tensors = source.stored.read(copies[0])
        if packing is not None:
            decoded = packing.scheme.decode(source.stored.unpack(copies[0], tensors))
        for copy in copies:
            rows = copy.pick(next(iter(tensors.values()))) if packing is None else copy.pick_packed(decoded)
            found[copy.parameter][copy.start : copy.start + copy.rows] = rows.float()
    return found


def products(checkpoint: Checkpoint) -> dict[str, LoadTarget]:
    """The weights of linear layers, but for routers and the head."""
    name = checkpoint.config["architectures"][0]
    source = ModelSource(checkpoint.path, checkpoint.config, name)
    model: CausalLM = outline(family_of(source).from_hf(checkpoint.config), torch.float32)
    layers = {f"{path}.weight": module for path, module in model.named_modules() if isinstance(module, Linear)}
    targets = model.load_targets()
    return {
        name: target
        for name, target in targets.items()
        if name in layers and not isinstance(layers[name], Router) and name != "lm_head.weight"
    }


def quantize(folder: Path, grid: WeightGrid, left_alone: str = "", **settings: Any) -> QuantizedModel:
    """Round every product that can be."""
    checkpoint = open_checkpoint(folder)
    plain = parameters(folder)
    names = [n for n, target in products(checkpoint).items() if grid.problem_with(target.shape[1]) is None]
    names = [name for name in names if not left_alone or left_alone not in name]
    weights = {}
    together = {n: group for group in stacked_together(SourceWeights.of(checkpoint)) for n in group}
    for name in names:
        weight = plain[name]
        scales = grid.fit(weight)
        if scales.tensor_scale is not None and name in together:
            whole = grid.fit(torch.cat([plain[n] for n in together[name]]))
            at = together[name].index(name) * weight.shape[0]
            scales = whole._replace(scale=whole.scale[at : at + weight.shape[0]])
        columns = weight.shape[1]
        zero = None if scales.zero is None else per_group(scales.zero, grid.group_size, columns)
        rounded = grid.round(weight, per_group(scales.scale, grid.group_size, columns), zero)
        assert not torch.equal(rounded, weight)
        weights[name] = QuantizedWeight(rounded, scales)
    return QuantizedModel(grid, weights, **settings)


def rounded_of(weight: QuantizedWeight) -> Tensor:
    return weight.rounded() if callable(weight.rounded) else weight.rounded


def write(folder: Path, output: Path, model: QuantizedModel, **settings: Any) -> dict[str, Any]:
    output.mkdir()
    checkpoint = open_checkpoint(folder)
    write_quantized(checkpoint, SourceWeights.of(checkpoint), output, model, **settings)
    config: dict[str, Any] = json.loads((output / "config.json").read_text())
    return config


def check_round_trip(folder: Path, output: Path, model: QuantizedModel) -> None:
    """What our reader makes of the written folder is what went in, bit for bit."""
    before, after = parameters(folder), parameters(output)
    assert before.keys() == after.keys()
    for name, found in after.items():
        expected = before[name]
        if name in model.weights:
            expected = rounded_of(model.weights[name])
        elif name in model.changed:
            expected = model.changed[name]
        assert torch.equal(found, expected), name
    loaded = load_model(output, "float32", "cpu")
    assert isinstance(loaded.model, CausalLM)


@pytest.mark.parametrize("name", NATIVE)
def test_every_family_comes_back_as_it_went_in(name: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "plain", tmp_path / "packed"
    build_tiny_model(name, folder)
    plain = parameters(folder)
    # Norms, biases, routers: whatever is one number a channel, and a matrix that stays plain.
    left = next(n for n in plain if n.endswith(("mixer.o_proj.weight", "out_proj.weight")))
    model = quantize(folder, IntGrid(8, None, True), left_alone=left)
    changed = {n: t * 1.25 + 0.5 for n, t in plain.items() if n not in model.weights and not n.startswith("embed_")}
    assert left in changed and any("norm" in n for n in changed)
    model = QuantizedModel(model.grid, model.weights, changed)
    config = write(folder, output, model)
    check_round_trip(folder, output, model)
    section = config["quantization_config"]
    QuantizationConfig.model_validate({k: v for k, v in section.items() if k != "quant_method"})
    assert set(section["ignore"]).isdisjoint(module_names(output))


def module_names(output: Path) -> set[str]:
    """Modules that are packed in a folder with one file."""
    names = load_file(output / "model.safetensors")
    return {name.rpartition(".")[0] for name in names if name.endswith(".weight_scale")}


@pytest.mark.parametrize("grid", [name for name in GRIDS if name != "int8_rows"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_grid_and_way_to_store_rows(name: str, grid: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "plain", tmp_path / "packed"
    build_tiny_model(name, folder)
    weights, inputs = GRIDS[grid]
    model = quantize(folder, weights, inputs=inputs)
    assert model.weights
    write(folder, output, model)
    check_round_trip(folder, output, model)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, grid) for name in ("llama", "qwen2") for grid in ("int8_rows", "int8_inputs", "int4_groups")),
        ("llama", "float8"),
        ("mixtral", "int8_rows"),
    ],
)
def test_transformers_answers_as_the_engine_does(name: str, grid: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "plain", tmp_path / "packed"
    original = build_tiny_model(name, folder)
    weights, inputs = GRIDS[grid]
    model = quantize(folder, weights, inputs=inputs, left_alone="layers.1.mlp.down_proj")
    write(folder, output, model)
    reference = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    driver = EngineDriver(output, num_blocks=200)
    errors, changes = [], []
    for seed in range(8):
        ids = prompt(4, seed)
        request = driver.add(seed, ids)
        driver.step([(request, 2)])
        driver.step([(request, 2)])
        driver.step(generation=[request])
        output_ids, found = list(request.output_token_ids), torch.stack(driver.logits[seed])
        errors.append(distance(found, reference_logits(reference, ids, output_ids)))
        changes.append(distance(found, reference_logits(original, ids, output_ids)))
    # The last bit of a sum can put a rounded input on another step, of which a text is not rid any more.
    assert sorted(errors)[5 if inputs else 7] < 1e-5, errors
    assert max(errors) < 3e-2 and min(changes) > 2e-3, (errors, changes)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_gguf_file_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    """Packed tensors that are rounded anew, others that are decoded, and the reorderings of the file undone."""
    build_tiny("llama", tmp_path / "hf", gguf.GGMLQuantizationType.Q8_0)
    path = write_gguf(tmp_path / "hf", tmp_path / "model.gguf", packed_as(gguf.GGMLQuantizationType.Q8_0))
    model = quantize(path, IntGrid(4, 16, True), left_alone="o_proj")
    model = QuantizedModel(model.grid, model.weights, kv_scheme=FP8_KV_SCHEME, kv_scales={0: (0.5, 0.25)})
    checkpoint = open_checkpoint(path)
    source = SourceWeights.of(checkpoint)
    num_bytes = export_bytes(source, dict.fromkeys(model.weights, model.grid))
    with new_folder(tmp_path / "packed", num_bytes) as folder:
        notes = write_quantized(checkpoint, source, folder, model)
    assert notes == (f"no tokenizer in {path}: none is written",)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    check_round_trip(path, tmp_path / "packed", model)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float32
    assert "model.layers.0.self_attn.o_proj" in config["quantization_config"]["ignore"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    loaded = load_model(tmp_path / "packed", "float32", "cpu")
    assert loaded.kv_scales[0] == (0.5, 0.25)


def test_a_packed_checkpoint_can_be_packed_anew(tmp_path: Path) -> None:
    """What was packed and stays plain now is decoded in the dtype of the checkpoint; its old scales of K and V go."""
    build_tiny_model("mixtral", tmp_path / "plain")
    first = quantize(tmp_path / "plain", IntGrid(8, None, True), kv_scales={1: (2.0, 4.0)}, kv_scheme=FP8_KV_SCHEME)
    write(tmp_path / "plain", tmp_path / "first", first)
    config_path = tmp_path / "first" / "config.json"
    config_path.write_text(json.dumps({**json.loads(config_path.read_text()), "dtype": "bfloat16"}))
    second = quantize(tmp_path / "first", IntGrid(4, 16, True), left_alone="qkv_proj")
    write(tmp_path / "first", tmp_path / "second", second)
    after, before = parameters(tmp_path / "second"), parameters(tmp_path / "first")
    stored = load_file(tmp_path / "second" / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert not [name for name in stored if name.endswith(("k_scale", "v_scale"))]
    for name in after:
        packed = second.weights.get(name)
        rounded = before[name].bfloat16().float() if "qkv_proj.weight" in name else before[name]
        assert torch.equal(after[name], rounded if packed is None else rounded_of(packed)), name


def test_many_files_and_an_index(tmp_path: Path) -> None:
    """Rounded weights are asked for when they are written, and each file is small."""
    build_tiny_model("mixtral", tmp_path / "plain")
    model = quantize(tmp_path / "plain", IntGrid(8, None, True))
    asked: list[str] = []

    def later(name: str) -> QuantizedWeight:
        rounded, scales = model.weights[name]

        def give() -> Tensor:
            asked.append(name)
            assert isinstance(rounded, Tensor)
            return rounded

        return QuantizedWeight(give, scales)

    lazy = QuantizedModel(model.grid, {name: later(name) for name in model.weights})
    steps: list[tuple[int, int, str]] = []
    progress = lambda done, total, name: steps.append((done, total, name))  # noqa: E731
    write(tmp_path / "plain", tmp_path / "packed", lazy, max_file_bytes=60_000, progress=progress)
    # The three sources of a fused weight ask once.
    assert sorted(asked) == sorted(model.weights)
    assert [done for done, _, _ in steps] == list(range(1, steps[0][1] + 1))
    check_round_trip(tmp_path / "plain", tmp_path / "packed", model)
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert all(index["weight_map"][name] == file.name for name in opened.keys())  # noqa: SIM118
        assert sum(sizes) <= 60_000
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    names = [path.name for path in (tmp_path / "packed").iterdir()]
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize("grid", GRIDS)
def test_the_size_that_is_foretold_is_enough(grid: str, tmp_path: Path) -> None:
    build_tiny_model("granite_hybrid", tmp_path / "plain")
    model = quantize(tmp_path / "plain", GRIDS[grid][0])
    source = SourceWeights.of(open_checkpoint(tmp_path / "plain"))
    write(tmp_path / "plain", tmp_path / "packed", model)
    written = sum(t.nbytes for t in load_file(tmp_path / "packed" / "model.safetensors").values())
    foretold = export_bytes(source, dict.fromkeys(model.weights, model.grid))
    assert 2 * written <= foretold < 4 * written


def test_tensors_that_stack_weights_are_packed_whole(tmp_path: Path) -> None:
    build_tiny_model("granite_hybrid", tmp_path / "plain")
    model = quantize(tmp_path / "plain", IntGrid(8, None, True), left_alone="experts.3.down_proj")
    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "plain", tmp_path / "packed", model)
    message = str(caught.value)
    assert "layers.0.mlp.experts.0.down_proj.weight, which is quantized" in message and "\n" not in message
    assert "layers.0.mlp.experts.3.down_proj.weight, which is not" in message
    assert not any((tmp_path / "packed").iterdir())


def test_stacked_weights_need_one_tensor_scale(tmp_path: Path) -> None:
    build_tiny_model("granite_hybrid", tmp_path / "plain")
    model = quantize(tmp_path / "plain", Nvfp4Grid())
    name = "layers.0.mlp.experts.3.gate_up_proj.weight"
    rounded, scales = model.weights[name]
    assert scales.tensor_scale is not None
    other = QuantizedWeight(rounded, scales._replace(tensor_scale=scales.tensor_scale * 2))
    model = QuantizedModel(model.grid, {**model.weights, name: other})
    with pytest.raises(ConfigError, match=f"{name}, which nvfp4-pack-quantized needs one tensor scale for"):
        write(tmp_path / "plain", tmp_path / "packed", model)


def test_an_engine_folder_is_no_source(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    manifest: Any = object()
    checkpoint = dataclasses.replace(open_checkpoint(tmp_path), engine=manifest)
    with pytest.raises(ConfigError, match="is an engine folder; name the checkpoint"):
        SourceWeights.of(checkpoint)


@pytest.mark.parametrize(("name", "head"), [("llama", "lm_head"), ("gpt_neox", "embed_out")])
def test_a_head_can_be_packed_and_other_tensors_keep_their_dtype(name: str, head: str, tmp_path: Path) -> None:
    """Whatever the head is called, it is the only packed one here."""
    build_tiny_model(name, tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    halves = {key: tensor.bfloat16() for key, tensor in load_file(path).items()}
    save_file(halves, path)
    grid = IntGrid(8, None, True)
    weight = parameters(tmp_path / "plain")["lm_head.weight"]
    scales = grid.fit(weight)
    model = QuantizedModel(grid, {"lm_head.weight": QuantizedWeight(grid.round(weight, *scales[:2]), scales)})
    config = write(tmp_path / "plain", tmp_path / "packed", model)
    check_round_trip(tmp_path / "plain", tmp_path / "packed", model)
    assert module_names(tmp_path / "packed") == {head}
    assert head not in config["quantization_config"]["ignore"]
    for key, tensor in load_file(tmp_path / "packed" / "model.safetensors").items():
        assert key.startswith(head) or (tensor.dtype == torch.bfloat16 and torch.equal(tensor, halves[key])), key


def test_tensors_beside_the_model_go_along(tmp_path: Path) -> None:
    """A tied head that is stored all the same, parts that are not the language model, and nothing that runs code."""
    build_tiny_model("qwen2", tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.tensor([1.5, 2.5])
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    path = tmp_path / "plain" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "own.Model"}}))
    model = quantize(tmp_path / "plain", IntGrid(8, None, True))
    config = write(tmp_path / "plain", tmp_path / "packed", model)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], tensors["lm_head.weight"])
    assert stored["model.layers.0.self_attn.rotary_emb.inv_freq"].tolist() == [1.5, 2.5]
    assert config["quantization_config"]["ignore"] == ["lm_head"] and "auto_map" not in config
    check_round_trip(tmp_path / "plain", tmp_path / "packed", model)
