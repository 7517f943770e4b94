"""Checkpoints of compressed-tensors (https://github.com/neuralmagic/compressed-tensors), which llm-compressor writes.

Reads the quantization config: groups of modules, each with a form for the weights and a rounding for the inputs. What
is declared for the inputs is computed as declared. Every combination that is not known is refused by group and key.
"""

from collections.abc import Mapping

import torch

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.compressed_args import QuantArgs
from backend_engine.quantization.formats.compressed_group import Group, read_group
from backend_engine.quantization.formats.compressed_weights import CompressedInt, RoundedLayer, SharedScales
from backend_engine.quantization.formats.module_patterns import ModulePatterns
from backend_engine.quantization.formats.mxfp4 import Mxfp4
from backend_engine.quantization.formats.nvfp4 import Nvfp4
from backend_engine.quantization.formats.scaled_float8 import find_scaled_float8
from backend_engine.quantization.formats.stored_shape import stored_shape
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Quantization, StoredTensors, WeightFormat

_NUMBER_SHAPES: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
_SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_CLASSES = ("Linear", "Embedding")


def read(config: HfConfig, stored: StoredTensors) -> Quantization:
    """Raises ``ModelLoadError`` for a config with anything that is not known."""
    config.require_neutral({"transform_config": ({}, {"config_groups": {}}), "moe_sparsity_config": ()})
    sparsity = config.section("sparsity_config")
    if sparsity is not None:
        sparsity.choice("format", ("dense",), "dense")
    config.choice("quantization_status", ("compressed", "frozen"), "compressed")
    groups = config.section("config_groups")
    names = list(config.get("config_groups") or {})
    found = [] if groups is None else [read_group(config, groups, name) for name in names]
    return CompressedTensors(
        config,
        stored,
        {target: group for group in found for target in group.targets.patterns},
        ModulePatterns.read(config, "ignore"),
        _kv_cache_dtype(config),
    )


def _kv_cache_dtype(config: HfConfig) -> str | None:
    scheme = config.section("kv_cache_scheme")
    if scheme is None:
        return None
    args = QuantArgs.read(scheme)
    if args.num_bits != 8:
        raise scheme.refuse("num_bits", "8")
    if not args.is_symmetric:
        raise scheme.refuse("symmetric", "true")
    if args.strategy not in ("tensor", "token"):
        raise scheme.refuse("strategy", "tensor or token: heads share a scale")
    return "fp8" if args.type == "float" else "int8"


class CompressedTensors(Quantization):
    """groups: by target, of which the later of two that are the same counts, as in the library."""

    def __init__(
        self,
        config: HfConfig,
        stored: StoredTensors,
        groups: Mapping[str, Group],
        ignored: ModulePatterns,
        kv_cache_dtype: str | None,
    ) -> None:
        self._config = config
        self._stored = stored
        self._groups = groups
        self._ignored = ignored
        self._kv_cache_dtype = kv_cache_dtype
        # Names before regular expressions before classes, each sorted.
        self._targets = sorted(groups, key=lambda target: (target in _CLASSES, target.startswith("re:"), target))

    @property
    def kv_cache_dtype(self) -> str | None:
        return self._kv_cache_dtype

    def format_of(self, module: str) -> WeightFormat | None:
        kind = "Embedding" if _is_embedding(module) else "Linear"
        if module in self._ignored or kind in self._ignored.patterns:
            return None
        found = next((target for target in self._targets if _is_for(target, module, kind)), None)
        if found is None or not self._is_packed(module, self._groups[found]):
            return None
        return _layer_format(module, self._groups[found], self._stored)

    def _is_packed(self, module: str, group: Group) -> bool:
        """Whether any of the tensors of a packed weight is there."""
        plain = self._stored.tensors.get(f"{module}.weight")
        has_scale = self._stored.has(f"{module}.weight_scale")
        if group.has_packed_leaf and self._stored.has(f"{module}.weight_packed"):
            return True
        if plain is None or plain.dtype not in FLOAT_DTYPES:
            return has_scale or (plain is not None and not group.has_packed_leaf)
        if has_scale:
            raise self._config.refuse(
                "quantization_status", f"compressed weights, but {module}.weight is {plain.dtype}"
            )
        return False


def _is_embedding(module: str) -> bool:
    return any(part in module.rpartition(".")[2] for part in ("embed", "wte", "wpe"))


def _is_for(target: str, module: str, kind: str) -> bool:
    return target == kind if target in _CLASSES else module in ModulePatterns((target,))


def _layer_format(module: str, group: Group, stored: StoredTensors) -> WeightFormat:
    """The weight's format, with what the layer does to its input, and with zero points that are of no account."""
    needless = []
    if group.weights.is_symmetric:
        needless.append(".weight_zero_point")
    rounding = group.inputs
    if rounding is None or rounding.is_symmetric:
        needless.append(".input_zero_point")
    weight = _weight_format(module, group, stored)
    zeros = tuple((ending, stored.tensors[module + ending].shape) for ending in needless if stored.has(module + ending))
    if rounding is None:
        return RoundedLayer(weight, zeros=zeros) if zeros else weight
    number = zero = None
    if rounding.is_static:
        number = _number(module, ".input_global_scale" if rounding.kind == "nvfp4" else ".input_scale", stored)
        zero = None if rounding.is_symmetric else _number(module, ".input_zero_point", stored)
    return RoundedLayer(weight, rounding.kind, rounding.group_size, rounding.is_symmetric, number, zero, zeros)


def _number(module: str, ending: str, stored: StoredTensors) -> tuple[str, tuple[int, ...]]:
    return ending, stored_shape(stored, module + ending, _NUMBER_SHAPES)


def _dtype(stored: StoredTensors, name: str) -> str:
    info = stored.tensors.get(name)
    return "" if info is None else info.dtype


def _scales(args: QuantArgs, number_shape: tuple[int, ...]) -> SharedScales:
    if args.strategy == "tensor":
        return SharedScales(number_shape=number_shape)
    if args.strategy == "block":
        assert args.block is not None, args
        return SharedScales(*args.block)
    return SharedScales(1, args.group_size, is_whole=True)


def _weight_format(module: str, group: Group, stored: StoredTensors) -> WeightFormat:
    args = group.weights
    if group.packing == "nvfp4-pack-quantized":
        ending, shape = _number(module, ".weight_global_scale", stored)
        return Nvfp4(".weight_packed", ".weight_scale", ending, is_divisor=True, tensor_scale_shape=shape)
    if group.packing == "mxfp4-pack-quantized":
        return Mxfp4(".weight_packed", ".weight_scale", has_blocks=False)
    if args.type == "float":
        block = args.block if args.group_size is None else (1, args.group_size)
        return find_scaled_float8(stored, module, (".weight_scale",), block)
    is_packed = group.packing == "pack-quantized"
    # Scales stay as they are stored where there are many of them.
    scale_dtype = _dtype(stored, f"{module}.weight_scale") if args.strategy == "group" else "F32"
    # Version 0.9.0 of the library did not pack them.
    has_packed_zeros = is_packed and args.strategy != "tensor" and _dtype(stored, f"{module}.weight_zero_point") != "I8"
    return CompressedInt(
        args.num_bits,
        _scales(args, stored_shape(stored, f"{module}.weight_scale", _NUMBER_SHAPES)),
        _SCALE_DTYPES.get(scale_dtype, torch.float32),
        is_packed,
        is_symmetric=args.is_symmetric,
        has_packed_zeros=has_packed_zeros and not args.is_symmetric,
        has_order=args.has_order or stored.has(f"{module}.weight_g_idx"),
    )
