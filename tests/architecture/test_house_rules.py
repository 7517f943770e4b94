"""House rules that a machine can check: sizes, docstrings, borders, and nothing that is left for later."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "backend_engine").rglob("*.py"))
ADAPTERS = sorted((ROOT / "model_repository").rglob("model.py"))
EVERYTHING = [
    p for d in ("backend_engine", "model_repository", "scripts", "tests", "examples") for p in (ROOT / d).rglob("*.py")
]
ADAPTER_BUDGET = {"preprocessing": 80, "tensorrt_llm": 120, "postprocessing": 80, "tensorrt_llm_bls": 100}
# The borders: one place each where any exception is turned into an answer.
CATCH_ALL = {
    "backend_engine/executor/py_executor.py": "a step",
    "backend_engine/executor/outbox.py": "a sink",
    "backend_engine/plugins/foreign_code.py": "code of a plugin",
    "backend_engine/triton_io/response_stream.py": "a response that cannot be sent",
    "backend_engine/triton_io/bls_service.py": "one BLS request",
    "backend_engine/triton_io/piece_group.py": "a response that cannot be sent",
    "backend_engine/triton_io/piece_inbox.py": "one BLS request, in the thread that fetches for all",
    "backend_engine/triton_io/single_response.py": "one request of preprocessing or postprocessing",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_no_file_is_over_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", SOURCES + ADAPTERS, ids=name)
def test_functions_are_short_and_modules_say_what_they_are_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.read_text().strip():
        assert ast.get_docstring(tree), "a module opens with what it owns, who calls it and what it never does"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


@pytest.mark.parametrize("path", SOURCES + ADAPTERS, ids=name)
def test_exceptions_are_caught_by_name_but_at_the_borders(path: Path) -> None:
    if name(path) in CATCH_ALL or path in ADAPTERS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type
            assert caught is not None, f"line {node.lineno}: a bare except"
            names = [n.id for n in ast.walk(caught) if isinstance(n, ast.Name)]
            reraised = any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node))
            assert reraised or not {"Exception", "BaseException"} & set(names), f"line {node.lineno}: a catch-all"


@pytest.mark.parametrize("path", ADAPTERS, ids=name)
def test_adapters_are_thin(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= ADAPTER_BUDGET[path.parts[-3]]


def test_every_model_has_its_adapter() -> None:
    assert {path.parts[-3] for path in ADAPTERS} == set(ADAPTER_BUDGET)


def test_nothing_is_left_for_later_or_skipped() -> None:
    words = re.compile("TO" + "DO|FIX" + "ME|NotImpl" + r"ementedError|mark\.sk" + "ip\\b|xf" + "ail")
    found = [
        f"{name(path)}:{i}"
        for path in EVERYTHING
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not found
