"""Weight schemes in engine folders: what is written is read again, and nothing else is."""

import importlib
import json
import math
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.quantization import schemes
from backend_engine.quantization.scheme_json import SCHEMES, scheme_from_json, scheme_to_json
from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
from backend_engine.quantization.schemes.float8 import Float8
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.schemes.inputs import FactoredInput, ReorderedInput, RoundedInput
from backend_engine.quantization.weight_scheme import WeightScheme
from tests.support.weight_schemes import schemes as any_scheme


@settings(max_examples=150, deadline=None)
@given(any_scheme())
def test_what_is_written_is_read_again(scheme: WeightScheme) -> None:
    text = json.dumps(scheme_to_json(scheme), allow_nan=False)
    found = scheme_from_json(json.loads(text), "engine.json")
    # ``repr`` tells -0.0 from 0.0.
    assert found == scheme and repr(found) == repr(scheme)


def test_every_scheme_has_a_name() -> None:
    def subclasses(parent: type[WeightScheme]) -> Iterator[type[WeightScheme]]:
        for child in parent.__subclasses__():
            yield child
            yield from subclasses(child)

    modules = [importlib.import_module(f"{schemes.__name__}.{m.name}") for m in pkgutil.iter_modules(schemes.__path__)]
    names = {module.__name__ for module in modules}
    found = {scheme for scheme in subclasses(WeightScheme) if scheme.__module__ in names}
    assert found == set(SCHEMES.values()) and len(found) == len(SCHEMES) >= 8


@dataclass(frozen=True)
class PluginScheme(WeightScheme):
    """Of a plugin."""

    bits: int = 3

    def components(self, in_features: int) -> dict[str, Any]:
        return {}

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.zeros(0)


@pytest.mark.parametrize("scheme", [PluginScheme(), FactoredInput(PluginScheme())])
def test_a_scheme_of_a_plugin_cannot_be_written(scheme: WeightScheme) -> None:
    with pytest.raises(ConfigError, match=r"^weight scheme PluginScheme cannot be written to an engine folder; only"):
        scheme_to_json(scheme)
    with pytest.raises(ValueError, match="PluginScheme does not say how it is cut"):
        PluginScheme().columns({}, 0, 1)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Float8(group_size=0), "Float8: group_size is 0; expected a whole number from 1 to 1048576, or null"),
        (GroupwiseInt(4, 32, scale_dtype=torch.float64), "GroupwiseInt: scale_dtype is 'float64'; expected one of "),
        (Codebook4((*E2M1[1:], math.nan), 16), r"Codebook4: values is \[.*\]; expected a list of 16 numbers"),
        (FactoredInput(FactoredInput(Float8())), "FactoredInput: weight.scheme is 'factored_input'; expected one of"),
    ],
)
def test_what_could_not_be_read_is_not_written(scheme: WeightScheme, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^weight scheme {message}.*; it cannot be written to an engine folder$"):
        scheme_to_json(scheme)


ROUNDED = scheme_to_json(RoundedInput(ReorderedInput(GroupwiseInt(4, 32)), "int8", is_static=False))
INT4 = ROUNDED["weight"]["weight"]
CODEBOOK = scheme_to_json(Codebook4(E2M1, 16, "e4m3", has_row_scale=True))


def rounded(**values: Any) -> dict[str, Any]:
    return {**ROUNDED, **values}


def float8(**values: Any) -> dict[str, Any]:
    return {"scheme": "float8", "dtype": "float8_e5m2", "group_size": None, **values}


def codebook(**values: Any) -> dict[str, Any]:
    return {**CODEBOOK, **values}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "scheme is None; expected an object that describes a weight scheme"),
        ([ROUNDED], "scheme is [{"),
        ({}, "scheme is None; expected one of groupwise_int, "),
        ({"scheme": "Float8"}, "scheme is 'Float8'; expected one of groupwise_int, "),
        ({"scheme": ["float8"]}, "scheme is ['float8']; expected one of "),
        ({"scheme": "float8"}, "dtype is missing; a scheme float8 has dtype, group_size"),
        (float8(dtype="float32"), "dtype is 'float32'; expected one of float8_e4m3fn, float8_e5m2"),
        (float8(group_size=True), "group_size is True; expected a whole number"),
        (float8(group_size=-1), "group_size is -1; expected a whole number"),
        (float8(group_size=1.0), "group_size is 1.0; expected a whole number"),
        (float8(dtype={}), "dtype is {}; expected one of float8_e4m3fn"),
        ({"scheme": "plain", "dtype": "int8"}, "dtype is 'int8'; expected one of float32, bfloat16, float16"),
        ({"scheme": "plain", "dtype": "float32", "__class__": "os"}, "__class__ is 'os'; expected no field but dtype"),
        (codebook(values=[0] * 15), "values is [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]; expected a list of 16"),
        (codebook(values=[0] * 10**6), "expected a list of 16 numbers within float32"),
        (codebook(values=[10**400, *[0] * 15]), "values is [an integer of 1329 bits, "),
        (codebook(values=[1e39, *[0] * 15]), "values is [1e+39, "),
        (codebook(values=[math.inf, *[0] * 15]), "values is [inf, "),
        (codebook(values=["1", *[0] * 15]), "values is ['1', "),
        (codebook(values="0" * 16), "values is '0000000000000000'; expected a list of 16 numbers"),
        (codebook(scales="e9"), "scales is 'e9'; expected one of float32, float16, e4m3, e8m0"),
        (codebook(has_row_scale=1), "has_row_scale is 1; expected true or false"),
        (codebook(group_size=None), "group_size is None; expected a whole number from 1 to 1048576"),
        (codebook(bits=4), "bits is 4; expected no field but values, group_size, scales, has_row_scale"),
        (rounded(kind="int7"), "kind is 'int7'; expected one of int8, "),
        (rounded(kind="nvfp4"), "is_static is False; expected true where kind is nvfp4"),
        (rounded(group_size=32, is_symmetric=False), "is_symmetric is False; expected true where group_size is a"),
        (rounded(kind="fp8", is_symmetric=False), "is_symmetric is False; expected true where kind is fp8"),
        (rounded(group_size=2**40), "group_size is 1099511627776; expected a whole number from 1 to 131072, or null"),
        (rounded(weight=3), "weight is 3; expected an object that describes a weight scheme"),
        (rounded(weight=ROUNDED), "weight.scheme is 'rounded_input'; expected one of groupwise_int, "),
        (
            rounded(weight={"scheme": "reordered_input", "weight": {**INT4, "bits": 5}}),
            "weight.weight.bits is 5; expected 4 or 8",
        ),
        (
            rounded(weight={"scheme": "reordered_input", "weight": {**INT4, "zero": "x" * 9999}}),
            "weight.weight.zero is 'xxxx",
        ),
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        scheme_from_json(value, "engine.json: packed a.weight")
    text = str(caught.value)
    assert text.startswith("engine.json: packed a.weight: ") and message in text
    assert "\n" not in text and len(text) < 700


KEYS = st.sampled_from(
    ["scheme", "weight", "bits", "group_size", "zero", "scale_dtype", "values", "scales", "dtype", "kind", "is_static"]
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from([*SCHEMES, "float16", "float8_e5m2", "midpoint", "e8m0", "nvfp4", 4, 8])
)  # fmt: skip
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """A scheme as it is written, of which one field, somewhere, is something else or gone."""
    value = scheme_to_json(draw(any_scheme()))
    place = value
    while isinstance(place.get("weight"), dict) and draw(st.booleans()):
        place = place["weight"]
    key = draw(st.sampled_from(sorted(place)) | KEYS)
    if draw(st.booleans()):
        place.pop(key, None)
    else:
        place[key] = draw(ANYTHING)
    return value


@settings(max_examples=150, deadline=None)
@given(ANYTHING | spoiled())
def test_no_file_makes_anything_but_a_scheme_or_a_line(value: Any) -> None:
    try:
        found = scheme_from_json(value, "engine.json")
    except ModelLoadError as error:
        assert str(error).startswith("engine.json: ") and "\n" not in str(error)
    else:
        assert scheme_from_json(scheme_to_json(found), "engine.json") == found
