"""What a checkpoint says about generating: tokens that end a text, and the sampling that it recommends.

Called by the composition root and by preprocessing, with a checkpoint in any format. Reads no tensor.
"""

from typing import Any, NamedTuple

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import GENERATION_FILE
from backend_engine.config.sampling_defaults import SamplingDefaults
from backend_engine.errors import ModelLoadError


class GenerationDefaults(NamedTuple):
    """``end_ids``: every token id that ends a text, in the order found. ``pad_id``: ``None`` when not stated."""

    end_ids: tuple[int, ...]
    pad_id: int | None


def generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """End ids and pad id: those of generation_config.json, where it states none those of config.json.

    There its ``text_config``, which models that also see or hear have, comes last.
    """
    config, generation = checkpoint.config, checkpoint.generation
    sources = [(checkpoint.origin, config)]
    if isinstance(config.get("text_config"), dict):
        sources.append((f"{checkpoint.origin}: text_config", config["text_config"]))
    if generation:
        sources.insert(0, (GENERATION_FILE, generation))
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    for name, values in sources:
        end_ids = end_ids or _ids(name, "eos_token_id", values.get("eos_token_id"))
        pads = _ids(name, "pad_token_id", values.get("pad_token_id"))
        if pad_id is None and pads:
            pad_id = pads[0]
    return GenerationDefaults(end_ids, pad_id)


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """What generation_config.json recommends. Raises ``ModelLoadError`` when it is missing or out of range."""
    if checkpoint.generation is None:
        raise ModelLoadError(
            f"model {checkpoint.path} has no {GENERATION_FILE}, and generation_config is model; expected the file, "
            "or generation_config ignore"
        )
    return SamplingDefaults.of(checkpoint.generation, str(checkpoint.path / GENERATION_FILE))


def _ids(file: str, key: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelLoadError(f"{file}: {key} is {value!r}; expected an integer or a list of integers")
    return tuple(dict.fromkeys(ids))
