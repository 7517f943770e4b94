"""``scheme_to_json``, ``scheme_from_json``: a ``WeightScheme`` as it is written into an engine folder, and back.

A fixed table of the schemes that such folders may have, with what each field may be; nothing in a file can name a
class. Opens no file.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from backend_engine.errors import ConfigError, ModelLoadError, shown
from backend_engine.quantization.schemes.codebook4 import SCALES, Codebook4
from backend_engine.quantization.schemes.flat_blocks import FlatBlocks
from backend_engine.quantization.schemes.float8 import Float8
from backend_engine.quantization.schemes.groupwise_int import ZEROS, GroupwiseInt
from backend_engine.quantization.schemes.inputs import FactoredInput, ReorderedInput, RoundedInput
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.schemes.rounding import KINDS
from backend_engine.quantization.weight_scheme import WeightScheme

SCHEMES: Mapping[str, type[WeightScheme]] = {
    "groupwise_int": GroupwiseInt,
    "codebook4": Codebook4,
    "float8": Float8,
    "plain": Plain,
    "flat_blocks": FlatBlocks,
    "reordered_input": ReorderedInput,
    "factored_input": FactoredInput,
    "rounded_input": RoundedInput,
}
"""By the name that files have for them, which stays when a class is renamed."""

# Of these each may be once among the schemes within each other, so that four are the most.
_WRAPPERS = (ReorderedInput, FactoredInput, RoundedInput)
_NUM_VALUES = 16
# No row is longer. Inputs are padded to whole groups, so their groups have a bound of their own.
_MAX_GROUP, _MAX_INPUT_GROUP = 2**20, 2**17
_FLOAT32_MAX = torch.finfo(torch.float32).max
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
_FLOAT8_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float8_e4m3fn, torch.float8_e5m2)}


class _Wrong(Exception):
    """What a value has to be instead."""


# A value of a file -> a field's value; raises ``_Wrong``.
_Read = Callable[[Any], Any]


def scheme_to_json(scheme: WeightScheme) -> dict[str, Any]:
    """An object of names, numbers and such objects, every field written out.

    Raises ``ConfigError`` for a scheme, a plugin's say, that ``scheme_from_json`` could not read.
    """
    written = _written(scheme)
    try:
        read = scheme_from_json(written, type(scheme).__name__)
    except ModelLoadError as error:
        raise ConfigError(f"weight scheme {error}; it cannot be written to an engine folder") from None
    assert read == scheme, (read, scheme)
    return written


def scheme_from_json(value: Any, where: str) -> WeightScheme:
    """What ``scheme_to_json`` wrote. ``where``: what messages begin with.

    Raises ``ModelLoadError``, one line, for anything else, whatever it is.
    """
    return _scheme(value, where, ())


def _written(scheme: WeightScheme) -> dict[str, Any]:
    name = next((name for name, known in SCHEMES.items() if known is type(scheme)), None)
    if name is None:
        raise ConfigError(
            f"weight scheme {type(scheme).__name__} cannot be written to an engine folder; only these can: "
            + ", ".join(known.__name__ for known in SCHEMES.values())
        )
    fields = ((field, getattr(scheme, field)) for field in _field_names(SCHEMES[name]))
    return {"scheme": name, **{field: _plain_value(value) for field, value in fields}}


def _plain_value(value: Any) -> Any:
    if isinstance(value, WeightScheme):
        return _written(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def _scheme(value: Any, where: str, outer: tuple[str, ...]) -> WeightScheme:
    """``outer``: names of the schemes around it, the outermost first."""
    path = "weight." * len(outer)
    if not isinstance(value, dict):
        raise _refusal(where, path.removesuffix(".") or "scheme", value, "an object that describes a weight scheme")
    name = value.get("scheme")
    if not isinstance(name, str) or name not in SCHEMES or name in outer:
        allowed = [known for known in SCHEMES if known not in outer]
        raise _refusal(where, f"{path}scheme", name, f"one of {', '.join(allowed)}")
    made_as = SCHEMES[name]
    expected = _field_names(made_as)
    unknown = next((key for key in value if key not in expected and key != "scheme"), None)
    if unknown is not None:
        raise _refusal(where, f"{path}{_key(unknown)}", value[unknown], f"no field but {', '.join(expected)}")
    missing = next((field for field in expected if field not in value), None)
    if missing is not None:
        raise ModelLoadError(f"{where}: {path}{missing} is missing; a scheme {name} has {', '.join(expected)}")
    fields: dict[str, Any] = {}
    for field, read in _FIELDS[made_as].items():
        try:
            fields[field] = read(value[field])
        except _Wrong as wrong:
            raise _refusal(where, path + field, value[field], str(wrong)) from None
    if made_as in _WRAPPERS:
        fields["weight"] = _scheme(value["weight"], where, (*outer, name))
    if made_as is RoundedInput:
        _check_rounding(fields, where, path)
    return made_as(**fields)


def _check_rounding(fields: Mapping[str, Any], where: str, path: str) -> None:
    """Raise ``ModelLoadError`` for fields that do not go together."""
    kind, is_static, is_symmetric = KINDS[fields["kind"]], fields["is_static"], fields["is_symmetric"]
    if fields["kind"] == "nvfp4" and not is_static:
        raise _refusal(where, f"{path}is_static", is_static, "true where kind is nvfp4")
    if fields["group_size"] is not None and not is_symmetric:
        raise _refusal(where, f"{path}is_symmetric", is_symmetric, "true where group_size is a number")
    if kind.grid != "int" and not is_static and not is_symmetric:
        raise _refusal(where, f"{path}is_symmetric", is_symmetric, f"true where kind is {fields['kind']}")


def _field_names(made_as: type[WeightScheme]) -> tuple[str, ...]:
    return ("weight", *_FIELDS[made_as]) if made_as in _WRAPPERS else tuple(_FIELDS[made_as])


def _refusal(where: str, field: str, value: Any, expected: str) -> ModelLoadError:
    return ModelLoadError(f"{where}: {field} is {shown(value)}; expected {expected}")


def _key(key: Any) -> str:
    """A key of a file as it can stand in a message."""
    return key if isinstance(key, str) and key.isidentifier() and len(key) < 60 else shown(key)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _whole_number(most: int) -> _Read:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _Wrong(f"a whole number from 1 to {most}")
        return value

    return read


def _or_null(read: _Read) -> _Read:
    def read_or_null(value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except _Wrong as expected:
            raise _Wrong(f"{expected}, or null") from None

    return read_or_null


def _bits(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in (4, 8):
        raise _Wrong("4 or 8")
    return value


def _one_of(names: Collection[str]) -> _Read:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise _Wrong(f"one of {', '.join(names)}")
        return value

    return read


def _dtype(dtypes: Mapping[str, torch.dtype]) -> _Read:
    return lambda value: dtypes[_one_of(dtypes)(value)]


def _values(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else []
    if len(numbers) != _NUM_VALUES or not all(_is_float32(number) for number in numbers):
        raise _Wrong(f"a list of {_NUM_VALUES} numbers within float32")
    return tuple(float(number) for number in numbers)


def _is_float32(value: Any) -> bool:
    # Compared before it is converted: an integer may have more digits than a float holds.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -_FLOAT32_MAX <= value <= _FLOAT32_MAX


_GROUP_SIZE = _whole_number(_MAX_GROUP)
_FIELDS: Mapping[type[WeightScheme], Mapping[str, _Read]] = {
    GroupwiseInt: {
        "bits": _bits,
        "group_size": _or_null(_GROUP_SIZE),
        "zero": _one_of(ZEROS),
        "scale_dtype": _dtype(_DTYPES),
    },
    Codebook4: {
        "values": _values,
        "group_size": _GROUP_SIZE,
        "scales": _one_of(SCALES),
        "has_row_scale": _flag,
    },
    Float8: {"dtype": _dtype(_FLOAT8_DTYPES), "group_size": _or_null(_GROUP_SIZE)},
    Plain: {"dtype": _dtype(_DTYPES)},
    FlatBlocks: {"values": _values, "block_size": _GROUP_SIZE, "plain_dtype": _dtype(_DTYPES)},
    ReorderedInput: {},
    FactoredInput: {},
    RoundedInput: {
        "kind": _one_of(KINDS),
        "is_static": _flag,
        "group_size": _or_null(_whole_number(_MAX_INPUT_GROUP)),
        "is_symmetric": _flag,
    },
}
