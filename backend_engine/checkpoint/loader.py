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
from backend_engine.models.weight_rules import Copy, LoadTarget, Plan, Rule, plan

# Tensors done, tensors in all, name of the one just done.
Progress = Callable[[int, int, str], None]

_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")


def load_weights(
    model_dir: str | os.PathLike[str],
    targets: Mapping[str, LoadTarget],
    rules: Sequence[Rule],
    progress: Progress | None = None,
) -> None:
    """Fill every target from the folder's safetensors files, converting to the target's dtype and device."""
    todo = plan(rules, targets)
    readers = _open(weight_files(model_dir))
    _check(todo, readers, model_dir)
    # Duplicates last: what they must equal has been filled by then.
    names = sorted(readers, key=lambda name: name in todo.duplicates)
    for done, name in enumerate(names, start=1):
        if name in todo.copies:
            tensor = readers[name].read(name)
            for copy in todo.copies[name]:
                _fill(targets[copy.parameter].tensor, tensor, copy)
        elif name in todo.duplicates:
            _compare(readers[name], name, todo.duplicates[name], targets)
        if progress is not None:
            progress(done, len(names), name)


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
    missing = [name for name in todo.copies if name not in readers]
    if missing:
        parameter = todo.copies[missing[0]][0].parameter
        raise ModelLoadError(
            f"checkpoint {model_dir} does not hold {_list(missing)}, which parameter {parameter} needs"
        )
    for name, reader in readers.items():
        shape, dtype = reader.describe(name)
        where = f"{reader.path.name}: tensor {name}"
        if name in todo.copies:
            expected = todo.copies[name][0].shape
            if shape != expected:
                raise ModelLoadError(f"{where} has shape {list(shape)}; config.json asks for {list(expected)}")
            if dtype not in _FLOAT_DTYPES:
                raise ModelLoadError(f"{where} has dtype {dtype}; expected one of {', '.join(_FLOAT_DTYPES)}")
        elif name not in todo.duplicates and not any(pattern.fullmatch(name) for pattern in todo.ignored):
            raise ModelLoadError(f"{where}, shape {list(shape)}, has no place in the model that config.json describes")


def _fill(target: Tensor, source: Tensor, copy: Copy) -> None:
    if copy.is_transposed:
        source = source.T
    target[copy.start : copy.start + copy.rows].copy_(source[copy.source_start : copy.source_start + copy.rows])


def _compare(reader: SafetensorsReader, name: str, parameter: str, targets: Mapping[str, LoadTarget]) -> None:
    expected = targets[parameter].tensor
    found = reader.read(name)
    if found.shape != expected.shape or not torch.equal(found.to(expected), expected):
        raise ModelLoadError(
            f"{reader.path.name}: tensor {name} differs from the tensor of parameter {parameter}, but config.json "
            "says that they are tied; set tie_word_embeddings to false if they are meant to differ"
        )
