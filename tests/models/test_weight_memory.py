"""``weight_bytes`` and the memory in the statistics: each tensor once, in the form in which it is kept."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from backend_engine import LLM, KvCacheConfig
from backend_engine.layers.linear import Linear
from backend_engine.model_engine.model_backend import Implementations
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.weight_memory import weight_bytes
from backend_engine.ops.dense_products import DenseKind
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized
from tests.support.tiny_models import build_tiny_model

FLOAT32 = TensorOptions(torch.float32, torch.device("cpu"))


def test_parameters_and_buffers_count_and_shared_ones_once() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(10, 20, bias=True), nn.Linear(10, 20, bias=False)
    model.second.weight = model.first.weight
    model.view = model.first.weight.data[:5]
    model.register_buffer("table", torch.zeros(7, dtype=torch.int64))
    assert weight_bytes(model) == 4 * (200 + 20) + 8 * 7


def test_a_packed_weight_counts_in_place_of_the_plain_one() -> None:
    layer = Linear(64, (32, 32), Unquantized(pack=True), FLOAT32, bias=True)
    before = weight_bytes(layer)
    layer.after_loading()
    assert layer.weight is None and layer.dense_weight is not None
    assert weight_bytes(layer) == before == 4 * (64 * 64 + 64)


def test_the_statistics_tell_weights_and_kv_cache_of_the_cpu(table_model_dir: Path) -> None:
    config = json.loads((Path(table_model_dir) / "config.json").read_text())
    with safe_open(Path(table_model_dir) / "model.safetensors", "pt") as file:
        num_weights = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    kv_bytes = (
        2 * 4 * 320 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )  # K and V in float32, 10 blocks of 32 tokens
    with LLM(str(table_model_dir), max_seq_len=256, kv_cache_config=KvCacheConfig(max_tokens=320)) as llm:
        memory = llm.stats().memory
    assert (memory.gpu, memory.pinned) == (0, 0)
    assert memory.cpu >= 4 * num_weights + kv_bytes, "all weights, the output layer's included, and the KV cache"
    assert memory.cpu < 4 * num_weights + kv_bytes + 1_000_000, "and little else (tables of the positions)"


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_tokens_of_the_vocabulary_projection_keep_16_bits_in_w8a8(backend: str, tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    loaded = load_model(
        tmp_path, "float32", "cpu", Implementations(weight_only_precision="w8a8"), model_backend=backend
    )
    kinds = {
        name: module.dense_weight.kind
        for name, module in loaded.model.named_modules()
        if isinstance(module, Linear) and module.dense_weight is not None
    }
    heads = {name for name in kinds if name.endswith("lm_head")}
    assert len(heads) == 1 and len(kinds) > 5
    for name, kind in kinds.items():
        assert kind == (DenseKind.I8 if name in heads else DenseKind.W8A8), name
