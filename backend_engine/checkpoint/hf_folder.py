"""A Hugging Face model folder: its JSON files and which safetensors files hold the weights.

Used by ``config/resolve.py``'s caller and by the weight loader. Reads no tensor; every fault of the folder is a
one-line ``ModelLoadError`` that names the file.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from backend_engine.config.sampling_defaults import SamplingDefaults
from backend_engine.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"


class GenerationDefaults(NamedTuple):
    """``end_ids``: every token id that ends a text, in the order found. ``pad_id``: ``None`` when not stated."""

    end_ids: tuple[int, ...]
    pad_id: int | None


def _folder(model_dir: str | os.PathLike[str]) -> Path:
    folder = Path(model_dir)
    if not folder.exists():
        raise ModelLoadError(f"model folder {folder} does not exist; expected a Hugging Face model folder")
    if not folder.is_dir():
        raise ModelLoadError(f"model folder {folder} is not a folder; expected a Hugging Face model folder")
    return folder


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelLoadError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def read_hf_config(model_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of the folder as it is. Raises ``ModelLoadError``."""
    folder = _folder(model_dir)
    path = folder / "config.json"
    if not path.exists():
        if not any(folder.iterdir()):
            raise ModelLoadError(f"model folder {folder} is empty; expected config.json and {SINGLE_FILE}")
        raise ModelLoadError(f"model folder {folder} has no config.json; expected a Hugging Face model folder")
    return _read_object(path)


def read_generation_config(model_dir: str | os.PathLike[str]) -> GenerationDefaults:
    """End ids and pad id: those of generation_config.json, where it states none those of config.json.

    There its ``text_config``, which models that also see or hear have, comes last.
    """
    folder = _folder(model_dir)
    config = read_hf_config(folder)
    sources = [("config.json", config)]
    if isinstance(config.get("text_config"), dict):
        sources.append(("config.json: text_config", config["text_config"]))
    generation = folder / GENERATION_FILE
    if generation.exists():
        sources.insert(0, (generation.name, _read_object(generation)))
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    for name, values in sources:
        end_ids = end_ids or _ids(name, "eos_token_id", values.get("eos_token_id"))
        pads = _ids(name, "pad_token_id", values.get("pad_token_id"))
        if pad_id is None and pads:
            pad_id = pads[0]
    return GenerationDefaults(end_ids, pad_id)


def read_sampling_defaults(model_dir: str | os.PathLike[str]) -> SamplingDefaults:
    """What generation_config.json recommends. Raises ``ModelLoadError`` when it is missing or out of range."""
    path = _folder(model_dir) / GENERATION_FILE
    if not path.exists():
        raise ModelLoadError(
            f"model folder {path.parent} has no {GENERATION_FILE}, and generation_config is model; expected the file, "
            "or generation_config ignore"
        )
    return SamplingDefaults.of(_read_object(path), str(path))


def _ids(file: str, key: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelLoadError(f"{file}: {key} is {value!r}; expected an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def architecture(config: dict[str, Any]) -> str:
    """The model class that config.json names. Raises ``ModelLoadError`` when it names none or several."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"config.json: architectures is {names!r}; expected a list of one model class name")
    return names[0]


def stated_dtype(config: dict[str, Any]) -> str | None:
    """The dtype that config.json states for the weights, such as ``bfloat16``; ``None`` when it states none."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None


def weight_files(model_dir: str | os.PathLike[str]) -> dict[Path, frozenset[str] | None]:
    """The safetensors files, sorted, each with the tensors its index lists for it (``None`` without an index)."""
    folder = _folder(model_dir)
    single = folder / SINGLE_FILE
    if single.exists():
        return {single: None}
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {others[0]} is of a kind that is not read" if others else ""
        raise ModelLoadError(f"model folder {folder} has no weights: expected {SINGLE_FILE} or {INDEX_FILE}{hint}")
    weight_map = _read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index_path}: weight_map is missing or empty; expected an object of tensor: file")
    files: dict[Path, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{index_path}: weight_map gives {tensor} the file {file!r}; expected a file name")
        files.setdefault(folder / file, set()).add(tensor)
    for path in files:
        if not path.exists():
            raise ModelLoadError(f"{path} does not exist, but {INDEX_FILE} lists it with {len(files[path])} tensors")
    return {path: frozenset(files[path]) for path in sorted(files)}
