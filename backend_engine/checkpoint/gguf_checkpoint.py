"""``open_gguf``: a GGUF file, or the parts of one, as a checkpoint in Hugging Face's terms.

Called by ``open_checkpoint.py``. The header is read and checked at once, tensors when they are loaded.
"""

from pathlib import Path
from typing import Any

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.gguf_config import hf_config
from backend_engine.checkpoint.gguf_files import GgufFiles
from backend_engine.checkpoint.gguf_keys import ModelKeys, shortest
from backend_engine.checkpoint.gguf_names import hf_tensors
from backend_engine.checkpoint.tensor_reader import MadeTensors
from backend_engine.config.gguf_metadata import GgufHeader

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def open_gguf(path: Path) -> Checkpoint:
    """``path``: the file; of a split one, any part. Raises ``ModelLoadError`` (one line: file, and what was expected)
    for a file that is damaged, of an architecture that is not known, or that says what the model cannot do.
    """
    files = GgufFiles(path)
    keys = ModelKeys(files.header)
    config = hf_config(keys, files)
    tensors = hf_tensors(keys.architecture, files, config)
    return Checkpoint(
        path,
        "gguf",
        config,
        lambda: [MadeTensors(path, tensors)],
        generation=_generation(files.header, config["vocab_size"]),
        origin="metadata",
    )


def _generation(header: GgufHeader, vocab_size: int) -> dict[str, Any]:
    """What generation_config.json would say: ids that end a text, and the sampling that the file recommends."""
    stated = (header.get(f"tokenizer.ggml.{name}") for name in _END_IDS)
    ids = [value for value in stated if type(value) is int and 0 <= value < vocab_size]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ids))} if ids else {}
    sampling = {name: header.get(key) for name, key in _SAMPLING.items() if key in header}
    for name, value in sampling.items():
        found[name] = shortest(value) if isinstance(value, float) else value
    if sampling:
        found["do_sample"] = True
    return found
