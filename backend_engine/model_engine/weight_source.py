"""``WeightSource``: where a model of our own layers gets its weights: a checkpoint, or an engine folder.

Made by ``native_backend.py``. Both say whether they hold the model before any memory is taken, then fill it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from backend_engine.checkpoint.kv_scales import find_kv_scales, read_kv_scales
from backend_engine.checkpoint.loader import Progress, check_weights, fill_weights
from backend_engine.checkpoint.stored_weights import StoredWeights
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.weight_plan import Plan
from backend_engine.models.weight_rules import LoadTarget, Rule
from backend_engine.quantization.packed import Packed
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.weight_scheme import WeightScheme


class PlannedRows(NamedTuple):
    """Rows of a layer's weight that are kept alike; ``scheme``: how they stay packed, ``None`` = plain."""

    start: int
    num_rows: int
    scheme: WeightScheme | None


def store_forms(targets: Mapping[str, LoadTarget], rows: Mapping[str, Sequence[PlannedRows]]) -> None:
    """Give the layers among ``targets`` whose weights stay packed their forms; ``rows``: of ``WeightSource.check``."""
    for name, parts in rows.items():
        layer = targets[name].layer
        if layer is not None and any(part.scheme for part in parts):
            plain = Plain(layer.options.dtype)
            layer.store_as(Packed([part.scheme or plain for part in parts], [part.num_rows for part in parts]))


class WeightSource(ABC):
    """``origin``: what the model's configuration was found in, for messages."""

    origin: str

    @abstractmethod
    def infos(self) -> list[TensorInfo]:
        """All tensors that it holds."""

    @abstractmethod
    def check(self, outline: CausalLM) -> Mapping[str, list[PlannedRows]]:
        """Compare what the model needs (``outline``: it without memory) with what is there; reads no weight. Returns
        how each layer's weight is kept, its rows in order. Raises ``ModelLoadError``.
        """

    @abstractmethod
    def fill(self, targets: Mapping[str, LoadTarget], progress: Progress | None = None) -> tuple[str, ...]:
        """Give the layers among ``targets`` their forms and fill them: all targets of the model that was checked, or
        those of some of its layers. Returns the checkpoint's tensors that hold NaN.
        """

    @abstractmethod
    def kv_scales(self) -> Mapping[int, tuple[float, float]]:
        """Scales of K and V in a layer's cache, where there are any, by the layer's number."""


class CheckpointWeights(WeightSource):
    """A checkpoint in any format, through the rules of the model's family. ``where``: for messages."""

    def __init__(self, stored: StoredWeights, rules: Sequence[Rule], where: str) -> None:
        self.origin = stored.origin
        self._stored = stored
        self._rules = rules
        self._where = where
        self._todo: Plan | None = None

    def infos(self) -> list[TensorInfo]:
        return [self._stored.files.describe(name) for name in self._stored]

    def check(self, outline: CausalLM) -> Mapping[str, list[PlannedRows]]:
        self._todo = check_weights(self._stored, outline.load_targets(), self._rules, self._where)
        return _rows_by_parameter(self._todo, self._stored)

    def fill(self, targets: Mapping[str, LoadTarget], progress: Progress | None = None) -> tuple[str, ...]:
        assert self._todo is not None, "filled before it was checked"
        return fill_weights(self._todo, self._stored, targets, progress)

    def kv_scales(self) -> Mapping[int, tuple[float, float]]:
        return read_kv_scales(self._stored.files, find_kv_scales(self._stored.files))


def _rows_by_parameter(todo: Plan, stored: StoredWeights) -> dict[str, list[PlannedRows]]:
    found: dict[str, list[PlannedRows]] = {}
    for copies in todo.copies.values():
        packing = stored.format_of(copies[0].source.name)
        for copy in copies:
            rows = PlannedRows(copy.start, copy.rows, None if packing is None else packing.scheme)
            found.setdefault(copy.parameter, []).append(rows)
    return {name: sorted(rows, key=lambda part: part.start) for name, rows in found.items()}
