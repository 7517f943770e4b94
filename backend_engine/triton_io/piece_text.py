"""Pieces of many answers as one text: how the engine hands a whole step's tokens to a BLS in one response.

The sender thread of the engine model writes it, ``PieceInbox`` of the BLS reads it. Data only; knows no senders.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from backend_engine.triton_io.request_view import Array

# One tensor: kind (a NumPy character code), shape, and its values flat. One piece: request id, and tensors by name.
_Values = tuple[str, tuple[int, ...], list[Any]]
Entry = tuple[str, dict[str, _Values]]


def entry(request_id: str, tensors: Mapping[str, Array]) -> Entry:
    """What ``to_text`` takes: one piece of the request ``request_id``. STRING tensors must be valid UTF-8."""
    return request_id, {name: _values(array) for name, array in tensors.items()}


def to_text(entries: Iterable[Entry]) -> bytes:
    """JSON. Numbers come back bit for bit: float32 and float16 are exact in the 64 bits that JSON numbers have here."""
    return json.dumps(list(entries), separators=(",", ":"), ensure_ascii=False).encode()


def from_text(text: bytes) -> list[tuple[str, dict[str, Array]]]:
    """The pieces in the order in which they were put in."""
    return [
        (request_id, {name: _array(*values) for name, values in tensors.items()})
        for request_id, tensors in json.loads(text)
    ]


def _values(array: Array) -> _Values:
    flat = array.reshape(-1).tolist()
    kind = array.dtype.char
    return kind, array.shape, [value.decode() for value in flat] if kind == "O" else flat


def _array(kind: str, shape: list[int], values: list[Any]) -> Array:
    if kind == "O":
        values = [value.encode() for value in values]
    return np.array(values, kind).reshape(shape)
