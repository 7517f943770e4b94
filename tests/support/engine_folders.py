"""Engine folders small enough to break in every way: a tokenizer, a configuration and weights of a few bytes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from backend_engine.config.build_config import BuildConfig
from backend_engine.config.engine_files import entry_of
from backend_engine.config.engine_manifest import ENGINE_FILE, EngineManifest, FileEntry, PartForm, manifest_text
from tests.support.table_model import build_tokenizer

BUILD = BuildConfig(max_batch_size=8, max_seq_len=256, precision="bfloat16", tensor_parallel_size=2)


def some_manifest(**values: Any) -> EngineManifest:
    """A manifest with something in every field; ``values`` override."""
    usual: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "build": BUILD,
        "quantization": {"quant_method": "gptq", "bits": [4, None, 0.5]},
        "kv_cache_dtype": "fp8",
        "kv_scales": {0: (0.5, 0.25), 11: (1.0, 3.0)},
        "packed": {
            "layers.0.mlp.down_proj.weight": (
                PartForm({"kind": "GroupwiseInt", "bits": 4}, 64),
                PartForm({"kind": "Plain", "dtype": "bfloat16"}, 8),
            ),
        },
        "versions": {"inflight": "0.1.0", "torch": "2.6"},
        "files": {"config.json": FileEntry(12, "0a" * 32), "rank0-00001.safetensors": FileEntry(0, "ff" * 32)},
        "built": "2026-01-31",
    }
    return EngineManifest(**{**usual, **values})


def write_engine_folder(folder: Path, **values: Any) -> EngineManifest:
    """A folder whose files are as its engine.json says; ``values`` override the manifest's."""
    build_tokenizer().save_pretrained(folder)
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    for rank in range(2):
        for i in (1, 2):
            tensors = {"norm.weight": torch.full((4,), float(rank)), f"layers.{i}.weight": torch.ones(3, 5)}
            save_file(tensors, folder / f"rank{rank}-{i:05d}.safetensors")
    files = {path.name: entry_of(path) for path in folder.iterdir()}
    manifest = some_manifest(**{"files": files, **values})
    (folder / ENGINE_FILE).write_text(manifest_text(manifest))
    return manifest
