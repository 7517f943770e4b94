"""Layers that compressed-tensors itself has quantized and compressed, for tests of the reader of its checkpoints.

The library describes, calibrates and stores them; nothing here knows how.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import ModelCompressor, decompress_module
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor, nn

from backend_engine.config.hf_config import HfConfig
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.quantization.formats.compressed_tensors import read
from backend_engine.quantization.weight_format import Quantization, StoredTensors, WeightFormat

DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8",
    torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


class Compressed(NamedTuple):
    """model: compressed, its tensors as the library stores them. config: what the library writes into config.json."""

    model: nn.Module
    tensors: dict[str, Tensor]
    config: dict[str, Any]


def compress(
    model: nn.Module, groups: Mapping[str, Any], ignore: list[str] | None = None, format: str | None = None
) -> Compressed:
    """Let the library quantize and compress ``model``, in place. ``groups``: config_groups of its config."""
    quantize(model, groups, ignore)
    compressor = ModelCompressor.from_pretrained_model(model, format)
    compressor.compress_model(model)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert compressor.quantization_config is not None
    written = json.loads(compressor.quantization_config.model_dump_json())
    return Compressed(model, tensors, written)


def quantize(model: nn.Module, groups: Mapping[str, Any], ignore: list[str] | None = None) -> None:
    """Let the library describe and calibrate ``model``, in place."""
    config = QuantizationConfig(
        config_groups=dict(groups), ignore=ignore or [], quantization_status=QuantizationStatus.INITIALIZED
    )
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module)


@torch.no_grad()
def _calibrate(module: Any) -> None:
    """Scales and zero points from the weight, and from numbers as the layer's input might have them."""
    scheme = module.quantization_scheme
    _set(module, "weight", scheme.weights, module.weight)
    inputs = scheme.input_activations
    if inputs is not None:
        sample = torch.randn(64, module.weight.shape[1], generator=torch.Generator().manual_seed(5)) * 0.7 + 0.1
        if inputs.dynamic == "local":
            module.input_global_scale.copy_(generate_gparam(sample.amin(), sample.amax()))
        elif not inputs.dynamic:
            _set(module, "input", inputs, sample)


def _set(module: Any, name: str, args: QuantizationArgs, values: Tensor) -> None:
    low, high = _ranges(args, values)
    number = None
    if args.strategy == "tensor_group":
        number = generate_gparam(values.amin().float(), values.amax().float())
        getattr(module, f"{name}_global_scale").copy_(number)
    scale, zero = calculate_qparams(low, high, args, number)
    getattr(module, f"{name}_scale").copy_(scale.reshape(getattr(module, f"{name}_scale").shape))
    stored = getattr(module, f"{name}_zero_point")
    stored.copy_(zero.reshape(stored.shape))


def _ranges(args: QuantizationArgs, values: Tensor) -> tuple[Tensor, Tensor]:
    if args.strategy == "tensor":
        return values.amin(), values.amax()
    if args.strategy == "channel":
        return values.amin(-1, True), values.amax(-1, True)
    if args.strategy in ("group", "tensor_group"):
        grouped = values.unflatten(-1, (-1, args.group_size))
        return grouped.amin(-1), grouped.amax(-1)
    rows, columns = args.block_structure
    padded = nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def reference_weight(module: Any) -> Tensor:
    """The weight of a compressed module by the library, of four-bit floats in float32, which it can do as well."""
    scheme = module.quantization_scheme
    if scheme.weights.num_bits == 4 and scheme.weights.type == "float":
        packed = module.weight_packed
        values = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
        scale = module.weight_scale
        scale = 2.0 ** (scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        number = getattr(module, "weight_global_scale", None)
        return dequantize(values, scale, args=scheme.weights, global_scale=number, dtype=torch.float32)
    decompress_module(module)
    return module.weight.detach()


def stored_in(tensors: Mapping[str, Tensor]) -> StoredTensors:
    """What the files' headers would say."""
    return StoredTensors({n: TensorInfo(tuple(t.shape), DTYPES[t.dtype]) for n, t in tensors.items()}, "the checkpoint")


def read_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Quantization:
    """Our reading of it."""
    return read(HfConfig(config, "config.json: quantization_config"), stored_in(tensors))


def unpack(
    weight: WeightFormat, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]
) -> dict[str, Tensor]:
    """The components, after the checks that the loader makes; every tensor of the module must be used."""
    leaves = weight.leaves(shape)
    stored = {name.removeprefix(module): t for name, t in tensors.items() if name.startswith(f"{module}.")}
    stored.pop(".bias", None)
    assert set(stored) <= set(leaves), (sorted(stored), sorted(leaves))
    for ending, leaf in leaves.items():
        assert leaf.is_optional or ending in stored, ending
        if ending in stored:
            assert tuple(stored[ending].shape) == leaf.shape, (ending, stored[ending].shape, leaf)
            assert DTYPES[stored[ending].dtype] in leaf.dtypes, (ending, stored[ending].dtype, leaf)
    found = weight.unpack(stored, shape)
    for name, component in weight.scheme.components(shape[1]).items():
        expected = (shape[0], *component.shape) if component.per_row else component.shape
        assert tuple(found[name].shape) == expected, (name, found[name].shape, expected)
        assert found[name].dtype == component.dtype, (name, found[name].dtype, component)
    assert set(found) == set(weight.scheme.components(shape[1]))
    return found


def config(group: Mapping[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """A config as the library writes it, with one group of which ``group`` says what is different."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **(group or {})}},
        "ignore": ["lm_head"],
        **values,
    }


def int4_tensors(module: str = "proj") -> dict[str, Tensor]:
    """A weight of 16 rows and 64 columns as ``config`` describes it."""
    return {
        f"{module}.weight_packed": torch.randint(-(2**31), 2**31 - 1, (16, 8), dtype=torch.int32),
        f"{module}.weight_scale": torch.rand(16, 4).bfloat16(),
        f"{module}.weight_shape": torch.tensor([16, 64]),
    }
