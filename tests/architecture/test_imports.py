"""The import law: who may import whom, as a table. Breaking it is a red test, not an opinion."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "backend_engine"

GROUND = {"errors", "envs", "logger", "plugins"}
NOUNS = GROUND | {"config", "core"}
DEVICE = {"ops", "attention", "quantization", "layers", "models"}

# room -> rooms it may import (itself included implicitly)
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "envs": {"errors"},
    "hub": {"errors", "logger"},
    "logger": {"envs", "errors"},
    "plugins": {"errors", "envs", "logger"},
    "config": GROUND,
    "core": NOUNS,
    "scheduler": NOUNS,
    "kv_cache": NOUNS,
    "kv_cache.kv_pool": NOUNS | {"ops.huge_pages"},
    "text": NOUNS,
    "ops": NOUNS,
    "attention": NOUNS | {"ops"},
    "quantization": NOUNS | {"ops"},
    "layers": NOUNS | {"ops", "attention", "quantization"},
    "models": NOUNS | {"ops", "attention", "quantization", "layers"},
    "checkpoint": NOUNS | {"models.weight_rules", "models.weight_plan", "quantization"},
    "decoder": NOUNS | {"ops"},
    "model_engine": NOUNS | DEVICE | {"checkpoint", "kv_cache.kv_pool"},
    "builder": NOUNS | DEVICE | {"checkpoint", "model_engine", "text"},
    "post_training": NOUNS | DEVICE | {"builder", "checkpoint", "model_engine", "text", "kv_cache.kv_pool"},
    "executor": NOUNS,
    "executor.build": NOUNS
    | DEVICE
    | {"scheduler", "kv_cache", "checkpoint", "decoder", "model_engine", "text", "admission"},
    "admission": NOUNS | {"text"},
    "results": NOUNS | {"text"},
    "llm": NOUNS | {"text", "executor", "admission", "results", "hub", "builder"},
    "triton_io": NOUNS | {"text", "llm", "admission", "executor.iteration_stats", "executor.histogram"},
}
NO_TORCH = (
    "core",
    "config",
    "plugins",
    "scheduler",
    "text",
    "triton_io",
    "kv_cache",
    "executor",
    "admission",
    "results",
)
TORCH_ALLOWED = {"kv_cache.kv_pool", "executor.build"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def allowed_for(module: str) -> set[str]:
    return ALLOWED[module] if module in ALLOWED else ALLOWED[module.split(".")[0]]


def violations(module: str, names: list[str]) -> list[str]:
    room = module.split(".")[0]
    allowed = allowed_for(module)
    bad = []
    for name in names:
        if not name.startswith("backend_engine."):
            continue
        target = name.removeprefix("backend_engine.")
        if target.split(".")[0] == room:
            continue
        if not any(target == ok or target.startswith(ok + ".") for ok in allowed):
            bad.append(target)
    return bad


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    module = dotted(path)
    assert not violations(module, imported(path)), f"{module} may import {sorted(allowed_for(module))}"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_torch_stays_in_the_device_wing(path: Path) -> None:
    module = dotted(path)
    if module.split(".")[0] not in NO_TORCH or module in TORCH_ALLOWED:
        return
    assert not [name for name in imported(path) if name.split(".")[0] == "torch"]


def test_tritons_own_module_is_imported_at_the_porch_only() -> None:
    for path in modules():
        if dotted(path).split(".")[0] != "triton_io":
            assert not [name for name in imported(path) if name.startswith("triton_python_backend_utils")], path


def test_the_law_itself_catches_a_breach() -> None:
    assert violations("scheduler.x", ["backend_engine.kv_cache.block_pool.BlockPool"]) == [
        "kv_cache.block_pool.BlockPool"
    ]
    assert violations("checkpoint.loader", ["backend_engine.models.causal_lm.CausalLM"]) == [
        "models.causal_lm.CausalLM"
    ]
    assert not violations("checkpoint.loader", ["backend_engine.models.weight_rules.Rename"])
    assert violations("executor.py_executor", ["backend_engine.scheduler.request_scheduler.RequestScheduler"])
