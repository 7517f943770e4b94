"""``ModelSource``: where a model comes from, as its backend is handed it. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSource:
    """The folder or file, its configuration in Hugging Face's terms and what it was found in, the model class that it
    names, and whether code in the folder may run.
    """

    model_dir: Path
    config: Mapping[str, Any]
    architecture: str
    trust_remote_code: bool = False
    origin: str = "config.json"

    @property
    def where(self) -> str:
        """What messages about the configuration begin with."""
        return f"{self.origin} of {self.model_dir}"
