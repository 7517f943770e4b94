"""A tiny Llama whose layers are packed by a writer of the caller's: our logits against those of the decoded model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.parity import check_folder
from tests.support.tiny_models import build_tiny_model

LEFT_ALONE = "model.layers.1.mlp.up_proj"

# A shape and a seed -> the tensors of a weight, and the weight itself.
Pack = Callable[[tuple[int, int], int], tuple[dict[str, Tensor], Tensor]]


def check_packed_llama(folder: Path, config: dict[str, Any], written_as: str, pack: Pack) -> None:
    """config: ``quantization_config``. written_as: the module that ``pack`` names its tensors for. Of the linear
    layers, the head and a part of a fused one stay plain.
    """
    model = build_tiny_model("llama", folder)
    tensors = dict(model.state_dict())
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for seed, name in enumerate(layers):
        if name in ("lm_head", LEFT_ALONE):
            continue
        layer = model.get_submodule(name)
        assert isinstance(layer, torch.nn.Linear)
        packed, weight = pack((layer.out_features, layer.in_features), seed)
        with torch.no_grad():
            layer.weight.copy_(weight)
        del tensors[f"{name}.weight"]
        tensors.update({key.replace(written_as, name): tensor for key, tensor in packed.items()})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    check_folder(folder, model)
