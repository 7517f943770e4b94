"""``EngineWeights``: the weights of an engine folder, put together from the files of its ranks.

Used by ``native_backend.py``; ``builder/`` writes what it reads, by the same names. Every tensor's shape and dtype is
compared with what the manifest's forms ask for before any memory is taken. However many ranks the folder was built for,
one device gets the whole model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.checkpoint.loader import Progress
from backend_engine.checkpoint.stored_weights import TensorFiles
from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.checkpoint.torch_file import DTYPE_NAMES
from backend_engine.config.engine_manifest import ENGINE_FILE, EngineManifest
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError
from backend_engine.model_engine.rank_shards import Shard, rank_shards
from backend_engine.model_engine.weight_source import PlannedRows, WeightSource
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.weight_rules import LoadTarget
from backend_engine.quantization.packed import Packed, PackedPart
from backend_engine.quantization.scheme_json import scheme_from_json
from backend_engine.quantization.schemes.plain import Plain
from backend_engine.quantization.weight_format import FLOAT_DTYPES
from backend_engine.quantization.weight_scheme import Component

_RANK_FILE = re.compile(r"rank(\d+)-\d+\.safetensors")


class Piece(NamedTuple):
    """A tensor of a rank's file: some rows and columns of a parameter, or of a component of a packed part of it.

    rows: where they lie in the parameter or component, and where in the file's tensor; ``None`` = it has no rows.
    columns: of the parameter or component, ``None`` = all.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: tuple[tuple[slice, slice], ...] | None
    columns: slice | None

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Whether it is a plain parameter of ``shape``, whole and in its order."""
        return self.columns is None and self.rows == ((slice(0, shape[0]), slice(0, shape[0])),)


def parts_of(target: LoadTarget) -> list[PackedPart]:
    """The packed parts of a layer's weight, none where it is plain."""
    return [] if target.layer is None else target.layer.packed_parts


def plain_piece(name: str, shape: Sequence[int], shard: Shard) -> Piece:
    """Of a plain parameter of ``shape``."""
    rows = _row_pairs(shard.rows, (0, shape[0]))
    num_rows = sum(stored.stop - stored.start for _, stored in rows)
    columns = None if shard.columns is None else slice(*shard.columns)
    rest = shape[1:] if columns is None else (columns.stop - columns.start, *shape[2:])
    return Piece(name, (num_rows, *rest), FLOAT_DTYPES, rows, columns)


def packed_pieces(name: str, index: int, part: PackedPart, in_features: int, shard: Shard) -> dict[str, Piece]:
    """Of part ``index`` of the packed parameter ``name``, by component; none where the rank has none of its rows."""
    rows = _row_pairs(shard.rows, (part.start, part.start + part.num_rows))
    num_rows = sum(stored.stop - stored.start for _, stored in rows)
    if not num_rows:
        return {}
    start, stop = (0, in_features) if shard.columns is None else shard.columns
    whole, held = part.scheme.components(in_features), part.scheme.components(stop - start)
    return {
        key: Piece(
            f"{name}.{index}.{key}",
            (num_rows, *component.shape) if component.per_row else component.shape,
            (DTYPE_NAMES[component.dtype],),
            rows if component.per_row else None,
            _columns(whole[key], component, start, in_features),
        )
        for key, component in held.items()
    }


def _columns(whole: Component, held: Component, start: int, in_features: int) -> slice | None:
    """Where the component of some columns, from ``start`` on, lies in that of all of them."""
    if whole.shape == held.shape:
        return None
    first = start * whole.shape[0] // in_features
    return slice(first, first + held.shape[0])


def _row_pairs(ranges: Sequence[tuple[int, int]], within: tuple[int, int]) -> tuple[tuple[slice, slice], ...]:
    """For the rows ``within``, of which a rank holds ``ranges`` of the whole parameter: where they are, counted from
    its first, and where in what the rank holds of them.
    """
    pairs, stored = [], 0
    for start, stop in ranges:
        first, last = max(start, within[0]), min(stop, within[1])
        if first < last:
            size = last - first
            pairs.append((slice(first - within[0], last - within[0]), slice(stored, stored + size)))
            stored += size
    return tuple(pairs)


class EngineWeights(WeightSource):
    """See the module. Raises ``ModelLoadError`` for forms that no version of ours has written."""

    origin = ENGINE_FILE

    def __init__(self, spec: ArchSpec, manifest: EngineManifest, folder: Path, readers: Sequence[TensorReader]) -> None:
        self._manifest = manifest
        self._folder = folder
        self._spec = spec
        self._shards: list[dict[str, Shard]] = []
        num_ranks = manifest.build.tensor_parallel_size * manifest.build.pipeline_parallel_size
        if num_ranks > len(readers):
            raise ModelLoadError(
                f"{folder / ENGINE_FILE}: tensor_parallel_size and pipeline_parallel_size make {num_ranks} ranks, but "
                f"the folder has {len(readers)} files of weights"
            )
        by_rank: dict[int, list[TensorReader]] = {rank: [] for rank in range(num_ranks)}
        for reader in readers:
            match = _RANK_FILE.fullmatch(reader.path.name)
            if match is None or int(match[1]) not in by_rank:
                raise ModelLoadError(
                    f"{reader.path} has no place in an engine folder of {len(by_rank)} ranks; expected a name like "
                    "rank0-00001.safetensors"
                )
            by_rank[int(match[1])].append(reader)
        self._ranks = [TensorFiles(by_rank[rank]) for rank in range(len(by_rank))]
        self._forms = {name: self._read_forms(name) for name in manifest.packed}

    def _read_forms(self, name: str) -> list[PlannedRows]:
        found, start = [], 0
        for index, part in enumerate(self._manifest.packed[name]):
            scheme = scheme_from_json(part.scheme, f"{self._folder / ENGINE_FILE}: packed {name} part {index}")
            found.append(PlannedRows(start, part.num_rows, scheme))
            start += part.num_rows
        return found

    def infos(self) -> list[TensorInfo]:
        return [files.describe(name) for files in self._ranks for name in files]

    def check(self, outline: CausalLM) -> Mapping[str, list[PlannedRows]]:
        build = self._manifest.build
        # Not before it is known that the files can hold the model at all.
        self._shards = rank_shards(self._spec, build.tensor_parallel_size, build.pipeline_parallel_size)
        targets = outline.load_targets()
        for name, rows in self._forms.items():
            layer = targets[name].layer if name in targets else None
            if layer is None or sum(part.num_rows for part in rows) != targets[name].shape[0]:
                raise ModelLoadError(
                    f"{self._folder / ENGINE_FILE}: packed has {name} with {sum(part.num_rows for part in rows)} rows, "
                    "which the model that config.json describes does not have"
                )
            self._store(name, targets[name])
            self._check_columns(name, targets[name])
        for rank, files in enumerate(self._ranks):
            expected = {piece.name: piece for name in targets for piece, _ in self._pieces(rank, name, targets[name])}
            self._compare(files, expected, rank)
        plain = {name: [PlannedRows(0, t.shape[0], None)] for name, t in targets.items() if t.layer is not None}
        return {**plain, **self._forms}

    def _check_columns(self, name: str, target: LoadTarget) -> None:
        """Some forms can hold only some numbers of columns, such as even ones."""
        num_columns = target.shape[1]
        for part in parts_of(target):
            found = part.scheme.num_columns(part.tensors)
            if found != num_columns:
                raise ModelLoadError(
                    f"{self._folder / ENGINE_FILE}: packed {name} has a form of {found} columns; the model has "
                    f"{num_columns}"
                )

    def _compare(self, files: TensorFiles, expected: Mapping[str, Piece], rank: int) -> None:
        where = f"engine folder {self._folder}, rank {rank}"
        for name, piece in expected.items():
            if name not in files:
                raise ModelLoadError(f"{where}: tensor {name} is not there")
            shape, dtype = files.describe(name)
            if shape != piece.shape or dtype not in piece.dtypes:
                raise ModelLoadError(
                    f"{where}: tensor {name} is {dtype} of shape {list(shape)}; expected "
                    f"{' or '.join(piece.dtypes)} of shape {list(piece.shape)}"
                )
        for name in files:
            if name not in expected:
                raise ModelLoadError(f"{where}: tensor {name} has no place in the model that config.json describes")

    def _store(self, name: str, target: LoadTarget) -> None:
        """Give the layer of ``target`` its form."""
        layer = target.layer
        if layer is None:
            return
        forms = self._forms.get(name)
        if forms is None:
            if layer.weight is None:
                layer.store_as(layer.quant.for_plain_weights())
            return
        plain = Plain(layer.options.dtype)
        schemes = [plain if isinstance(part.scheme, Plain) else part.scheme or plain for part in forms]
        layer.store_as(Packed(schemes, [part.num_rows for part in forms]))

    def _pieces(self, rank: int, name: str, target: LoadTarget) -> Iterator[tuple[Piece, Tensor]]:
        """What a rank's files hold of a parameter, each with the tensor that it is a piece of."""
        shard = self._shards[rank].get(name)
        if shard is None:
            return
        layer = target.layer
        tensor = target.tensor if layer is None else layer.weight
        if layer is not None and layer.packed_parts:
            for index, part in enumerate(layer.packed_parts):
                for key, piece in packed_pieces(name, index, part, target.shape[1], shard).items():
                    yield self._as_stored(part, piece), part.tensors[key]
        else:
            shape = target.shape
            yield plain_piece(name, shape, shard), tensor if tensor is not None else torch.empty(0)

    def _as_stored(self, part: PackedPart, piece: Piece) -> Piece:
        """Plain rows beside packed ones may be stored in another dtype than they are kept in."""
        return piece._replace(dtypes=FLOAT_DTYPES) if isinstance(part.scheme, Plain) else piece

    def fill(self, targets: Mapping[str, LoadTarget], progress: Progress | None = None) -> tuple[str, ...]:
        for done, (name, target) in enumerate(targets.items(), start=1):
            self._store(name, target)
            for rank, files in enumerate(self._ranks):
                for piece, tensor in self._pieces(rank, name, target):
                    stored = files.read(piece.name)
                    layer = target.layer if piece.is_all_of(target.shape) else None
                    if layer is None or layer.packed_parts or not layer.quant.take(layer, stored):
                        _fill(tensor, stored, piece)
                    files.release(piece.name, stored)
            self._check_order(name, target)
            if progress is not None:
                progress(done, len(targets), name)
        return ()

    def kv_scales(self) -> Mapping[int, tuple[float, float]]:
        return self._manifest.kv_scales

    def _check_order(self, name: str, target: LoadTarget) -> None:
        """An order of columns must be one, or a product would read beyond its input."""
        for part in parts_of(target):
            order = part.tensors.get("order")
            if order is not None and not torch.equal(order.sort().values, torch.arange(order.numel()).to(order)):
                raise ModelLoadError(
                    f"engine folder {self._folder}: the order of columns of {name} does not name each of its "
                    f"{order.numel()} columns once"
                )


def _fill(whole: Tensor, stored: Tensor, piece: Piece) -> None:
    columns = slice(None) if piece.columns is None else piece.columns
    if piece.rows is None:
        whole[columns].copy_(stored)
        return
    for place, rows in piece.rows:
        target = whole[place] if piece.columns is None else whole[place][:, columns]
        target.copy_(stored[rows])
