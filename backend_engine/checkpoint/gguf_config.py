"""GGUF metadata as the config.json that Hugging Face has for the same model.

Used by ``gguf_checkpoint.py``. What each architecture's keys mean is in ``gguf_families.py``; every key that might mean
something else is refused.
"""

from backend_engine.checkpoint.gguf_decoder_config import Config, GgufModel
from backend_engine.checkpoint.gguf_families import ARCHITECTURES, VARIANTS
from backend_engine.checkpoint.gguf_files import GgufFiles
from backend_engine.checkpoint.gguf_keys import ModelKeys
from backend_engine.errors import ModelLoadError, shown

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_SIGMOID = 2


def hf_config(keys: ModelKeys, files: GgufFiles) -> Config:
    """config.json of the model. Raises ``ModelLoadError`` that names file, key and what is allowed."""
    architecture = keys.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"{files.path}: general.architecture is {shown(architecture)}; expected one of {known}")
    _check_size(keys, files)
    if architecture == "llama" and keys.count("expert_count", 0, low=0):
        architecture = "mixtral"
    elif architecture == "deepseek2" and keys.get("expert_gating_func") == _SIGMOID:
        architecture = "deepseek3"
    class_name, model_type, build = {**ARCHITECTURES, **VARIANTS}[architecture]
    config = build(GgufModel(keys, files))
    keys.check_rest()
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": files.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in files.tensors,
        **config,
        **_token_ids(files),
        "quantization_config": {"quant_method": "gguf"},
    }


def _check_size(keys: ModelKeys, files: GgufFiles) -> None:
    """A number of layers that the file cannot have would cost memory before anybody missed their tensors."""
    if EMBEDDING not in files.tensors or len(files.tensors[EMBEDDING].shape) != 2:
        raise ModelLoadError(
            f"{files.path} does not hold tensor {EMBEDDING} of two dimensions; expected a language model"
        )
    if keys.count("block_count") > len(files.tensors):
        raise keys.refuse("block_count", f"at most the number of tensors, {len(files.tensors)}")


def _token_ids(files: GgufFiles) -> Config:
    """The ids of special tokens; one that is no token's (as some converters write for none) is left out."""
    found: Config = {}
    for key, name in _IDS.items():
        full = f"tokenizer.ggml.{name}"
        if full in files.header:
            value = files.header.get(full)
            if isinstance(value, bool) or not isinstance(value, int):
                raise files.header.refuse(full, "an integer")
            if 0 <= value < files.tensors[EMBEDDING].shape[0]:
                found[key] = value
    return found
