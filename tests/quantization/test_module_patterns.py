"""Lists of modules: names, ends of names, wildcards and regular expressions, each up to the borders of a module."""

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.module_patterns import ModulePatterns

MODULE = "model.layers.10.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        MODULE,
        "gate_proj",
        "3.gate_proj",
        "mlp.experts",
        "model",
        "model.layers.10",
        "model.layers.*",
        "model.layers.1*",
        "model.layers.1?.mlp",
        "layers.*.gate_proj",
        "*",
        "*.gate_proj",
        r"re:model\.layers\.10",
        "re:.*gate_proj$",
    ],
)
def test_a_pattern_is_for_a_module(pattern: str) -> None:
    assert MODULE in ModulePatterns((pattern,))
    assert MODULE in ModulePatterns(("lm_head", pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        "gate",
        "model.layers.1",
        "odel.layers",
        "ayers.*.gate_proj",
        "*.gate",
        "model.layers.1?.ml",
        "re:gate_proj",
        r"re:model\.layers\.10$",
        "lm_head",
        "",
    ],
)
def test_a_pattern_is_not_for_a_module(pattern: str) -> None:
    assert MODULE not in ModulePatterns((pattern,))
    assert MODULE not in ModulePatterns()


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "1", "10"]), min_size=1, max_size=4).map(".".join)


@given(PARTS, st.lists(st.sampled_from(["a", "b", "*", "?", ".", "1"]), min_size=1, max_size=5).map("".join))
def test_a_pattern_is_for_what_a_shell_matches_and_what_lies_in_it(module: str, pattern: str) -> None:
    parts = module.split(".")
    runs = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    assert (module in ModulePatterns((pattern,))) == any(fnmatchcase(run, pattern) for run in runs)


def test_a_pattern_with_signs_of_regular_expressions_is_a_name() -> None:
    assert "a.b" not in ModulePatterns(("a+", "(a)", "a|b.c", "b{1}", "[ab]", "[ab]*"))
    assert "a+.b" in ModulePatterns(("a+",))


@pytest.mark.parametrize("value", ["lm_head", ["re:("], [1], {"a": 1}])
def test_anything_but_a_list_of_patterns_is_refused(value: object) -> None:
    allowed = "expected a list of names of modules, or of regular expressions behind 're:'"
    with pytest.raises(ModelLoadError, match=re.escape(f"x: ignore is {value!r}; {allowed}")):
        ModulePatterns.read(HfConfig({"ignore": value}, "x"), "ignore")


def test_no_list_is_an_empty_one() -> None:
    assert ModulePatterns.read(HfConfig({"ignore": None}), "ignore") == ModulePatterns(())
