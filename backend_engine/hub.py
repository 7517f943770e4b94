"""``local_path``: where a model lies that is named by its id on the Hugging Face Hub; fetched if it is not here yet.

Called by the front doors with what a user gave as a model or a tokenizer. Talks to the Hub through ``huggingface_hub``,
which keeps files in its own cache, shows progress and honours its environment (``HF_HUB_OFFLINE``, ``HF_TOKEN``).
"""

import itertools
import re
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]

from backend_engine.errors import ModelLoadError
from backend_engine.logger import get_logger

_logger = get_logger(__name__)

# ``owner/name``, and perhaps one file of it.
_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[\w.-]+\.gguf))?")
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_WEIGHT_FILES = ("*.safetensors", "*.bin")
# Subfolders hold the same weights in other forms.
_ELSEWHERE = ["*/*"]


def local_path(model: str) -> str:
    """``model`` itself if it is a path that exists or is not spelled like an id: ``owner/name``, or
    ``owner/name/file.gguf``. Raises ``ModelLoadError`` (one line) when the Hub has no such model or does not answer.
    """
    match = _ID.fullmatch(model)
    if match is None or Path(model).exists():
        return model
    repo, file = match["repo"], match["file"]
    try:
        if file is not None:
            return hf_hub_download(repo, file)
        return snapshot_download(repo, allow_patterns=_wanted(repo), ignore_patterns=_ELSEWHERE)
    except (HTTPError, HFValidationError, OSError) as error:
        raise _refusal(model, error) from None


def _wanted(repo: str) -> list[str]:
    """Patterns of the files to fetch, of weights one kind only. When nobody answers, the cache's folder has to do, with
    whatever weights were fetched into it.
    """
    try:
        siblings = HfApi().model_info(repo).siblings or []
    except HfHubHTTPError:
        raise  # an answer
    except (HTTPError, ConnectionError):
        return [*_TEXT_FILES]
    _logger.info("fetching %s from the Hugging Face Hub", repo)
    files = [Path(sibling.rfilename) for sibling in siblings if "/" not in sibling.rfilename]
    kinds = (pattern for pattern in _WEIGHT_FILES if any(file.match(pattern) for file in files))
    return [*_TEXT_FILES, *itertools.islice(kinds, 1)]


def _refusal(model: str, error: Exception) -> ModelLoadError:
    reason = " ".join(str(error).split())[:300]
    return ModelLoadError(
        f"model {model!r} is no path that exists, and could not be fetched from the Hugging Face Hub "
        f"({type(error).__name__}: {reason})"
    )
