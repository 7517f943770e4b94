"""``quantize_checkpoint``: a checkpoint in any format -> a Hugging Face folder with quantized weights.

Called by ``scripts/quantize.py``. Goes through the model layer by layer; each is rounded for inputs that come from the
layers before it as they have become. Chooses no format: ``recipes.py`` says what is done.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backend_engine.builder.model_files import check_model_files
from backend_engine.builder.new_folder import new_folder
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.loader import Progress
from backend_engine.errors import ConfigError
from backend_engine.layers.attention_layer import AttentionLayer
from backend_engine.layers.linear import Linear
from backend_engine.layers.mlp import GatedMlp
from backend_engine.models.causal_lm import CausalLM
from backend_engine.post_training.block_rounding import BlockRounding, RoundingNote
from backend_engine.post_training.block_walk import BlockWalk
from backend_engine.post_training.calibration_model import load_for_calibration
from backend_engine.post_training.export import QuantizedModel, export_bytes, write_quantized
from backend_engine.post_training.recipes import KV_SCHEMES, Recipe, check_kv_dtype
from backend_engine.post_training.smoothing import stored_parameters
from backend_engine.post_training.source_weights import SourceWeights
from backend_engine.quantization.deferred import Deferred


class QuantizationReport(NamedTuple):
    """num_weights: products that were quantized. left_plain: products that were not, each with the reason. rounding:
    what was noteworthy or measured about each weight. notes: what is worth a line in a log.
    """

    num_weights: int
    left_plain: Mapping[str, str]
    rounding: tuple[RoundingNote, ...]
    notes: tuple[str, ...]


def quantize_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    recipe: Recipe,
    windows: Sequence[Sequence[int]],
    kv_cache_dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write the folder ``output``, which must not exist.

    windows: token ids to calibrate with, all of the same length; may be empty where nothing depends on them.
    kv_cache_dtype: a key of ``KV_SCHEMES``. Takes the memory of the whole model in float32. Raises ``ConfigError`` for
    an argument that is not allowed and for a model that the recipe does not fit, ``ModelLoadError`` for what is wrong
    with the checkpoint.
    """
    check_kv_dtype(kv_cache_dtype)
    needs_texts = recipe.is_calibrated or kv_cache_dtype == "fp8"
    if needs_texts and not windows:
        raise ConfigError("there are no texts to calibrate with, and the weights or the KV cache's scales need some")
    source = SourceWeights.of(checkpoint)
    chosen, left_plain = products(source, recipe)
    if not chosen:
        name, reason = next(iter(left_plain.items()), ("its layers", "have none"))
        raise ConfigError(f"{checkpoint.path} has no product that the format can hold; {name}: {reason}")
    check_model_files(checkpoint, trust_remote_code)
    with new_folder(output, export_bytes(source, dict.fromkeys(chosen, recipe.grid))) as folder:
        loaded = load_for_calibration(checkpoint, device, progress)
        assert isinstance(loaded.model, CausalLM), type(loaded.model)
        linears = {f"{name}.weight": m for name, m in loaded.model.named_modules() if isinstance(m, Linear)}
        left_plain |= dict.fromkeys((name for name in chosen if name not in linears), "the layer takes it apart")
        rounding = BlockRounding(
            loaded.model, recipe, {name: linears[name] for name in chosen if name in linears}, source
        )
        walked = BlockWalk(loaded, windows) if needs_texts else None
        kv_scales = _round_layers(loaded.model.spec.num_layers, rounding, walked, progress)
        model = QuantizedModel(
            recipe.grid,
            rounding.weights,
            {name: t.to(source.dtype) for name, t in stored_parameters(loaded.model, rounding.changed).items()},
            recipe.inputs,
            _inputs_kept(loaded.model, recipe),
            KV_SCHEMES[kv_cache_dtype],
            kv_scales if kv_cache_dtype == "fp8" else {},
        )
        notes = write_quantized(checkpoint, source, folder, model, trust_remote_code, progress)
    return QuantizationReport(len(rounding.weights), left_plain, tuple(rounding.notes), notes)


def _inputs_kept(model: CausalLM, recipe: Recipe) -> frozenset[str]:
    """The products whose inputs are not rounded, by the names of their weights."""
    kept = []
    for path, module in model.named_modules():
        if recipe.keeps_gated_inputs and isinstance(module, GatedMlp):
            kept.append(f"{path}.down_proj.weight")
        if recipe.keeps_attention_inputs and isinstance(module, AttentionLayer):
            kept.append(f"{path}.qkv_proj.weight")
    return frozenset(kept)


def products(source: SourceWeights, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """The layers' products that can have the recipe's grid, by the names of their weights, and those that cannot, each
    with the reason. Routers, gates, embeddings and the head are none of them.
    """
    chosen, left_plain = [], {}
    for name, target in source.targets.items():
        if target.layer is None or not isinstance(target.layer.quant, Deferred) or not name.startswith("layers."):
            continue
        problem = recipe.grid.problem_with(target.shape[1])
        if problem is None:
            chosen.append(name)
        else:
            left_plain[name] = problem
    return chosen, left_plain


def _round_layers(
    num_layers: int, rounding: BlockRounding, walk: BlockWalk | None, progress: Progress | None
) -> dict[int, tuple[float, float]]:
    """Round all layers, with texts if there are any. Returns scales for an fp8 cache, by layer, where texts tell."""
    kv_scales: dict[int, tuple[float, float]] = {}
    blocks = itertools.repeat(None, num_layers) if walk is None else walk.blocks()
    for index, block in enumerate(blocks):
        if block is None:
            rounding.round_layer(index)
        else:
            rounding.round_walked(block)
            scales = block.kv_scales()
            if scales is not None:
                kv_scales[index] = (scales.k, scales.v)
        if progress is not None:
            progress(index + 1, num_layers, f"layer {index}")
    return kv_scales
