"""``ModelSource``: where a model comes from, as its backend is handed it. Data only."""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSource:
    """The folder, its config.json as a dict, the model class that it names, and whether code in the folder may run."""

    model_dir: str | os.PathLike[str]
    config: dict[str, Any]
    architecture: str
    trust_remote_code: bool = False
