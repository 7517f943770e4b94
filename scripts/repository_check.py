"""Says whether a model repository was filled for an earlier generation of the models.

``triton_server`` asks before it starts a server: our models complete such configs themselves, which Triton Server
allows them only at the price of starting each model's process twice.
"""

from pathlib import Path

# A tensor that only our own templates declare, by model.
_MARKS = {"tensorrt_llm": "piece_group", "preprocessing": "RETURN_ERRORS_IN_BAND", "postprocessing": "ERROR_CODE"}


def needs_completion(repository: Path) -> bool:
    """True when the config of one of our models lacks a tensor that our templates declare."""
    for model, mark in _MARKS.items():
        config = repository / model / "config.pbtxt"
        if config.is_file() and f'"{mark}"' not in config.read_text(errors="replace"):
            return True
    return False
