"""``StoredWeights``: what a checkpoint's files hold, by the names that weight rules ask for, plain or packed.

Used by ``loader.py``. A packed weight counts as one tensor, of the name that a plain one would have; its leaves are
checked against the files' headers before anything is read.
"""

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError, shown
from backend_engine.models.weight_rules import Copy
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, Quantization, StoredTensors, WeightFormat

_MAX_NAME_CHARS = 500


class TensorFiles:
    """The reader of each tensor; refuses a tensor that is in two files."""

    def __init__(self, readers: Iterable[TensorReader]) -> None:
        self._readers: dict[str, TensorReader] = {}
        self._infos: dict[str, TensorInfo] = {}
        for reader in readers:
            for name in reader.names():
                if not name.isprintable() or len(name) > _MAX_NAME_CHARS:
                    raise ModelLoadError(
                        f"{reader.path} holds a tensor named {shown(name)}; expected at most {_MAX_NAME_CHARS} "
                        "printable characters"
                    )
                if name in self._readers:
                    other = self._readers[name].path.name
                    raise ModelLoadError(f"tensor {name} is in two files, {other} and {reader.path.name}")
                self._readers[name] = reader

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def file_of(self, name: str) -> str:
        """Name of the file that holds the tensor."""
        return self._readers[name].path.name

    def describe(self, name: str) -> TensorInfo:
        """Shape and dtype."""
        if name not in self._infos:
            self._infos[name] = self._readers[name].describe(name)
        return self._infos[name]

    def read(self, name: str) -> Tensor:
        """The tensor."""
        return self._readers[name].read(name)

    def release(self, name: str, tensor: Tensor) -> None:
        """See ``TensorReader.release``."""
        self._readers[name].release(tensor)

    def described(self, where: str) -> StoredTensors:
        """All tensors, for readers of quantization configs; ``where``: what their messages call the checkpoint."""
        return StoredTensors({name: self.describe(name) for name in self}, where)


class StoredWeights(Collection[str]):
    """The names that ``in`` knows are those of plain tensors and of packed weights."""

    def __init__(self, files: TensorFiles, quantization: Quantization, where: str, origin: str = "config.json") -> None:
        """``where``: what messages call the checkpoint. ``origin``: what its configuration was found in."""
        self.files = files
        self.origin = origin
        self._quantization = quantization
        self._where = where
        self._formats: dict[str, WeightFormat | None] = {}
        self._names = sorted(files)

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str), name
        return self.format_of(name) is not None or name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def format_of(self, name: str) -> WeightFormat | None:
        """How the weight ``name`` is packed; ``None`` when it is plain, or not there in any form."""
        if name not in self._formats:
            module = module_of(name)
            self._formats[name] = self._quantization.format_of(module) if self._has_part_of(module) else None
        return self._formats[name]

    def _has_part_of(self, module: str) -> bool:
        """Whether anything is stored under the name of ``module``."""
        at = bisect.bisect_left(self._names, module)
        nearby = itertools.takewhile(lambda name: name.startswith(module), itertools.islice(self._names, at, None))
        return any(name[len(module) : len(module) + 1] in ("", ".", "_") for name in nearby)

    @property
    def kv_cache_dtype(self) -> str | None:
        """The KV cache that the checkpoint was made for, where it says so."""
        return self._quantization.kv_cache_dtype

    def tensors_of(self, copy: Copy) -> list[str]:
        """The tensors that make up the source of ``copy``, those that are there."""
        packing = self.format_of(copy.source.name)
        if packing is None:
            return [copy.source.name] if copy.source.name in self.files else []
        module = module_of(copy.source.name)
        names = (module + ending for ending in self._leaves(packing, copy))
        return [name for name in names if name in self.files]

    def is_empty_bias(self, name: str) -> bool:
        """Whether ``name`` is a bias of zeros beside a packed weight: AutoGPTQ writes one for every layer."""
        module = name.removesuffix(".bias")
        is_beside = module != name and self.format_of(module + ".weight") is not None
        is_plain = is_beside and self.files.describe(name).dtype in FLOAT_DTYPES
        return is_plain and not bool(self.files.read(name).count_nonzero())

    def check(self, copy: Copy) -> None:
        """Compare what ``copy`` needs with what the headers say."""
        source = copy.source
        packing = self.format_of(source.name)
        if packing is None:
            self._check_tensor(source.name, Leaf(source.shape, source.dtypes), copy)
            return
        for ending, leaf in self._leaves(packing, copy).items():
            name = module_of(source.name) + ending
            if name in self.files or not leaf.is_optional:
                self._check_tensor(name, leaf, copy)

    def _leaves(self, packing: WeightFormat, copy: Copy) -> dict[str, Leaf]:
        try:
            return packing.leaves(copy.packed_shape)
        except ValueError as error:
            raise ModelLoadError(f"{self._where}: weight {copy.source.name}: {error}") from None

    def _check_tensor(self, name: str, leaf: Leaf, copy: Copy) -> None:
        if name not in self.files:
            raise missing([name], copy.parameter, self._where)
        shape, dtype = self.files.describe(name)
        where = f"{self.files.file_of(name)}: tensor {name}"
        if shape != leaf.shape:
            raise ModelLoadError(f"{where} has shape {list(shape)}; {self.origin} asks for {list(leaf.shape)}")
        if dtype not in leaf.dtypes:
            raise ModelLoadError(f"{where} has dtype {dtype}; expected one of {', '.join(leaf.dtypes)}")

    def read(self, copy: Copy) -> dict[str, Tensor]:
        """The tensors of the source of ``copy`` by the ending behind its module's name; a plain one has the ending of
        its own name.
        """
        module = module_of(copy.source.name)
        return {name.removeprefix(module): self.files.read(name) for name in self.tensors_of(copy)}

    def unpack(self, copy: Copy, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """The components of the packed source of ``copy``."""
        packing = self.format_of(copy.source.name)
        assert packing is not None, f"{copy.source.name} is not packed"
        try:
            return packing.unpack(leaves, copy.packed_shape)
        except ValueError as error:
            file = self.files.file_of(self.tensors_of(copy)[0])
            raise ModelLoadError(f"{file}: weight {copy.source.name}: {error}") from None


def module_of(name: str) -> str:
    """The module whose weight is called ``name``; stacked weights are called as their module."""
    return name.removesuffix(".weight")


def missing(names: Sequence[str], parameter: str, where: str) -> ModelLoadError:
    """The error for tensors that are not there."""
    return ModelLoadError(f"checkpoint {where} does not hold {listed(names)}, which parameter {parameter} needs")


def listed(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return f"tensor {names[0]}" + (f" (nor {len(names) - 1} more)" if len(names) > 1 else "")
