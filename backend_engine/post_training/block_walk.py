"""``BlockWalk``: texts through a model, layer after layer, while the layers' weights are being changed.

Used by ``scripts/quantize.py``: each layer is looked at with inputs that come from the layers before it as they have
become. Between layers only the hidden states are kept. Changes no weight itself.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from backend_engine.attention.interface import IntArray
from backend_engine.attention.paged_kv import Codes, KvScales, PlainKv, paged_kv
from backend_engine.core.kv_spec import KvSpec, StateSpec
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.layers.linear import Linear
from backend_engine.layers.parts import LayerCache, LayerStep
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.model_engine.token_windows import blocks_per_window, window_inputs
from backend_engine.models.blocks import Block
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.model_inputs import ModelInputs
from backend_engine.post_training.input_statistics import InputCollector, InputStatistics

_TOKENS_PER_BLOCK = 64
_MAX_TOKENS = 4096
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max

# What a layer takes and gives, see ``Block.forward``.
Hidden = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class RecordingKv(PlainKv):
    """A cache of exact numbers that keeps the ``largest`` magnitudes of keys and values, float32 ``[2]``."""

    largest: Tensor

    def encode(self, x: Tensor, plane: int) -> Codes:
        self.largest[plane] = torch.maximum(self.largest[plane], x.abs().amax())
        return super().encode(x, plane)


@dataclass(frozen=True)
class _Batch:
    """Windows that are run together, and where they are: before the first layer, after the second, ..."""

    inputs: ModelInputs
    hidden: Hidden


class WalkedBlock:
    """One layer and what comes into it. ``linears``: its products by the name of their weight in the model."""

    def __init__(self, model: CausalLM, index: int, loaded: LoadedModel, batches: list[_Batch]) -> None:
        self.index = index
        layer = model.layers[index]
        assert isinstance(layer, Block), type(layer)
        self.block = layer
        modules = layer.named_modules(prefix=f"layers.{index}")
        self.linears = {f"{name}.weight": module for name, module in modules if isinstance(module, Linear)}
        self._model = model
        self._loaded = loaded
        self._batches = batches
        self._outputs: list[Hidden] | None = None
        self._kv_largest: Tensor | None = None

    @torch.inference_mode()
    def collect(self, hessians: Collection[str] = ()) -> dict[str, InputStatistics]:
        """Run the layer and return what comes into each of ``linears``.

        hessians: the names of those whose ``InputStatistics.hessian`` is wanted. Its memory is the square of a
        product's inputs: where there are many experts, ask for some at a time.
        """
        unknown = set(hessians) - self.linears.keys()
        assert not unknown, f"layer {self.index} has no products {sorted(unknown)}"
        device = self._loaded.options.device
        collectors = {
            name: InputCollector(linear.in_features, device, name in hessians) for name, linear in self.linears.items()
        }
        hooks = [
            linear.register_forward_pre_hook(lambda _, args, collector=collectors[name]: collector.add(args[0]))
            for name, linear in self.linears.items()
        ]
        try:
            self.run()
        finally:
            for hook in hooks:
                hook.remove()
        return {name: collector.result() for name, collector in collectors.items()}

    @torch.inference_mode()
    def run(self) -> None:
        """Run the layer as it is now; what the last run gives goes into the next layer."""
        self._outputs = None
        cache, largest = self._cache()
        steps: dict[int, LayerStep] = {}
        outputs: list[Hidden] = []
        for batch in self._batches:
            metadata = batch.inputs.attention
            size = len(metadata.q_lens_host)
            if size not in steps:
                # A layer looks at its own cache alone.
                steps[size] = self._model.layer_step(batch.inputs, [cache] * (self.index + 1))
            self._loaded.attention.prepare(metadata)
            outputs.append(self.block(*batch.hidden, steps[size]))
        self._outputs, self._kv_largest = outputs, largest

    def outputs(self) -> list[Hidden]:
        """What the last run gave, batch by batch; runs the layer if nobody has."""
        if self._outputs is None:
            self.run()
        assert self._outputs is not None
        return self._outputs

    def kv_scales(self) -> KvScales | None:
        """The scales with which the largest key (rotated) and value of the last run are the largest numbers of an fp8
        cache, E4M3; ``None`` for a layer that does not keep keys and values. 1.0 where no scale makes sense.
        """
        assert self._outputs is not None, f"layer {self.index} has not been run"
        return None if self._kv_largest is None else KvScales(*map(_scale, self._kv_largest.tolist()))

    def _cache(self) -> tuple[LayerCache, Tensor | None]:
        """A cache for the largest batch, and where the magnitudes of keys and values will be."""
        metadata = self._batches[0].inputs.attention
        num_windows, window_len = len(metadata.q_lens_host), int(metadata.q_lens_host[0])
        num_blocks = num_windows * blocks_per_window(window_len, metadata.tokens_per_block)
        spec, options = self._loaded.traits.cache_specs[self.index], self._loaded.options
        pool = KVPool([spec], num_blocks, metadata.tokens_per_block, options.dtype, options.device)
        (stored,) = pool.layers
        if isinstance(spec, StateSpec):
            assert isinstance(stored, tuple), f"layer {self.index} keeps a state in one tensor"
            return stored, None
        if not isinstance(spec, KvSpec):
            return paged_kv(stored), None
        assert isinstance(stored, Tensor), f"layer {self.index}: keys and values in {len(stored)} tensors"
        largest = torch.zeros(2, device=options.device)
        return RecordingKv((stored,), largest), largest


class BlockWalk:
    """``windows``: token ids, all of the same length; what ``load_for_calibration`` gives, over them.

    max_tokens: of what is computed at once, at least one window.
    """

    def __init__(self, loaded: LoadedModel, windows: Sequence[Sequence[int]], max_tokens: int = _MAX_TOKENS) -> None:
        assert isinstance(loaded.model, CausalLM), type(loaded.model)
        ids = np.array(windows, np.int32)
        assert ids.ndim == 2 and ids.size, f"windows of shape {ids.shape}"
        limit = loaded.traits.exact_up_to
        assert limit is None or ids.shape[1] <= limit, f"windows of {ids.shape[1]} tokens, positions up to {limit}"
        self._model = loaded.model
        self._loaded = loaded
        at_once = max(1, max_tokens // ids.shape[1])
        with torch.inference_mode():
            self._batches = [self._begin(ids[first : first + at_once]) for first in range(0, len(ids), at_once)]

    def _begin(self, windows: IntArray) -> _Batch:
        inputs = window_inputs(windows, _TOKENS_PER_BLOCK, self._loaded.options.device, with_logits=False)
        return _Batch(inputs, (self._model.embed(inputs), None))

    def blocks(self) -> Iterator[WalkedBlock]:
        """The layers in order, once. When the walk goes on, what the last run of a layer gave is what comes into the
        next one: whoever has changed weights and wants that to be seen calls ``run`` before.
        """
        batches, self._batches = self._batches, []
        assert batches, "a walk is walked once"
        for index in range(self._model.spec.num_layers):
            walked = WalkedBlock(self._model, index, self._loaded, batches)
            yield walked
            outputs = walked.outputs()
            batches = [replace(batch, hidden=hidden) for batch, hidden in zip(batches, outputs, strict=True)]


def _scale(largest: float) -> float:
    scale = largest / _LARGEST_FP8
    return scale if torch.finfo(torch.float32).tiny <= scale <= torch.finfo(torch.float32).max else 1.0
