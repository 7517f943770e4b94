#!/usr/bin/env python3
"""Print what a checkpoint is, how it is quantized, and what would run it; reads headers only, no weights.

    python scripts/inspect_checkpoint.py FOLDER_OR_FILE_OR_HUB_ID

Exits with 1 when we would not run it, after saying why in one line.
"""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import bench_common  # noqa: F401 (puts the root on the path)

from backend_engine.errors import EngineError

if TYPE_CHECKING:
    from backend_engine.checkpoint.checkpoint import Checkpoint
    from backend_engine.checkpoint.stored_weights import StoredWeights
    from backend_engine.config.engine_manifest import EngineManifest

Row = tuple[str, str]


def inspect(path: str, trust_remote_code: bool) -> Iterable[Row]:
    """What there is to say, line by line; raises ``EngineError`` at the point where we would refuse it."""
    from backend_engine.checkpoint.hf_folder import architecture, stated_dtype
    from backend_engine.checkpoint.open_checkpoint import open_checkpoint
    from backend_engine.checkpoint.stored_weights import StoredWeights, TensorFiles
    from backend_engine.hub import local_path
    from backend_engine.model_engine.model_loader import describe_model, plan_memory
    from backend_engine.quantization.read_config import read_quantization

    path = local_path(path)
    checkpoint = open_checkpoint(path)
    yield "source", f"{checkpoint.kind}, {checkpoint.path}"
    yield "architecture", architecture(checkpoint.config, checkpoint.origin)
    if checkpoint.engine is not None:
        yield from engine_rows(checkpoint.engine)
        return
    files = TensorFiles(checkpoint.open_tensors())
    described = files.described(f"{checkpoint.origin} of {path}")
    yield "tensors", f"{len(files)}, {size(sum(info.num_bytes for info in described.tensors.values()))} as stored"
    yield "stated dtype", stated_dtype(checkpoint.config) or "none"
    quantization = read_quantization(checkpoint.config, described)
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method", "none")
    yield "quantization", str(method)
    yield "KV cache made for", quantization.kv_cache_dtype or "the model's dtype"
    facts = describe_model(path, trust_remote_code=trust_remote_code)
    yield "would run with", f"model_backend {facts.model_backend}, at most {facts.max_positions} tokens a request"
    plan = plan_memory(path, "float32", "cpu", facts.model_backend, trust_remote_code)
    if plan is not None:
        yield "weights in memory", f"{size(plan.num_bytes)} on a CPU, plain ones in float32"
    if facts.model_backend == "native":
        yield from forms(StoredWeights(files, quantization, described.where), checkpoint)


def engine_rows(manifest: "EngineManifest") -> Iterable[Row]:
    """What engine.json says; the checksums of the weights are not compared."""
    from backend_engine.quantization.scheme_json import scheme_from_json

    build = manifest.build
    yield "built", f"{manifest.built}, format {manifest.format_version}, with {versions(manifest)}"
    for name, value in dataclasses.asdict(build).items():
        if name != "plugins" or value:
            yield name, "chosen at load" if value is None else str(value)
    yield "KV cache made for", manifest.kv_cache_dtype or "the model's dtype"
    yield "files", f"{len(manifest.files)}, {size(sum(entry.num_bytes for entry in manifest.files.values()))}"
    kinds: dict[str, collections.Counter[str]] = {}
    for name, parts in manifest.packed.items():
        for part in parts:
            scheme = scheme_from_json(part.scheme, name)
            kinds.setdefault(kind_of(name), collections.Counter())[describe_scheme(scheme)] += 1
    for kind, counts in kinds.items():
        yield kind, ", ".join(f"{count} x {kept}" for kept, count in counts.most_common())


def versions(manifest: "EngineManifest") -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))


def kind_of(name: str) -> str:
    """The name with N in the place of numbers."""
    return ".".join("N" if piece.isdigit() else piece for piece in name.split("."))


def forms(stored: "StoredWeights", checkpoint: "Checkpoint") -> Iterable[Row]:
    """How the weights of each kind of layer are kept, in the model that would be built."""
    import torch

    from backend_engine.attention.torch_attention import TorchAttention
    from backend_engine.checkpoint.loader import check_weights
    from backend_engine.layers.parts import ModelParts
    from backend_engine.models.causal_lm import CausalLM
    from backend_engine.ops.torch_ops import TorchOps
    from backend_engine.plugins.catalog import ARCHITECTURES
    from backend_engine.quantization.deferred import Deferred
    from backend_engine.quantization.quant_method import TensorOptions
    from backend_engine.quantization.unquantized import Unquantized

    family = ARCHITECTURES.get(checkpoint.config["architectures"][0])
    options = TensorOptions(torch.float32, torch.device("meta"))
    ops = TorchOps()
    parts = ModelParts(ops, TorchAttention(ops, torch.device("cpu")), Deferred(Unquantized(pack=False)), options)
    model = CausalLM(family.from_hf(checkpoint.config, checkpoint.origin), parts)
    todo = check_weights(stored, model.load_targets(), family.rules, str(checkpoint.path))
    kinds: dict[str, collections.Counter[str]] = {}
    for name, copies in todo.copies.items():
        if len(copies[0].source.shape) > 1:
            packing = stored.format_of(name)
            kept = stored.files.describe(name).dtype if packing is None else describe_scheme(packing.scheme)
            kinds.setdefault(kind_of(name), collections.Counter())[kept] += 1
    for kind, counts in kinds.items():
        yield kind, ", ".join(f"{count} x {kept}" for kept, count in counts.most_common())


def describe_scheme(scheme: object) -> str:
    """A scheme with its settings, those that wrap another from the outside in."""
    settings = []
    for field in dataclasses.fields(scheme):  # type: ignore[arg-type]
        value = getattr(scheme, field.name)
        if dataclasses.is_dataclass(value):
            settings.append(describe_scheme(value))
        elif not isinstance(value, tuple):
            settings.append(f"{field.name} {str(value).removeprefix('torch.')}")
    return f"{type(scheme).__name__}({', '.join(settings)})"


def size(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder, a file, or an id on the Hugging Face Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="whether code in the folder may run")
    arguments = parser.parse_args()
    try:
        for what, value in inspect(arguments.checkpoint, arguments.trust_remote_code):
            print(f"{what + ':':<48} {value}")
    except EngineError as error:
        print(f"we would not run it: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
