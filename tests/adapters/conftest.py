"""The fake ``triton_python_backend_utils``, and the adapters loaded with it."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.adapters import fake_pb_utils
from tests.adapters.porch import Porch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load_adapter(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import an adapter's model.py by the name of its model."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_pb_utils)

    def load(model: str) -> ModuleType:
        path = ROOT / "model_repository" / model / "1" / "model.py"
        spec = importlib.util.spec_from_file_location(f"adapter_{model}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def start_model(load_adapter: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """Load an adapter and initialize its model with these parameters."""

    def start(model: str, decoupled: bool = True, **parameters: str) -> Any:
        config = {
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
            "model_transaction_policy": {"decoupled": decoupled},
            "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        }
        instance = load_adapter(model).TritonPythonModel()
        instance.initialize({"model_config": json.dumps(config), "model_name": model, "model_version": "1"})
        return instance

    return start


@pytest.fixture
def porch() -> Iterator[Porch]:
    """Started and closed around the test."""
    made = Porch()
    made.thread.start()
    yield made
    made.thread.close()
