"""Models as GGUF files: the same config and the same tensors as the Hugging Face folder they were written from."""

import json
import re
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.gguf_checkpoint import open_gguf
from backend_engine.config.hf_config import HfConfig
from backend_engine.plugins.catalog import ARCHITECTURES
from backend_engine.quantization.formats.gguf import read
from backend_engine.quantization.weight_format import StoredTensors
from tests.support.tiny_gguf import TINY_GGUFS, build_tiny, packed_as, plain, split_parts, write_gguf

PACKED = [name for name in TINY_GGUFS if name != "deepseek_v2_lite"]


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors, decoded."""
    (reader,) = checkpoint.open_tensors()
    infos = {name: reader.describe(name) for name in reader.names()}
    quantization = read(HfConfig({"quant_method": "gguf"}), StoredTensors(infos, "model.gguf"))
    found = {}
    for name, info in infos.items():
        tensor = reader.read(name)
        packing = quantization.format_of(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if packing is not None:
            block, num_bytes = gguf.GGML_QUANT_SIZES[Type[info.dtype]]
            shape = (*info.shape[:-1], info.shape[-1] // num_bytes * block)
            assert packing.leaves(shape)[".weight"].shape == info.shape
            tensor = packing.scheme.decode(packing.unpack({".weight": tensor}, shape))
        found[name] = tensor
    return found


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors, with the names that GGUF's reader uses where there are several spellings."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if re.search(r"experts\.(gate_up|down)_proj(_bias)?$", name):  # GPT-OSS
            leaf = "bias" if name.endswith("_bias") else "weight"
            before, part = name.removesuffix("_bias").rsplit(".", 1)
            for e, entry in enumerate(tensor if leaf == "bias" else tensor.transpose(1, 2)):
                parts = (
                    {"down_proj": entry} if part == "down_proj" else {"gate_proj": entry[::2], "up_proj": entry[1::2]}
                )
                found.update({f"{before}.{e}.{key}.{leaf}": value for key, value in parts.items()})
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("name", TINY_GGUFS)
def test_a_gguf_is_the_folder_it_was_written_from(name: str, tmp_path: Path) -> None:
    build_tiny(name, tmp_path / "hf")
    checkpoint = open_gguf(write_gguf(tmp_path / "hf", tmp_path / "model.gguf"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    if name == "mistral":  # llama.cpp makes no difference
        config.update(architectures=["LlamaForCausalLM"], model_type="llama")
    assert checkpoint.config["architectures"] == config["architectures"]
    assert checkpoint.config["model_type"] == config["model_type"]
    family = ARCHITECTURES.get(config["architectures"][0])
    stated = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    assert family.from_hf(stated, checkpoint.origin) == family.from_hf(config)
    assert not family.unknown_keys(stated)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert checkpoint.config.get(key) == config.get(key)

    expected, found = folder_tensors(tmp_path / "hf"), tensors_of(checkpoint)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6 if "norm" in key else 0, msg=key)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_put_in_order_too(name: str, tmp_path: Path) -> None:
    build_tiny(name, tmp_path / "hf")
    whole = tensors_of(open_gguf(write_gguf(tmp_path / "hf", tmp_path / "whole.gguf", plain)))
    checkpoint = open_gguf(write_gguf(tmp_path / "hf", tmp_path / "packed.gguf", packed_as(Type.Q8_0)))
    (reader,) = checkpoint.open_tensors()
    packed = [key for key in reader.names() if reader.describe(key).dtype == "Q8_0"]
    assert len(packed) > 5
    found = tensors_of(checkpoint)
    for key in packed:
        expected = whole[key].T if name == "gpt2" and ".c_" in key else whole[key]
        again = gguf.dequantize(gguf.quantize(expected.contiguous().numpy(), Type.Q8_0), Type.Q8_0)
        assert torch.equal(found[key], torch.from_numpy(again)), key


def test_gpt_oss_experts_stay_in_mxfp4(tmp_path: Path) -> None:
    build_tiny("gpt_oss", tmp_path / "hf")

    def pick(name: str, shape: tuple[int, ...]) -> Type:
        return Type.MXFP4 if "_exps.weight" in name else Type.F32

    (reader,) = open_gguf(write_gguf(tmp_path / "hf", tmp_path / "model.gguf", pick)).open_tensors()
    info = reader.describe("model.layers.2.mlp.experts.5.down_proj.weight")
    assert info == ((64, 51), "MXFP4")
    assert reader.describe("model.layers.2.mlp.experts.5.down_proj.bias") == ((64,), "F32")


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    build_tiny("llama", tmp_path / "hf")
    path = write_gguf(tmp_path / "hf", tmp_path / "model.gguf", packed_as(Type.Q4_0))
    whole = tensors_of(open_gguf(path))
    parts = split_parts(path, 3)
    for part in parts:
        found = open_gguf(part)
        assert found.config == open_gguf(path).config
        tensors = tensors_of(found)
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[name], whole[name]) for name in whole)


def test_a_tied_head_is_one_that_the_file_lacks(tmp_path: Path) -> None:
    build_tiny("llama_biased", tmp_path / "tied")
    build_tiny("llama", tmp_path / "untied")
    assert open_gguf(write_gguf(tmp_path / "tied", tmp_path / "tied.gguf")).config["tie_word_embeddings"] is True
    assert open_gguf(write_gguf(tmp_path / "untied", tmp_path / "untied.gguf")).config["tie_word_embeddings"] is False
