"""Loading weights: a stream of checkpoint tensors, through the family's rules, into parameters.

Used while a model is built. Strict: every tensor is used once and every parameter filled once, which is checked from
the files' headers before anything is copied. Packed weights keep their form. Each refusal is a one-line
``ModelLoadError``.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from backend_engine.checkpoint.kv_scales import find_kv_scales
from backend_engine.checkpoint.stored_weights import StoredWeights, missing
from backend_engine.errors import ModelLoadError
from backend_engine.models.weight_plan import Plan, plan
from backend_engine.models.weight_rules import Copy, LoadTarget, Rule
from backend_engine.quantization.packed import Packed, PackedPart
from backend_engine.quantization.quant_method import WeightedLayer
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.weight_scheme import WeightScheme

# Tensors done, tensors in all, name of the one just done.
Progress = Callable[[int, int, str], None]


def fill_weights(
    todo: Plan, stored: StoredWeights, targets: Mapping[str, LoadTarget], progress: Progress | None = None
) -> tuple[str, ...]:
    """Fill ``targets``, all that ``check_weights`` was given or some of them; plain tensors are converted to the
    target's dtype, packed ones give a layer its form. Those that one of the checkpoint's tensors fills together are
    best given together, since it is read each time.

    Returns the tensors that hold NaN, in the order read: a model with such weights is loaded, but what it says is worth
    little.
    """
    wanted = {name: [copy for copy in copies if copy.parameter in targets] for name, copies in todo.copies.items()}
    chosen = {name: copies for name, copies in wanted.items() if copies}
    _choose_forms(chosen, stored, targets)
    with_nan: list[str] = []
    # Duplicates last: what they must equal has been filled by then.
    duplicates = {name: parameter for name, parameter in todo.duplicates.items() if parameter in targets}
    names = [*chosen, *(name for name in duplicates if name in stored)]
    for done, name in enumerate(names, start=1):
        if name in chosen:
            with_nan += _fill_from(chosen[name], stored, targets)
        else:
            _compare(stored, name, duplicates[name], targets)
        if progress is not None:
            progress(done, len(names), name)
    return tuple(with_nan)


def check_weights(stored: StoredWeights, targets: Mapping[str, LoadTarget], rules: Sequence[Rule], where: str) -> Plan:
    """Compare what the model needs with what the files' headers say; reads no weight. Returns how to fill it."""
    todo = plan(rules, targets, stored)
    all_copies = [copy for copies in todo.copies.values() for copy in copies]
    absent = [copy for copy in all_copies if copy.source.name not in stored]
    if absent:
        raise missing(list(dict.fromkeys(copy.source.name for copy in absent)), absent[0].parameter, where)
    layers = {name.split(".")[1] for name in targets if name.startswith("layers.")}
    scales = find_kv_scales(stored.files)
    used = {name for layer, names in scales.items() if str(layer) in layers for name in names}
    for copy in all_copies:
        stored.check(copy)
        used.update(stored.tensors_of(copy))
    for name in stored.files:
        is_expected = name in used or name in todo.duplicates or stored.is_empty_bias(name)
        if not is_expected and not any(pattern.fullmatch(name) for pattern in todo.ignored):
            shape = list(stored.files.describe(name).shape)
            raise ModelLoadError(
                f"{stored.files.file_of(name)}: tensor {name}, shape {shape}, has no place in the model that "
                f"{stored.origin} describes"
            )
    return todo


def _choose_forms(sources: Mapping[str, list[Copy]], stored: StoredWeights, targets: Mapping[str, LoadTarget]) -> None:
    """Tell every layer how its weight is kept: plain if all of its sources are, else part by part."""
    by_parameter: dict[str, list[Copy]] = {}
    for copies in sources.values():
        for copy in copies:
            by_parameter.setdefault(copy.parameter, []).append(copy)
    for parameter, copies in by_parameter.items():
        layer = targets[parameter].layer
        if layer is None or (layer.weight is not None and not layer.quant.gives_way):
            continue
        copies.sort(key=lambda copy: copy.start)
        schemes = [_scheme(copy, stored) for copy in copies]
        if any(schemes):
            plain = Plain(layer.options.dtype)
            layer.store_as(Packed([scheme or plain for scheme in schemes], [copy.rows for copy in copies]))
        elif layer.weight is None:
            layer.store_as(layer.quant.for_plain_weights())


def _scheme(copy: Copy, stored: StoredWeights) -> WeightScheme | None:
    packing = stored.format_of(copy.source.name)
    return None if packing is None else packing.scheme


def _fill_from(copies: Sequence[Copy], stored: StoredWeights, targets: Mapping[str, LoadTarget]) -> list[str]:
    """Read one source and fill all that is made of it. Returns its name if it holds NaN."""
    name = copies[0].source.name
    tensors = stored.read(copies[0])
    packing = stored.format_of(name)
    if packing is None:
        numbers = tensors
        (plain,) = tensors.values()
        for copy in copies:
            _fill_plain(targets[copy.parameter], copy, copy.pick(plain))
    else:
        numbers = stored.unpack(copies[0], tensors)
        for copy in copies:
            target = targets[copy.parameter]
            if target.layer is None or target.layer.packed_parts:
                _fill_packed(target, copy, numbers)
            else:
                _fill_decoded(target, copy, packing.scheme, numbers)
    with_nan = [name for tensor in numbers.values() if _has_nan(tensor)]
    for full_name, tensor in zip(stored.tensors_of(copies[0]), tensors.values(), strict=True):
        stored.files.release(full_name, tensor)
    return with_nan[:1]


def _fill_plain(target: LoadTarget, copy: Copy, rows: Tensor) -> None:
    layer = target.layer
    if layer is not None and layer.packed_parts:
        part = _part(layer, copy)
        rows_of_part = part.tensors["weight"]
        rows_of_part[copy.start - part.start : copy.start - part.start + copy.rows].copy_(rows)
        return
    if layer is not None and copy.rows == target.shape[0] and layer.quant.take(layer, rows):
        return
    tensor = target.tensor if layer is None else layer.weight
    assert tensor is not None, copy.parameter
    tensor[copy.start : copy.start + copy.rows].copy_(rows)


def _fill_decoded(target: LoadTarget, copy: Copy, scheme: WeightScheme, components: Mapping[str, Tensor]) -> None:
    """Only the rows of ``copy`` are decoded: a source may hold those of many experts."""
    described = scheme.components(target.shape[1])
    rows = {name: copy.pick_packed(part) if described[name].per_row else part for name, part in components.items()}
    _fill_plain(target, copy, scheme.decode(rows))


def _fill_packed(target: LoadTarget, copy: Copy, components: Mapping[str, Tensor]) -> None:
    assert target.layer is not None, f"{copy.parameter} cannot be packed"
    part = _part(target.layer, copy)
    described = part.scheme.components(target.shape[1])
    for name, component in described.items():
        if component.per_row:
            first = copy.start - part.start
            part.tensors[name][first : first + copy.rows].copy_(copy.pick_packed(components[name]))
        else:
            part.tensors[name].copy_(components[name])


def _part(layer: WeightedLayer, copy: Copy) -> PackedPart:
    """The part that holds the rows of ``copy``."""
    return next(part for part in layer.packed_parts if part.start <= copy.start < part.start + part.num_rows)


def _has_nan(tensor: Tensor) -> bool:
    # A sum is NaN if a value is (or if infinities of both signs meet, which the second look tells apart). Eight-bit
    # floats cannot be summed up.
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return False
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _compare(stored: StoredWeights, name: str, parameter: str, targets: Mapping[str, LoadTarget]) -> None:
    """Refuse a tensor that differs from the parameter that it is a copy of."""
    target = targets[parameter]
    expected = target.tensor if target.layer is None else target.layer.weight
    found = stored.files.read(name)
    if expected is None or found.shape != expected.shape or not torch.equal(found.to(expected), expected):
        raise ModelLoadError(
            f"{stored.files.file_of(name)}: tensor {name} differs from the tensor of parameter {parameter}, but "
            "config.json says that they are tied; set tie_word_embeddings to false if they are meant to differ"
        )
