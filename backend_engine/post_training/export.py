"""Writes a quantized model as a Hugging Face folder in compressed-tensors' format, which other engines read as well.

Called by ``scripts/quantize.py`` when all weights are rounded. What goes in are our fused parameters; what comes out
are the checkpoint's own tensors, of which those that nothing changed are copied. Rounds nothing itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend_engine.builder.model_files import write_model_files
from backend_engine.builder.weight_files import MAX_FILE_BYTES, WeightFiles
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.kv_scales import find_kv_scales
from backend_engine.checkpoint.loader import Progress
from backend_engine.checkpoint.stored_weights import module_of
from backend_engine.errors import ConfigError
from backend_engine.models.weight_rules import Copy
from backend_engine.post_training.source_weights import SourceWeights, check_whole, elements_of, rows_of
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid

# What is there once for a tensor, however many weights it stacks: its shape, and the number beside the scales.
_SHAPE, _NUMBER = ".weight_shape", ".weight_global_scale"
# The version of the library whose format this is, for readers that go by it.
_VERSION = "0.20.1"
FP8_KV_SCHEME: Mapping[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
}  # fmt: skip
"""``kv_cache_scheme`` of an E4M3 cache with a scale for the keys and one for the values of a layer."""


class QuantizedWeight(NamedTuple):
    """rounded: numbers of the grid, float32 ``[rows, in_features]``, or what gives them when they are wanted. scales:
    with which they were rounded.
    """

    rounded: Tensor | Callable[[], Tensor]
    scales: Scales


@dataclass(frozen=True)
class QuantizedModel:
    """What became of a model, by the names of our parameters; all that is not named is as the checkpoint has it.

    weights: on ``grid``. changed: new values of plain parameters, in the form in which the loader fills them and in the
    dtype in which they are to be stored. inputs: ``input_activations`` of compressed-tensors, ``None`` = not rounded;
    inputs_kept: those of ``weights`` whose inputs are not rounded all the same.
    kv_scheme: ``kv_cache_scheme``; kv_scales: of keys and values, by layer.
    """

    grid: WeightGrid
    weights: Mapping[str, QuantizedWeight]
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    inputs_kept: frozenset[str] = frozenset()
    kv_scheme: Mapping[str, Any] | None = None
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def quantization_config(
    grid: WeightGrid,
    inputs: Mapping[str, Any] | None,
    ignore: Sequence[str],
    kv_scheme: Mapping[str, Any] | None = None,
    targets: Sequence[str] = ("Linear",),
    inputs_kept: Sequence[str] = (),
) -> dict[str, Any]:
    """``quantization_config`` of config.json. inputs, kv_scheme: see ``QuantizedModel``. ignore: modules whose weights
    are plain. targets: what the rest is. inputs_kept: modules of the rest whose inputs are not rounded.
    """
    group = {
        "targets": list(targets),
        "weights": grid.weights_config(),
        "input_activations": None if inputs is None else dict(inputs),
        "output_activations": None,
        "format": grid.packing,
    }
    groups = {"group_0": group}
    if inputs is not None and inputs_kept:
        # Modules by name come before classes.
        groups["group_1"] = {**group, "targets": list(inputs_kept), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": grid.packing,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None if kv_scheme is None else dict(kv_scheme),
        "version": _VERSION,
    }


def export_bytes(source: SourceWeights, weights: Mapping[str, WeightGrid]) -> int:
    """About how many bytes the files will have, rather more than less, while they are written. ``weights``: the
    parameters that will be quantized.
    """
    total = 0
    for name, copies in source.plan.copies.items():
        grid = weights.get(copies[0].parameter)
        shape = copies[0].packed_shape
        numbers = math.prod(copies[0].source.shape)
        if grid is not None:
            groups = 1 if grid.group_size is None else -(-shape[-1] // grid.group_size)
            total += int(numbers * grid.bits / 8) + 8 * (groups + 1) * math.prod(shape[:-1])
        elif source.stored.format_of(name) is not None:
            total += numbers * source.dtype.itemsize
        else:
            total += source.stored.files.describe(name).num_bytes
    others = [name for name in source.stored.files if name not in source.plan.copies and not source.is_quantized]
    total += sum(source.stored.files.describe(name).num_bytes for name in others)
    # One file is there twice while its parts are put together.
    return total + min(total, MAX_FILE_BYTES)


def write_quantized(
    checkpoint: Checkpoint,
    source: SourceWeights,
    folder: Path,
    model: QuantizedModel,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> tuple[str, ...]:
    """Write everything into ``folder``, which is there and empty; source: of the checkpoint. Returns what is worth a
    line in a log. One tensor of the checkpoint is in memory at a time, with what became of it.

    A tensor of the checkpoint that stacks several weights must have all of them quantized or none: ``ConfigError``.
    """
    chosen = [copies for copies in source.plan.copies.values() if _is_quantized(copies, model)]
    packed = [module_of(copies[0].source.name) for copies in chosen]
    targets = ["Linear", *(module for module in packed if "embed" in module.rpartition(".")[2])]
    ignore = _left_plain(source, set(packed))
    kept = [module_of(copies[0].source.name) for copies in chosen if copies[0].parameter in model.inputs_kept]
    section = quantization_config(model.grid, model.inputs, ignore, model.kv_scheme, targets, kept)
    config = {**checkpoint.config, "quantization_config": section}
    notes = write_model_files(checkpoint, folder, config, trust_remote_code)
    files = WeightFiles(folder, max_file_bytes)
    writer = _Writer(source, model, files)
    names = [*source.plan.copies, *_others(source, model)]
    for done, name in enumerate(names, start=1):
        writer.write(name)
        if progress is not None:
            progress(done, len(names), name)
    for layer, scales in sorted(model.kv_scales.items()):
        for which, scale in zip("kv", scales, strict=True):
            files.add(f"model.layers.{layer}.self_attn.{which}_scale", torch.tensor([scale], dtype=torch.float32))
    files.close()
    return notes


class _Writer:
    """Makes the tensors of each source and hands them on."""

    def __init__(self, source: SourceWeights, model: QuantizedModel, files: WeightFiles) -> None:
        self._source = source
        self._model = model
        self._files = files
        # Of the parameter asked for last: its sources come one after another.
        self._rounded: tuple[str, Tensor] = ("", torch.empty(0))

    def write(self, name: str) -> None:
        """Tensors of the source ``name``, or a tensor of the checkpoint that fills no parameter."""
        stored, copies = self._source.stored.files, self._source.plan.copies.get(name)
        if copies is None:
            tensor = stored.read(name)
            self._files.add(name, tensor)
            stored.release(name, tensor)
        elif copies[0].parameter in self._model.weights:
            for ending, leaf in self._leaves(copies).items():
                self._files.add(module_of(name) + ending, leaf)
        else:
            tensor = self._source.plain(name)
            self._files.add(name, self._with_changes(copies, tensor))
            self._source.release(name, tensor)

    def _with_changes(self, copies: Sequence[Copy], tensor: Tensor) -> Tensor:
        changed = [copy for copy in copies if copy.parameter in self._model.changed]
        if not changed:
            return tensor
        dtype = self._model.changed[changed[0].parameter].dtype
        values = tensor.to(dtype, copy=True).reshape(-1)
        for copy in changed:
            new = self._model.changed[copy.parameter]
            expected = self._source.targets[copy.parameter].shape
            assert tuple(new.shape) == expected, f"{copy.parameter} has shape {tuple(new.shape)}, not {expected}"
            rows = new[copy.start : copy.start + copy.rows].cpu().to(dtype)
            values[elements_of(copy).reshape(-1)] = rows.reshape(-1)
        return values.view(tensor.shape)

    def _leaves(self, copies: Sequence[Copy]) -> dict[str, Tensor]:
        """The packed source, its rows put back into the checkpoint's order."""
        check_whole(copies)
        shape = copies[0].packed_shape
        stack, num_rows = shape[:-2], shape[-2]
        pieces = [self._rows(copy) for copy in copies]
        number = self._shared_number(copies)
        order = torch.cat([rows_of(copy) for copy in copies]).argsort()
        rounded = _in_order([rounded for rounded, _, _ in pieces], order)
        scale = _in_order([scale for _, scale, _ in pieces], order)
        zeros = [zero for _, _, zero in pieces if zero is not None]
        zero = _in_order(zeros, order) if zeros else None
        del pieces
        found = []
        for start in range(0, math.prod(shape[:-1]), num_rows):
            rows = slice(start, start + num_rows)
            scales = Scales(scale[rows], None if zero is None else zero[rows], number)
            found.append(self._model.grid.leaves(rounded[rows], scales))
        if not stack:
            return found[0]
        leaves = {
            ending: leaf if ending == _NUMBER else torch.stack([one[ending] for one in found]).view(*stack, *leaf.shape)
            for ending, leaf in found[0].items()
        }
        if _SHAPE in leaves:
            leaves[_SHAPE] = torch.tensor(shape, dtype=found[0][_SHAPE].dtype)
        return leaves

    def _rows(self, copy: Copy) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rounded rows, their scales and zeros, in the order of ours."""
        weight = self._model.weights[copy.parameter]
        if self._rounded[0] != copy.parameter:
            rounded = weight.rounded() if callable(weight.rounded) else weight.rounded
            expected = self._source.targets[copy.parameter].shape
            assert tuple(rounded.shape) == expected, f"{copy.parameter}: {tuple(rounded.shape)}, not {expected}"
            self._rounded = copy.parameter, rounded.cpu()
        rows = slice(copy.start, copy.start + copy.rows)
        scale, zero, _ = weight.scales
        return self._rounded[1][rows], scale[rows].cpu(), None if zero is None else zero[rows].cpu()

    def _shared_number(self, copies: Sequence[Copy]) -> Tensor | None:
        """``tensor_scale``, which a tensor of the checkpoint has one of."""
        numbers = [self._model.weights[copy.parameter].scales.tensor_scale for copy in copies]
        first = numbers[0]
        if first is None:
            return None
        for copy, number in zip(copies, numbers, strict=True):
            if number is None or not torch.equal(number, first):
                raise ConfigError(
                    f"tensor {copy.source.name} stacks {copies[0].parameter} and {copy.parameter}, which "
                    f"{self._model.grid.packing} needs one tensor scale for; fit them together or leave both plain"
                )
        return first.cpu()


def _in_order(rows: Sequence[Tensor], order: Tensor) -> Tensor:
    """All ``rows``, and of those row ``order[i]`` as the i-th."""
    if len(rows) == 1 and torch.equal(order, torch.arange(order.numel())):
        return rows[0]
    return torch.cat(list(rows)).index_select(0, order)


def stacked_together(source: SourceWeights) -> list[list[str]]:
    """Parameters that one tensor of the checkpoint holds together, in lists of two and more: a grid that has a
    ``tensor_scale`` must have the same one for all of a list.
    """
    lists = ([copy.parameter for copy in copies] for copies in source.plan.copies.values())
    return [names for names in lists if len(names) > 1]


def _is_quantized(copies: Sequence[Copy], model: QuantizedModel) -> bool:
    parts = {copy.parameter: copy.parameter in model.weights for copy in copies}
    if len(set(parts.values())) > 1:
        inside = next(name for name, is_here in parts.items() if is_here)
        outside = next(name for name, is_here in parts.items() if not is_here)
        raise ConfigError(
            f"tensor {copies[0].source.name} holds {inside}, which is quantized, and {outside}, which is not; "
            "quantize both or leave both plain"
        )
    return any(parts.values())


def _others(source: SourceWeights, model: QuantizedModel) -> list[str]:
    """Tensors beside those of the plan that go along: of other parts of the checkpoint, and a tied head. Where the
    checkpoint packs weights none do: what is told of the packing is not true any more.
    """
    if source.is_quantized:
        return []
    dropped = {name for names in find_kv_scales(source.stored.files).values() for name in names}
    for name, parameter in source.plan.duplicates.items():
        if parameter in model.changed or parameter in model.weights:
            dropped.add(name)
    return [name for name in source.stored.files if name not in source.plan.copies and name not in dropped]


def _left_plain(source: SourceWeights, packed: set[str]) -> list[str]:
    """Modules that are products and stay plain, the head first even where it is tied."""
    names = [name for name in source.heads if name == "lm_head.weight" or name in source.stored]
    names += [name for name, copies in source.plan.copies.items() if source.is_product(copies[0])]
    if not source.is_quantized:
        others = [name for name in source.stored.files if name not in source.plan.copies]
        names += [n for n in others if n.endswith(".weight") and len(source.stored.files.describe(n).shape) > 1]
    modules = dict.fromkeys(module_of(name) for name in names)
    return [module for module in modules if module not in packed]
