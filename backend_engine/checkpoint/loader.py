"""Loading weights: a stream of checkpoint tensors, through the family's rules, into parameters.

Used while a model is built. Strict: every tensor is used once and every parameter filled once, which is
checked from the files' headers before anything is copied. Each refusal is a one-line ``ModelLoadError``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backend_engine.checkpoint.hf_folder import INDEX_FILE, weight_files
from backend_engine.checkpoint.safetensors_reader import SafetensorsReader
from backend_engine.errors import ModelLoadError
from backend_engine.models.weight_plan import Plan, plan
from backend_engine.models.weight_rules import Copy, LoadTarget, Rule, Source

# Tensors done, tensors in all, name of the one just done.
Progress = Callable[[int, int, str], None]


def load_weights(
    model_dir: str | os.PathLike[str],
    targets: Mapping[str, LoadTarget],
    rules: Sequence[Rule],
    progress: Progress | None = None,
) -> list[str]:
    """Fill every target from the folder's safetensors files, converting to the target's dtype and device.

    Returns the checkpoint tensors that hold NaN, in the order read: a model with such weights is loaded, but what it
    says is worth little.
    """
    readers = _open(weight_files(model_dir))
    todo = plan(rules, targets, readers)
    _check(todo, readers, model_dir)
    faulty = []
    # Duplicates last: what they must equal has been filled by then.
    names = sorted(readers, key=lambda name: name in todo.duplicates)
    for done, name in enumerate(names, start=1):
        if name in todo.copies:
            tensor = readers[name].read(name)
            if _has_nan(tensor):
                faulty.append(name)
            for copy in todo.copies[name]:
                others = (readers[source.name].read(source.name) for source in copy.sources[1:])
                _fill(targets[copy.parameter].tensor, copy, (tensor, *others))
        elif name in todo.duplicates:
            _compare(readers[name], name, todo.duplicates[name], targets)
        if progress is not None:
            progress(done, len(names), name)
    return faulty


def _open(files: Mapping[Path, frozenset[str] | None]) -> dict[str, SafetensorsReader]:
    """The file of each tensor, files checked against the index."""
    readers: dict[str, SafetensorsReader] = {}
    for path, listed in files.items():
        reader = SafetensorsReader(path)
        names = reader.names()
        for name in names:
            if name in readers:
                raise ModelLoadError(f"tensor {name} is in two files, {readers[name].path.name} and {path.name}")
            readers[name] = reader
        absent = sorted(listed - set(names)) if listed is not None else []
        if absent:
            raise ModelLoadError(f"{path} does not hold {_list(absent)}, which {INDEX_FILE} lists for it")
    return readers


def _list(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return f"tensor {names[0]}" + (f" (nor {len(names) - 1} more)" if len(names) > 1 else "")


def _check(todo: Plan, readers: Mapping[str, SafetensorsReader], model_dir: str | os.PathLike[str]) -> None:
    """Compare what the model needs with what the files' headers say."""
    all_copies = [copy for copies in todo.copies.values() for copy in copies]
    needed = {source.name: (source, copy) for copy in all_copies for source in copy.sources}
    missing = [name for name in needed if name not in readers]
    if missing:
        parameter = needed[missing[0]][1].parameter
        raise ModelLoadError(
            f"checkpoint {model_dir} does not hold {_list(missing)}, which parameter {parameter} needs"
        )
    for name, reader in readers.items():
        if name in needed:
            _check_source(needed[name][0], reader)
        elif name not in todo.duplicates and not any(pattern.fullmatch(name) for pattern in todo.ignored):
            shape, _ = reader.describe(name)
            raise ModelLoadError(
                f"{reader.path.name}: tensor {name}, shape {list(shape)}, has no place in the model that config.json "
                "describes"
            )


def _check_source(source: Source, reader: SafetensorsReader) -> None:
    shape, dtype = reader.describe(source.name)
    where = f"{reader.path.name}: tensor {source.name}"
    if shape != source.shape:
        raise ModelLoadError(f"{where} has shape {list(shape)}; config.json asks for {list(source.shape)}")
    if dtype not in source.dtypes:
        raise ModelLoadError(f"{where} has dtype {dtype}; expected one of {', '.join(source.dtypes)}")


def _has_nan(tensor: Tensor) -> bool:
    # A sum is NaN if a value is (or if infinities of both signs meet, which the second look tells apart).
    return tensor.is_floating_point() and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _fill(target: Tensor, copy: Copy, tensors: Sequence[Tensor]) -> None:
    target[copy.start : copy.start + copy.rows].copy_(copy.pick(*tensors))


def _compare(reader: SafetensorsReader, name: str, parameter: str, targets: Mapping[str, LoadTarget]) -> None:
    expected = targets[parameter].tensor
    found = reader.read(name)
    if found.shape != expected.shape or not torch.equal(found.to(expected), expected):
        raise ModelLoadError(
            f"{reader.path.name}: tensor {name} differs from the tensor of parameter {parameter}, but config.json "
            "says that they are tied; set tie_word_embeddings to false if they are meant to differ"
        )
