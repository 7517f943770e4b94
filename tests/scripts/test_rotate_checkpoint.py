"""``scripts/rotate_checkpoint.py``: the same function with other weights, one line for what it cannot rotate."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import rotate_checkpoint
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.tiny_models import COMMON, build_tiny_model, scramble

TOKENS = torch.randint(3, 90, (3, 20), generator=torch.Generator().manual_seed(0))
ROTATED = ("embed_tokens", "q_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")


def rotated(model: Path, output: Path, *arguments: str) -> int:
    return rotate_checkpoint.main(["--model", str(model), "--output", str(output), *arguments])


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    result: Tensor = model(TOKENS).logits
    return result


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def biased_llama(folder: Path) -> Any:
    """Llama with biases on all its products, in several files, with old exports' angles among its tensors."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True)).eval()
    scramble(model)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    first = next(folder.glob("model-00001-*"))
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    save_file({**load_file(first), **angles}, first, {"format": "pt"})
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "biased"])
def test_the_copy_has_other_weights_and_the_same_logits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "model", tmp_path / "rotated"
    expected = logits(biased_llama(model) if name == "biased" else build_tiny_model(name, model))
    assert rotated(model, output) == 0
    assert capsys.readouterr().out == f"{output}\n"
    copy = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(copy), expected, rtol=0, atol=1e-4)
    before, after = tensors(model), tensors(output)
    assert set(after) == {*before, "lm_head.weight"}
    for tensor, value in after.items():
        if tensor.endswith(ROTATED):
            assert (value - before[tensor]).norm() > before[tensor].norm() * 0.5, tensor
        elif "norm" in tensor:
            assert (value == 1).all() and not (before[tensor] == 1).any()
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_seed_decides_the_rotation(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "model")
    for output, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert rotated(tmp_path / "model", tmp_path / output, "--seed", seed) == 0
    a, b, c = (tensors(tmp_path / output) for output in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


def test_a_number_that_only_one_channel_has_is_spread_over_all(tmp_path: Path) -> None:
    """The reason for the whole: outliers of the residual stream are gone, and so is a grid that weights lay on."""
    model = build_tiny_model("llama", tmp_path / "model")
    column = model.model.layers[1].mlp.gate_proj.weight.detach()
    column[:, 7] *= 100
    model.save_pretrained(tmp_path / "model")
    assert rotated(tmp_path / "model", tmp_path / "rotated") == 0
    weight = tensors(tmp_path / "rotated")["model.layers.1.mlp.gate_proj.weight"]
    assert column.abs().amax(0).max() > 30 * column.abs().amax(0).median()
    assert weight.abs().amax(0).max() < 8 * weight.abs().amax(0).median()


def test_dtypes_stay_and_the_other_files_come_along(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "rotated"
    build_tiny_model("qwen2", model).to(torch.bfloat16).save_pretrained(model)
    copied = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "merges.txt": "a b", "tokenizer.model": "x"}
    left = {"code.py": "x = 1", ".hidden.json": "{}", "pytorch_model.bin.index.json": "{}", "training_args.bin": "x"}
    for file, text in {**copied, **left}.items():
        (model / file).write_text(text)
    assert rotated(model, output) == 0
    assert {value.dtype for value in tensors(output).values()} == {torch.bfloat16}
    written = {path.name for path in output.iterdir()}
    assert written == {*copied, "config.json", "generation_config.json", "model.safetensors"}
    assert all((output / file).read_text() == text for file, text in copied.items())


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(folder: Path, add: dict[str, Tensor], remove: str = "") -> None:
    path = folder / "model.safetensors"
    kept = {name: value for name, value in {**load_file(path), **add}.items() if name != remove}
    save_file(kept, path, {"format": "pt"})


EMBEDDING = "model.embed_tokens.weight"
PRODUCT, NORM = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda m: edit_config(m, architectures=["GemmaForCausalLM"]), "architectures is 'GemmaForCausalLM'; expected"),
        (lambda m: edit_config(m, quantization_config={"quant_method": "gptq"}), "is quantized; expected plain"),
        (lambda m: edit_config(m, hidden_size="64"), "hidden_size is '64'; expected an integer"),
        (lambda m: edit_config(m, hidden_size=32), "has the shape .* but hidden_size is 32"),
        (lambda m: edit_tensors(m, {f"{PRODUCT[:-13]}q_norm.weight": torch.ones(4)}), "holds 'model.*q_norm"),
        (lambda m: edit_tensors(m, {"score.weight": torch.ones(4)}), "holds 'score.weight', which is no tensor"),
        (lambda m: edit_tensors(m, {}, NORM), f"holds no {NORM}"),
        (lambda m: edit_tensors(m, {}, "lm_head.weight"), "holds no lm_head.weight"),
        (lambda m: edit_tensors(m, {}, EMBEDDING), f"holds no {EMBEDDING}"),
        (lambda m: edit_tensors(m, {NORM: torch.ones(63)}), f"{NORM} has the shape \\[63\\]"),
        (lambda m: edit_tensors(m, {PRODUCT: torch.tensor(1.0)}), f"{PRODUCT} has the shape \\[\\]"),
        (lambda m: edit_tensors(m, {PRODUCT: torch.ones(64, 64).to(torch.float8_e4m3fn)}), "is F8_E4M3; expected"),
        (lambda m: edit_tensors(m, {NORM: torch.full((64,), float("inf"))}), f"{PRODUCT[:-13]}.* NaN or infinity"),
        (lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"), "pytorch_model.bin"),
        (lambda m: shutil.rmtree(m), "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_rotated_is_told_in_one_line(
    fault: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_model("llama", tmp_path / "model")
    fault(tmp_path / "model")
    capsys.readouterr()
    assert rotated(tmp_path / "model", tmp_path / "rotated") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "rotating" not in line]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert re.search(said, lines[0]), lines[0]
    assert {path.name for path in tmp_path.iterdir()} <= {"model"}


def test_an_output_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tiny_model("llama", tmp_path / "model")
    (tmp_path / "rotated").mkdir()
    (tmp_path / "rotated" / "mine").write_text("x")
    assert rotated(tmp_path / "model", tmp_path / "rotated") == 1
    assert f"output {tmp_path / 'rotated'} exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "rotated").iterdir()] == ["mine"]
    assert rotated(tmp_path / "model", tmp_path / "model") == 1
    assert rotated(tmp_path / "model", tmp_path / "absent" / "rotated") == 1
    assert "does not exist" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_model("llama", tmp_path / "model")
    copy_of = rotate_checkpoint.Rotation.copy_of

    def interrupted(self: Any, name: str, source: str) -> Tensor:
        if name.startswith("model.layers.1"):
            assert any(path.name != "model" for path in tmp_path.iterdir()), "it is in the middle of writing"
            raise KeyboardInterrupt
        return copy_of(self, name, source)

    monkeypatch.setattr(rotate_checkpoint.Rotation, "copy_of", interrupted)
    assert rotated(tmp_path / "model", tmp_path / "rotated") == 130
    assert "error: interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
