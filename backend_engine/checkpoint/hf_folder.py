"""A Hugging Face model folder as a ``Checkpoint``: its JSON files, and which files hold the weights.

Called by ``open_checkpoint.py``. Reads no tensor; every fault of the folder is a one-line ``ModelLoadError`` that names
the file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.config.regular_files import read_regular
from backend_engine.errors import ModelLoadError, shown
from backend_engine.plugins.catalog import TENSOR_READERS

if TYPE_CHECKING:  # readers need torch, which whoever only reads configurations does without
    from backend_engine.checkpoint.tensor_reader import TensorReader

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_MAX_JSON = 1 << 26
_MAX_NAME_BYTES = 255
_MAX_TENSOR_CHARS = 500
# Older exports keep the quantization config in a file of its own; by the method that it is of.
_CONFIGS_APART = {
    "modelopt": "hf_quant_config.json",
    "gptq": "quantize_config.json",
    "awq": "quant_config.json",
}


class WeightNames(NamedTuple):
    """How files of weights are called: one file, or the index of several."""

    single: str
    of_index: str


SAFETENSORS = WeightNames("model.safetensors", "model.safetensors.index.json")
TORCH = WeightNames("pytorch_model.bin", "pytorch_model.bin.index.json")


def _folder(model_dir: str | os.PathLike[str]) -> Path:
    folder = Path(model_dir)
    if not folder.exists():
        raise ModelLoadError(f"model folder {folder} does not exist; expected a Hugging Face model folder")
    if not folder.is_dir():
        raise ModelLoadError(
            f"model folder {folder} is not a folder; expected a Hugging Face model folder, or a file named .gguf or "
            ".nemo"
        )
    return folder


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, _MAX_JSON).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ModelLoadError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError:
        raise ModelLoadError(f"{path} holds an integer of thousands of digits; expected numbers of a model") from None
    except RecursionError:
        raise ModelLoadError(f"{path} holds values nested too deeply; expected a JSON object") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def read_hf_config(model_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of the folder as it is. Raises ``ModelLoadError``."""
    folder = _folder(model_dir)
    path = folder / CONFIG_FILE
    if not path.exists():
        if not any(folder.iterdir()):
            raise ModelLoadError(f"model folder {folder} is empty; expected config.json and {SAFETENSORS.single}")
        raise ModelLoadError(f"model folder {folder} has no config.json; expected a Hugging Face model folder")
    return _read_object(path)


def architecture(config: Mapping[str, Any], origin: str = CONFIG_FILE) -> str:
    """The model class that the configuration names. Raises ``ModelLoadError`` when it names none or several."""
    if "build_config" in config and "pretrained_config" in config:
        raise ModelLoadError(
            f"{origin} is that of an engine which TensorRT-LLM built for one GPU, and such engines are not read; give "
            "the checkpoint that it was built from"
        )
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"{origin}: architectures is {shown(names)}; expected a list of one model class name")
    return names[0]


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that config.json states for the weights, such as ``bfloat16``; ``None`` when it states none."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None


def open_hf_folder(model_dir: str | os.PathLike[str]) -> Checkpoint:
    """The folder's configuration, and its weights once somebody asks for them."""
    folder = _folder(model_dir)
    config = read_hf_config(folder)
    if config.get("quantization_config") is None:
        apart = next(((m, folder / file) for m, file in _CONFIGS_APART.items() if (folder / file).exists()), None)
        if apart is not None:
            method, path = apart
            config = {**config, "quantization_config": {"quant_method": method, **_read_object(path)}}
    generation = folder / GENERATION_FILE
    return Checkpoint(
        folder,
        "hugging_face",
        config,
        lambda: _open_readers(folder),
        _read_object(generation) if generation.exists() else None,
    )


def _open_readers(folder: Path) -> "list[TensorReader]":
    files = weight_files(folder)
    readers: list[TensorReader] = [TENSOR_READERS.get(path.suffix)(path) for path in files]
    for reader, listed in zip(readers, files.values(), strict=True):
        absent = sorted((listed or frozenset()) - set(reader.names()))
        if absent:
            more = f" (nor {len(absent) - 1} more)" if len(absent) > 1 else ""
            index = SAFETENSORS.of_index if reader.path.suffix == ".safetensors" else TORCH.of_index
            raise ModelLoadError(f"{reader.path} does not hold tensor {absent[0]}{more}, which {index} lists for it")
    return readers


def weight_files(model_dir: str | os.PathLike[str]) -> dict[Path, frozenset[str] | None]:
    """The files with weights, sorted, each with the tensors its index lists for it (``None`` without an index).

    Safetensors files come first; only a folder without any is read from PyTorch's own.
    """
    folder = _folder(model_dir)
    for names in (SAFETENSORS, TORCH):
        if (folder / names.single).exists():
            return {folder / names.single: None}
        if (folder / names.of_index).exists():
            return _indexed_files(folder / names.of_index)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    hint = f"; {others[0]} has none of these names" if others else ""
    expected = ", ".join((*SAFETENSORS, *TORCH))
    raise ModelLoadError(f"model folder {folder} has no weights: expected one of {expected}{hint}")


def _indexed_files(index_path: Path) -> dict[Path, frozenset[str] | None]:
    weight_map = _read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index_path}: weight_map is missing or empty; expected an object of tensor: file")
    files: dict[Path, set[str]] = {}
    for tensor, file in weight_map.items():
        if not tensor.isprintable() or len(tensor) > _MAX_TENSOR_CHARS:
            raise ModelLoadError(
                f"{index_path}: weight_map has the tensor {shown(tensor)}; expected printable characters"
            )
        if not isinstance(file, str) or not _is_name(file) or Path(file).suffix not in TENSOR_READERS:
            endings = " or ".join(TENSOR_READERS.names())
            raise ModelLoadError(
                f"{index_path}: weight_map gives {tensor} the file {shown(file)}; expected a file name that ends in "
                f"{endings}"
            )
        files.setdefault(index_path.parent / file, set()).add(tensor)
    for path in files:
        if not path.exists():
            raise ModelLoadError(
                f"{path} does not exist, but {index_path.name} lists it with {len(files[path])} tensors"
            )
    return {path: frozenset(files[path]) for path in sorted(files)}


def _is_name(text: str) -> bool:
    """Whether a file of the folder may be called that."""
    return text.isprintable() and len(text.encode()) <= _MAX_NAME_BYTES and Path(text).name == text
