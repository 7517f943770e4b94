"""``build_engine``: a checkpoint in any format as an engine folder: weights fused, packed and divided over ranks.

Called by ``LLM.save`` and ``scripts/build_engine.py``. Nothing in the folder depends on the machine that builds it;
what a library packs its own way is packed at load. The folder appears when it is whole, under its name, or not at all.
"""

import dataclasses
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from backend_engine.builder.model_files import write_model_files
from backend_engine.builder.new_folder import new_folder
from backend_engine.builder.rank_files import RankWriter, stored_of
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.engine_folder import verifying
from backend_engine.checkpoint.hf_folder import architecture
from backend_engine.checkpoint.loader import Progress
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.config.build_config import PRECISIONS, BuildConfig
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_files import entry_of
from backend_engine.config.engine_manifest import (
    ENGINE_FILE,
    EngineManifest,
    FileEntry,
    PartForm,
    manifest_text,
)
from backend_engine.config.library_versions import library_versions
from backend_engine.config.model_facts import ModelFacts
from backend_engine.config.resolve import DeviceInfo, resolve
from backend_engine.errors import ConfigError
from backend_engine.model_engine.engine_weights import packed_pieces, parts_of, plain_piece
from backend_engine.model_engine.memory_plan import outline
from backend_engine.model_engine.model_loader import DTYPES, describe_model, source_of
from backend_engine.model_engine.native_backend import family_of, weight_source
from backend_engine.model_engine.rank_shards import Shard, rank_shards
from backend_engine.model_engine.weight_source import store_forms
from backend_engine.models.weight_rules import LoadTarget
from backend_engine.quantization.packed import PackedPart
from backend_engine.quantization.scheme_json import scheme_to_json
from backend_engine.quantization.unquantized import Decoded

_CPU = torch.device("cpu")


class BuildReport(NamedTuple):
    """What was written. warnings: what is odd about the checkpoint or missing in the folder, a line each."""

    manifest: EngineManifest
    warnings: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files but engine.json."""
        return sum(entry.num_bytes for entry in self.manifest.files.values())


def build_engine(
    model: str | Path | Checkpoint,
    output: Path,
    build: BuildConfig = BuildConfig(),
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> BuildReport:
    """Write ``model``, a checkpoint in any format or an engine folder, as the engine folder ``output``.

    Takes the memory of its largest layer and up to 1 GiB for each rank. progress: called with steps done, steps in all
    and what was just done. Raises ``ConfigError`` for a value of ``build`` or an ``output`` that is not allowed,
    ``ModelLoadError`` for what is wrong with the checkpoint; either before anything is written, if it can be told then.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    facts = describe_model(checkpoint, trust_remote_code=trust_remote_code)
    if facts.model_backend != "native":
        raise ConfigError(
            f"{architecture(checkpoint.config, checkpoint.origin)} has no family file: models that run with "
            "model_backend transformers are loaded from their own folder, not from an engine folder"
        )
    build = resolved_build(build, facts, checkpoint)
    engine = _Engine(checkpoint, build)
    with new_folder(output, engine.num_bytes) as folder:
        notes = write_model_files(checkpoint, folder, engine.config, trust_remote_code)
        steps = _Steps(progress, engine.num_steps)
        with_nan = engine.write_weights(folder, steps)
        manifest = engine.manifest(_entries(folder, steps), facts)
        (folder / ENGINE_FILE).write_text(manifest_text(manifest), encoding="utf-8")
    nan = tuple(f"tensor {name} of {checkpoint.path} holds NaN" for name in with_nan)
    return BuildReport(manifest, (*notes, *nan))


def resolved_build(build: BuildConfig, facts: ModelFacts, checkpoint: Checkpoint) -> BuildConfig:
    """``build`` checked, and with what the checkpoint decides. Limits that depend on the device that will run it stay
    open. Raises ``ConfigError``.
    """
    if build.precision not in ("auto", *PRECISIONS):
        raise ConfigError(f"precision {build.precision!r} is not allowed; use auto, {', '.join(PRECISIONS)}")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(build, name) < 1:
            raise ConfigError(f"{name} {getattr(build, name)} is out of range; it must be 1 or more")
    args = EngineArgs(
        str(checkpoint.path),
        device="cpu",
        max_batch_size=build.max_batch_size,
        max_num_tokens=build.max_num_tokens,
        max_seq_len=build.max_seq_len,
        max_input_len=build.max_input_len,
    )
    config = resolve(args, facts, DeviceInfo(has_cuda=False, num_cpus=1)).config
    stated = facts.dtype if facts.dtype in PRECISIONS else PRECISIONS[0]
    return dataclasses.replace(
        build,
        max_seq_len=config.max_seq_len,
        max_input_len=config.max_input_len,
        precision=stated if build.precision == "auto" else build.precision,
    )


class _Steps:
    """Counts what is done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def did(self, what: str) -> None:
        """One more step."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done), what)


class _Engine:
    """The model without memory, each layer in the form that it will have, and what every rank holds of it."""

    def __init__(self, checkpoint: Checkpoint, build: BuildConfig) -> None:
        source = source_of(checkpoint)
        family = family_of(source)
        spec = family.from_hf(source.config, source.origin)
        self._checkpoint, self._build, self._architecture = checkpoint, build, source.architecture
        self._shards = rank_shards(spec, build.tensor_parallel_size, build.pipeline_parallel_size)
        self._weights = weight_source(spec, family, source, checkpoint)
        self._model = outline(spec, DTYPES[build.precision])
        rows = self._weights.check(self._model)
        self._targets = self._model.load_targets()
        store_forms(self._targets, rows)
        self._forms = {name: _forms_of(target) for name, target in self._targets.items() if parts_of(target)}
        self.num_bytes = sum(self._check(name, target) for name, target in self._targets.items())

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the folder: the model's, whose weights are in our own form now."""
        left_out = ("quantization_config", "torch_dtype", "auto_map")
        kept = {key: value for key, value in self._checkpoint.config.items() if key not in left_out}
        return {**kept, "dtype": self._build.precision}

    @property
    def num_steps(self) -> int:
        """Groups of parameters, and files as far as they are known."""
        return len(_groups(self._targets)) + len(self._shards)

    def _check(self, name: str, target: LoadTarget) -> int:
        """Bytes that all ranks store of a parameter. Raises ``ConfigError`` where it cannot be divided."""
        parts, dtype, found = parts_of(target), DTYPES[self._build.precision], 0
        for shard in (shards[name] for shards in self._shards if name in shards):
            if not parts:
                tensor_dtype = dtype if target.tensor is None else target.tensor.dtype
                found += math.prod(plain_piece(name, target.shape, shard).shape) * tensor_dtype.itemsize
            for index, part in enumerate(parts):
                self._check_columns(name, part, shard)
                components = part.scheme.components(target.shape[1])
                for key, piece in packed_pieces(name, index, part, target.shape[1], shard).items():
                    found += math.prod(piece.shape) * components[key].dtype.itemsize
        return found

    def _check_columns(self, name: str, part: PackedPart, shard: Shard) -> None:
        if shard.columns is None:
            return
        try:
            if "order" in part.tensors:
                raise ValueError("its columns are in the order of another rank's input (act-order)")
            part.scheme.columns(part.tensors, *shard.columns)
        except ValueError as error:
            raise ConfigError(
                f"tensor_parallel_size {self._build.tensor_parallel_size} cannot divide {name}: {error}"
            ) from None

    def write_weights(self, folder: Path, steps: _Steps) -> list[str]:
        """Fill the model a few layers at a time and write what each rank holds. Returns the tensors with NaN."""
        writers = [RankWriter(folder, rank) for rank in range(len(self._shards))]
        with_nan: list[str] = []
        with verifying(self._checkpoint):
            pass  # nothing is made of files that were changed, and nothing shown before that is known
        with torch.inference_mode():
            for group, names in _groups(self._targets).items():
                targets = {name: _with_memory(self._targets[name]) for name in names}
                with_nan += self._weights.fill(targets)
                for shards, writer in zip(self._shards, writers, strict=True):
                    for name in names:
                        if name in shards:
                            writer.add(stored_of(name, targets[name], shards[name]))
                for name in names:
                    _let_go(targets[name])
                steps.did(group)
            for writer in writers:
                writer.flush()
        return with_nan

    def manifest(self, files: Mapping[str, FileEntry], facts: ModelFacts) -> EngineManifest:
        """What engine.json says."""
        method = self._checkpoint.config.get("quantization_config") or {}
        num_packed = sum(len(forms) for forms in self._forms.values())
        return EngineManifest(
            architecture=self._architecture,
            build=self._build,
            quantization={"quant_method": method.get("quant_method"), "num_packed": num_packed},
            kv_cache_dtype=facts.kv_cache_dtype,
            kv_scales=dict(self._weights.kv_scales()),
            packed=self._forms,
            versions=library_versions(),
            files=files,
            built=datetime.now(UTC).date().isoformat(),
        )


def _groups(targets: Mapping[str, LoadTarget]) -> dict[str, list[str]]:
    """Parameters that are filled together: those of a layer, and all that are in none."""
    groups: dict[str, list[str]] = {}
    for name in targets:
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "embeddings, norm and head"
        groups.setdefault(layer, []).append(name)
    return groups


def _forms_of(target: LoadTarget) -> tuple[PartForm, ...]:
    return tuple(PartForm(scheme_to_json(part.scheme), part.num_rows) for part in parts_of(target))


def _with_memory(target: LoadTarget) -> LoadTarget:
    """The target, ready to be filled: with memory of its own, or a layer that will make its own and keep plain numbers
    as they are.
    """
    layer = target.layer
    if layer is None:
        assert target.tensor is not None
        return target._replace(tensor=torch.empty_like(target.tensor, device=_CPU))
    layer.options = layer.options._replace(device=_CPU)
    layer.weight = None
    if not layer.packed_parts:
        layer.quant = Decoded()
    return target


def _let_go(target: LoadTarget) -> None:
    if target.layer is not None:
        target.layer.weight = None
        target.layer.packed_parts = []


def _entries(folder: Path, steps: _Steps) -> dict[str, FileEntry]:
    found = {}
    for path in sorted(folder.iterdir()):
        found[path.name] = entry_of(path)
        if path.suffix == ".safetensors":
            steps.did(path.name)
    return found
