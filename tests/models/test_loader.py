"""Loading a folder: rules, completeness, and one clear line for every fault of a checkpoint."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine.checkpoint.generation_config import GenerationDefaults, generation_defaults
from backend_engine.checkpoint.hf_folder import read_hf_config
from backend_engine.checkpoint.loader import check_weights, fill_weights
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.checkpoint.safetensors_reader import SafetensorsReader
from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.model_engine.model_engine import ModelEngine
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.model_engine.model_loader import load_model
from backend_engine.models.weight_plan import plan
from backend_engine.models.weight_rules import Fuse, Ignore, LoadTarget, Rename, Split, Tie, Transpose
from backend_engine.quantization.weight_format import NoQuantization
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import build_tiny_model, reference_logits

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "single"
    build_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def good_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "sharded"
    build_tiny_llama(folder, max_shard_size="100KB")
    return folder


def refusal(folder: Path) -> str:
    """The one line with which the folder is refused."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, "float32", "cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def tensors(change: Callable[[Tensors], Any]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        values = load_file(path)
        change(values)
        save_file(values, path)

    return edit


def config(change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return edit


def text(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_named(name: str) -> Edit:
    """The weights under another name."""

    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)

    return edit


Q0, UP1 = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (
            tensors(lambda t: t.pop(UP1)),
            r"^checkpoint .* does not hold tensor model\.layers\.1\.mlp\.up_proj\.weight, "
            r"which parameter layers\.1\.mlp\.gate_up_proj\.weight needs$",
        ),
        (
            tensors(lambda t: (t.pop(UP1), t.pop(Q0))),
            r"does not hold tensor model\.layers\.0\.self_attn\.q_proj\.weight \(nor 1 more\)",
        ),
        (tensors(lambda t: t.pop("lm_head.weight")), r"does not hold tensor lm_head\.weight, which parameter lm_head"),
        (
            tensors(lambda t: t.update({"model.layers.0.extra": torch.zeros(3)})),
            r"^model\.safetensors: tensor model\.layers\.0\.extra, shape \[3\], has no place in the model",
        ),
        (
            tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
            r"tensor model\.layers\.0\.self_attn\.q_proj\.bias, shape \[64\], has no place",
        ),
        (
            config(lambda c: c.update(num_hidden_layers=1)),
            r"tensor model\.layers\.1\..*, shape .*, has no place in the model that config\.json describes$",
        ),
        (
            tensors(lambda t: t.update({Q0: torch.zeros(64, 32)})),
            r"^model\.safetensors: tensor model\.layers\.0\.self_attn\.q_proj\.weight has shape \[64, 32\]; "
            r"config\.json asks for \[64, 64\]$",
        ),
        (
            config(lambda c: c.update(num_key_value_heads=4)),
            r"self_attn\.k_proj\.weight has shape \[32, 64\]; config\.json asks for \[64, 64\]",
        ),
        (config(lambda c: c.update(vocab_size=97)), r"has shape \[96, 64\]; config\.json asks for \[97, 64\]$"),
        (
            tensors(lambda t: t.update({Q0: torch.zeros(64, 64, dtype=torch.int8)})),
            r"q_proj\.weight has dtype I8; expected one of F64, F32, BF16, F16$",
        ),
        (truncate, r"model\.safetensors is not a whole safetensors file \("),
        (text("model.safetensors", b"not a checkpoint"), r"model\.safetensors is not a whole safetensors file \("),
        (text("model.safetensors", b""), r"model\.safetensors is not a whole safetensors file \("),
        (lambda f: (f / "config.json").unlink(), r"^model folder .* has no config\.json"),
        (text("config.json", '{"a": 1,\n,}'), r"config\.json is not valid JSON: .* at line 2 column 1$"),
        (text("config.json", b'{"a": "\xff"}'), r"config\.json is not UTF-8 text: .* at byte 7$"),
        (text("config.json", "[1]"), r"config\.json holds a list; expected a JSON object$"),
        (
            config(lambda c: c.update(architectures=["LlamaForCausalML"])),
            r"unknown architecture 'LlamaForCausalML'; known: .*LlamaForCausalLM.*did you mean 'LlamaForCausalLM'\?"
            r"; transformers has no such causal language model either$",
        ),
        (config(lambda c: c.pop("architectures")), r"^config\.json: architectures is None; expected a list of one"),
        (
            config(lambda c: [c.clear(), c.update(pretrained_config={"architecture": "x"}, build_config={})]),
            r"^config\.json is that of an engine which TensorRT-LLM built for one GPU",
        ),
        (config(lambda c: c.update(architectures=[])), r"^config\.json: architectures is \[\]; expected a list of one"),
        (config(lambda c: c.update(hidden_act="tanh")), r"^config\.json: hidden_act is 'tanh'; expected one of "),
        (
            only_named("pytorch_model.bin"),
            r"pytorch_model\.bin is not a file that torch\.save wrote",
        ),
        (
            only_named("consolidated.00.pth"),
            r"has no weights: expected one of model\.safetensors, .*; consolidated\.00\.pth has none of these names",
        ),
        (
            config(lambda c: c.update(tie_word_embeddings=True)),
            r"tensor lm_head\.weight differs from the tensor of parameter embed_tokens\.weight.*tie_word_embeddings",
        ),
    ],
)  # fmt: skip
def test_a_faulty_checkpoint_is_refused_in_one_line(edit: Edit, pattern: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    edit(folder)
    assert re.search(pattern, refusal(folder)), refusal(folder)


def absent_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def swapped_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    shutil.copy(second, first)


def moved_in_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.norm.weight"
    index["weight_map"][name] = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    path.write_text(json.dumps(index))


def escaping_index(folder: Path) -> None:
    text("model.safetensors.index.json", json.dumps({"weight_map": {"a": "../other.safetensors"}}))(folder)


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (absent_shard, r"model-\d+-of-\d+\.safetensors does not exist, but model\.safetensors\.index\.json lists it"),
        (swapped_shards, r"^tensor .* is in two files, model-00001|model-00001-.* does not hold tensor"),
        (
            moved_in_index,
            r"does not hold tensor model\.norm\.weight, which model\.safetensors\.index\.json lists for it$",
        ),
        (escaping_index, r"weight_map gives a the file '\.\./other\.safetensors'; expected a file name that ends in"),
        (text("model.safetensors.index.json", "{}"), r"weight_map is missing or empty; expected an object"),
        (text("model.safetensors.index.json", "{"), r"index\.json is not valid JSON: "),
    ],
)
def test_a_faulty_sharded_checkpoint_is_refused_in_one_line(
    edit: Edit, pattern: str, good_sharded: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good_sharded, folder)
    edit(folder)
    assert re.search(pattern, refusal(folder)), refusal(folder)


def test_what_is_not_a_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert re.search(r"empty is empty; expected config\.json and model\.safetensors$", refusal(tmp_path / "empty"))
    assert re.search(
        r"file is not a folder; expected a Hugging Face model folder, or a file named", refusal(tmp_path / "file")
    )
    assert re.search(r"absent does not exist; expected a Hugging Face model folder$", refusal(tmp_path / "absent"))


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_tied_head_may_be_stored_or_left_out(is_stored: bool, tmp_path: Path) -> None:
    build_tiny_llama(tmp_path, tie_word_embeddings=True)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    if is_stored:
        tensors(lambda t: t.update({"lm_head.weight": table.clone()}))(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == is_stored
    model = load_model(tmp_path, "float32", "cpu").model
    assert torch.equal(model.lm_head.quant.dequantize(model.lm_head), table)
    assert torch.equal(model.embed_tokens.weight, table)


def test_old_rotary_buffers_are_ignored(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "model")
    tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))(tmp_path / "model")
    assert load_model(tmp_path / "model", "float32", "cpu").traits.vocab_size == 96


def test_progress_counts_every_tensor(good: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    loaded = load_model(good, "float32", "cpu", progress=lambda *step: seen.append(step))
    names = set(load_file(good / "model.safetensors"))
    assert {name for _, _, name in seen} == names
    assert [(done, total) for done, total, _ in seen] == [(i + 1, len(names)) for i in range(len(names))]
    assert [tuple(spec) for spec in loaded.traits.cache_specs] == [(2, 16), (2, 16)]


def test_a_dynamic_rope_is_served_up_to_the_length_it_was_made_for(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    loaded = load_model(tmp_path, "float32", "cpu")
    pool = KVPool(loaded.traits.cache_specs, 4, 8, torch.float32, torch.device("cpu"))
    assert ModelEngine(loaded, pool, EngineLimits(2, 16, 256)).vocab_size == 96
    with pytest.raises(ConfigError, match=r"max_seq_len 257 .* max_position_embeddings 256$"):
        ModelEngine(loaded, pool, EngineLimits(2, 16, 257))


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [7, 9, 7], "pad_token_id": 3}, {"eos_token_id": 2}, GenerationDefaults((7, 9), 3)),
        ({"eos_token_id": 7}, {"eos_token_id": 2, "pad_token_id": 0}, GenerationDefaults((7,), 0)),
        ({"temperature": 1}, {"eos_token_id": [2, 5]}, GenerationDefaults((2, 5), None)),
        (None, {"eos_token_id": 2, "pad_token_id": None}, GenerationDefaults((2,), None)),
        (None, {}, GenerationDefaults((), None)),
    ],
)
def test_end_ids_come_from_the_generation_config_else_from_the_config(
    generation: dict[str, Any] | None, model: dict[str, Any], expected: GenerationDefaults, tmp_path: Path
) -> None:
    text("config.json", json.dumps(model))(tmp_path)
    if generation is not None:
        text("generation_config.json", json.dumps(generation))(tmp_path)
    assert generation_defaults(open_checkpoint(tmp_path)) == expected
    assert read_hf_config(tmp_path) == model


def test_a_faulty_end_id_is_refused(tmp_path: Path) -> None:
    text("config.json", "{}")(tmp_path)
    text("generation_config.json", '{"eos_token_id": "</s>"}')(tmp_path)
    with pytest.raises(ModelLoadError, match=r"^generation_config\.json: eos_token_id is '</s>'; expected an integer"):
        generation_defaults(open_checkpoint(tmp_path))


def test_every_kind_of_rule_fills_its_parameters(tmp_path: Path) -> None:
    stored = {
        "h.0.attn.weight": torch.arange(12.0).reshape(3, 4),
        "h.0.both": torch.arange(10.0).reshape(5, 2),
        "h.0.x": torch.full((2, 3), 1.0),
        "h.0.y": torch.full((1, 3), 2.0),
        "table": torch.arange(6.0).reshape(3, 2),
        "copy": torch.arange(6.0).reshape(3, 2),
        "h.0.mask": torch.ones(4),
    }
    save_file(stored, tmp_path / "model.safetensors")
    rules = (
        Transpose("h.{i}.attn.weight", "layers.{i}.attn"),
        Split("h.{i}.both", ("layers.{i}.top", "layers.{i}.bottom")),
        Fuse(("h.{i}.x", "h.{i}.y"), "layers.{i}.xy"),
        Rename("table", "table"),
        Tie("copy", "head", shared_with="table"),
        Ignore("h.{i}.mask"),
    )
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "layers.0.attn": ((4, 3), (4,)),
        "layers.0.bottom": ((3, 2), (3,)),
        "layers.0.top": ((2, 2), (2,)),
        "layers.0.xy": ((3, 3), (2, 1)),
        "table": ((3, 2), (3,)),
    }
    targets = {name: LoadTarget(torch.full(shape, -1.0), parts) for name, (shape, parts) in shapes.items()}
    files = TensorFiles([SafetensorsReader(tmp_path / "model.safetensors")])
    weights = StoredWeights(files, NoQuantization(), "here")
    fill_weights(check_weights(weights, targets, rules, "here"), weights, targets)
    found = {name: target.tensor for name, target in targets.items()}
    assert torch.equal(found["layers.0.attn"], stored["h.0.attn.weight"].T)
    assert torch.equal(torch.cat((found["layers.0.top"], found["layers.0.bottom"])), stored["h.0.both"])
    assert torch.equal(found["layers.0.xy"], torch.cat((stored["h.0.x"], stored["h.0.y"])))
    assert torch.equal(found["table"], stored["table"])
    with pytest.raises(AssertionError, match=r"no weight rule fills parameter stray"):
        plan(rules, {"stray": LoadTarget(torch.empty(1), (1,))}, stored)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_half_of_a_checkpoint_with_vision_is_found_under_either_name(prefix: str, tmp_path: Path) -> None:
    model = build_tiny_model("gemma3_vision", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    found = next(name for name in stored if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    renamed = {name.replace(found, prefix) if name.startswith(found) else name: value for name, value in stored.items()}
    save_file(renamed, path, {"format": "pt"})
    driver = EngineDriver(tmp_path)
    ids = list(range(3, 40))
    output = driver.generate(driver.add(0, ids), 4)
    expected = reference_logits(model, ids, output)
    torch.testing.assert_close(torch.stack(driver.logits[0]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_missing_tensor_is_named_in_the_spelling_of_the_checkpoint(prefix: str, tmp_path: Path) -> None:
    build_tiny_model("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = {prefix + name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    save_file(stored, path, {"format": "pt"})
    assert load_model(tmp_path, "float32", "cpu").warnings == ()
    del stored[f"{prefix}h.1.mlp.c_fc.weight"]
    save_file(stored, path, {"format": "pt"})
    assert f"does not hold tensor {prefix}h.1.mlp.c_fc.weight," in refusal(tmp_path)
