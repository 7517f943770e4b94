"""``read_pickle``: the objects of a pickle, without running anything that the pickle names.

Used for what torch.save wrote. A pickle names the classes and functions that make its objects; here each name is
looked up in a table of our own, whose entries only make records (a tensor's place in the file, plain containers).
A name that is not in the table ends in a one-line ``ModelLoadError``. Reads no tensor.
"""

import io
import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection
from typing import IO, Any, NamedTuple

import torch

from backend_engine.checkpoint.pickle_size import HashableSizes
from backend_engine.errors import ModelLoadError, one_line, shown

MAX_PICKLE = 1 << 27
MAX_SIZE = (1 << 63) - 1
_REFUSED_CODES = frozenset({"INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "PERSID"})
_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
}
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "complex128",
)  # fmt: skip


class StorageRef(NamedTuple):
    """Bytes of the file that tensors lie in: by ``key``; ``numel`` elements of ``dtype``, of bytes without a dtype."""

    dtype: torch.dtype | None
    key: str
    numel: int


class TensorRef(NamedTuple):
    """A tensor as the pickle describes it, unchecked; ``problem``: why it is none that can be read."""

    storage: Any
    offset: Any
    shape: Any
    stride: Any
    dtype: Any
    problem: str | None = None


class StandIn:
    """What stands for an object of another class: what it was made with, and its state. It does nothing."""

    type_name = ""

    @staticmethod
    def spend(num_values: int) -> None:
        """Told how many values an object keeps that others may keep as well."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        cls.spend(len(args) + len(kwargs))
        self = object.__new__(cls)
        self.args, self.kwargs, self.state = args, kwargs, None
        return self

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything has been kept by ``__new__``."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"an object of type {self.type_name}"

    def attributes(self) -> dict[str, Any]:
        """The state as names and values; empty where it is something else."""
        return dict(self.state) if isinstance(self.state, dict) else {}


class _Maker:
    """What stands for a function or a class that a pickle calls."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a function with a state")


class _PlainDict(dict[Any, Any]):
    """An OrderedDict, whose attributes are dropped (torch keeps versions of modules there)."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Dropped."""


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> TensorRef:
    dtype = storage.dtype if isinstance(storage, StorageRef) else None
    flags = rest[2] if len(rest) > 2 else None
    problem = "a conjugated or negated view" if isinstance(flags, dict) and any(flags.values()) else None
    return TensorRef(storage, offset, shape, stride, dtype, problem)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    return TensorRef(storage, offset, shape, stride, dtype)


def _refused_tensor(kind: str) -> _Maker:
    return _Maker(lambda *_: TensorRef(None, 0, (), (), None, kind))


def _encode(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes in an unknown encoding")
    return text.encode("latin1")


# What these make is as large as what they are given, which may be given many times.
_COPIES: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _PlainDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "_codecs.encode": _encode,
    "torch.Size": tuple,
}
_CONTAINERS: dict[str, Any] = {
    "torch.device": _Maker(lambda kind, *_: kind),
    "torch.serialization._get_layout": _Maker(lambda name: name),
}
_TENSORS: dict[str, Any] = {
    **{f"torch.{name}": StorageRef(dtype, "", 0) for name, dtype in _STORAGES.items()},
    **{f"torch.cuda.{name}": StorageRef(dtype, "", 0) for name, dtype in _STORAGES.items()},
    **{f"torch.{name}": getattr(torch, name) for name in _DTYPES},
    "torch.storage.UntypedStorage": StorageRef(None, "", 0),
    "torch.UntypedStorage": StorageRef(None, "", 0),
    "torch._utils._rebuild_tensor": _Maker(_tensor_v2),
    "torch._utils._rebuild_tensor_v2": _Maker(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _Maker(_tensor_v3),
    "torch._utils._rebuild_parameter": _Maker(lambda tensor, *_: tensor),
    "torch._utils._rebuild_parameter_with_state": _Maker(lambda tensor, *_: tensor),
    "torch.nn.parameter.Parameter": _Maker(lambda tensor, *_: tensor),
    "torch._utils._rebuild_sparse_tensor": _refused_tensor("sparse"),
    "torch._utils._rebuild_sparse_csr_tensor": _refused_tensor("sparse"),
    "torch._utils._rebuild_qtensor": _refused_tensor("quantized"),
    "torch.per_tensor_affine": "per_tensor_affine",
    "torch.per_channel_affine": "per_channel_affine",
    "torch._utils._rebuild_nested_tensor": _refused_tensor("nested"),
    "torch._utils._rebuild_meta_tensor_no_storage": _refused_tensor("without values"),
}


class Unpickled(NamedTuple):
    """``root``: the object, tensors in it as ``TensorRef``. ``storages``: what they lie in, by key."""

    root: Any
    storages: dict[str, StorageRef]


def read_pickle(data: bytes, where: str, stand_ins: Collection[str] = ()) -> Unpickled:
    """What the pickle ``data`` holds. ``stand_ins``: full names of the classes whose objects become a ``StandIn``.
    ``where`` begins the message of every ``ModelLoadError``.
    """
    _check_codes(data, where)
    try:
        unpickler = _Unpickler(data, where, stand_ins)
        return Unpickled(unpickler.load(), unpickler.storages)
    except _DAMAGE as error:
        raise ModelLoadError(f"{where} is not a whole pickle ({one_line(error)})") from None


def pickle_length(data: IO[bytes], where: str) -> int:
    """How many bytes the pickle has that begins at the position of ``data``, which is left behind it."""
    start = data.tell()
    try:
        for _ in pickletools.genops(data):
            if data.tell() - start > MAX_PICKLE:
                raise ModelLoadError(f"{where} holds a pickle of more than {MAX_PICKLE} bytes")
    except _DAMAGE as error:
        raise ModelLoadError(f"{where} is not a whole pickle ({one_line(error)})") from None
    return data.tell() - start


def _check_codes(data: bytes, where: str) -> None:
    """Refuse what no writer makes: old ways to make objects, and notes at places that would take memory."""
    if len(data) > MAX_PICKLE:
        raise ModelLoadError(f"{where} holds a pickle of {len(data)} bytes; expected at most {MAX_PICKLE}")
    try:
        sizes = HashableSizes()
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            is_note = code.name in ("PUT", "BINPUT", "LONG_BINPUT")
            if code.name in _REFUSED_CODES or (is_note and (argument is None or not 0 <= int(argument) <= count)):
                raise ModelLoadError(f"{where} is not a pickle that torch writes (code {code.name} {shown(argument)})")
            sizes.step(code, argument)
    except _DAMAGE as error:
        raise ModelLoadError(f"{where} is not a whole pickle ({one_line(error)})") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str, stand_ins: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._stand_ins = frozenset(stand_ins)
        self._types: dict[str, type[StandIn]] = {}
        self.storages: dict[str, StorageRef] = {}
        # Values that are made of others by copying: each is in the pickle at least once.
        self._budget = len(data)

    def _spend(self, num_values: int) -> None:
        self._budget -= num_values
        if self._budget < 0:
            raise pickle.UnpicklingError("values that are copied many times over")

    def _counted(self, make: Callable[..., Any]) -> _Maker:
        def counted(values: Any = (), *others: Any) -> Any:
            self._spend(len(values))
            return make(values, *others)

        return _Maker(counted)

    def find_class(self, module: str, name: str) -> Any:
        # Early pickles have the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if full in _COPIES:
            return self._counted(_COPIES[full])
        if full in _CONTAINERS:
            return _CONTAINERS[full]
        if full in _TENSORS:
            return _TENSORS[full]
        if full in self._stand_ins:
            values = {"type_name": full, "spend": staticmethod(self._spend)}
            return self._types.setdefault(full, type("StandIn", (StandIn,), values))
        named = full if full.isprintable() else shown(full)
        raise ModelLoadError(
            f"{self._where} holds an object of type {named[:200]}, which is not loaded; expected tensors"
        )

    def persistent_load(self, pid: Any) -> StorageRef:
        is_known = isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"
        if not is_known or not isinstance(pid[1], StorageRef):
            raise pickle.UnpicklingError("an unknown kind of reference")
        key, numel = pid[2], pid[4]
        is_name = key.isprintable() if isinstance(key, str) else type(key) is int and 0 <= key <= MAX_SIZE
        is_sound = is_name and isinstance(numel, int) and 0 <= numel <= MAX_SIZE
        if not is_sound or (len(pid) == 6 and pid[5] is not None):
            raise pickle.UnpicklingError(f"storage {shown(key)} of {shown(numel)} elements, or a view of another")
        ref = StorageRef(pid[1].dtype, str(key), numel)
        if self.storages.setdefault(ref.key, ref) != ref:
            raise pickle.UnpicklingError(f"storage {shown(key)} in two ways")
        return ref
