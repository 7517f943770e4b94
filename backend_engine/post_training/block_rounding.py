"""``BlockRounding``: the weights of one layer after the other, smoothed and rounded as a recipe says.

Used by ``quantize_model.py``, which walks the model. Changes the model's weights in place: afterwards they are numbers
of the grid, and the layers after it see what became of it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.errors import ConfigError
from backend_engine.layers.linear import Linear
from backend_engine.models.causal_lm import CausalLM
from backend_engine.post_training.block_walk import WalkedBlock
from backend_engine.post_training.export import QuantizedWeight, stacked_together
from backend_engine.post_training.input_statistics import InputStatistics
from backend_engine.post_training.recipes import Recipe
from backend_engine.post_training.smoothing import Site, apply_factors, smoothing_sites
from backend_engine.post_training.source_weights import SourceWeights
from backend_engine.quantization.calibrated.awq import best_factors, kindest_to_compensation
from backend_engine.quantization.calibrated.gptq import round_with_compensation
from backend_engine.quantization.calibrated.rounding_error import round_to_nearest
from backend_engine.quantization.calibrated.smoothquant import smoothing_factors
from backend_engine.quantization.grids.weight_grid import Scales

# Of the statistics that are collected in one pass over a layer; where experts need more, there are more passes.
_MAX_HESSIAN_BYTES = 2 << 30


class RoundingNote(NamedTuple):
    """What rounding did to a product's output on the texts. relative_error: share of its energy that the error is,
    ``None`` = not measured. is_plain: it was rounded to the nearest although it should have been compensated, since no
    text came through it or its statistics were of no use.
    """

    name: str
    relative_error: float | None
    is_plain: bool


class BlockRounding:
    """``linears``: the products to quantize, by the names of their weights. The results are ``weights``, which read the
    model when they are asked for, ``changed``, the names of all other parameters that are not what they were, and
    ``notes``.
    """

    def __init__(self, model: CausalLM, recipe: Recipe, linears: Mapping[str, Linear], source: SourceWeights) -> None:
        self.weights: dict[str, QuantizedWeight] = {}
        self.changed: list[str] = []
        self.notes: list[RoundingNote] = []
        self._model = model
        self._recipe = recipe
        self._linears = linears
        self._stacks = [[name for name in names if name in linears] for names in stacked_together(source)]

    def round_layer(self, index: int) -> None:
        """Round the products of layer ``index`` without texts, each number for itself."""
        names = self._names_in(index)
        self._round(names, self._fit(names), {})

    def round_walked(self, block: WalkedBlock) -> None:
        """Smooth and round the products of the layer, and let it run with what became of them."""
        names, recipe = self._names_in(block.index), self._recipe
        sites = self._sites(block.index)
        firsts = [next(iter(site.consumers)) for site in sites]
        hessians = names if recipe.compensates else []
        together = list(dict.fromkeys([*(firsts if recipe.smoothing == "awq" else []), *hessians]))
        if self._num_bytes(together) <= _MAX_HESSIAN_BYTES:
            statistics = block.collect(together) if recipe.is_calibrated else {}
            for site in sites:
                self._smooth(site, statistics)
            self._round(names, self._fit(names), statistics)
        else:
            for some in self._passes(firsts):
                statistics = block.collect(some if recipe.smoothing == "awq" else ())
                for site in sites:
                    if next(iter(site.consumers)) in some:
                        self._smooth(site, statistics)
            scales = self._fit(names)
            for some in self._passes(hessians):
                self._round(some, scales, block.collect(some))
        block.run()

    def _names_in(self, index: int) -> list[str]:
        return [name for name in self._linears if name.startswith(f"layers.{index}.")]

    def _sites(self, index: int) -> list[Site]:
        """Where smoothing helps: before products that will be rounded."""
        if self._recipe.smoothing == "none":
            return []
        return [site for site in smoothing_sites(self._model, index) if site.consumers.keys() & self._linears.keys()]

    def _num_bytes(self, names: Sequence[str]) -> int:
        """Of the Hessians of these products."""
        return sum(4 * self._model.get_parameter(name).shape[1] ** 2 for name in names)

    def _passes(self, names: Sequence[str]) -> list[list[str]]:
        """The names, in lists whose Hessians are not too large together, unless one alone is."""
        found: list[list[str]] = []
        for name in names:
            if not found or self._num_bytes([*found[-1], name]) > _MAX_HESSIAN_BYTES:
                found.append([])
            found[-1].append(name)
        return found

    @torch.inference_mode()
    def _smooth(self, site: Site, statistics: dict[str, InputStatistics]) -> None:
        """Choose factors and apply them; ``statistics`` are then those of the divided inputs."""
        of_input = statistics[next(iter(site.consumers))]
        weights = [_weight(linear) for name, linear in site.consumers.items() if name in self._linears]
        if not of_input.num_tokens:
            return
        try:
            if self._recipe.smoothing == "awq":
                assert of_input.hessian is not None, site.producer
                hessian, grid = of_input.hessian, self._recipe.grid
                factors = best_factors(weights, hessian, of_input.mean_abs, self._recipe.search_grid)
                if self._recipe.compensates:
                    factors = kindest_to_compensation(factors, weights, hessian, grid)
            else:
                factors = smoothing_factors(of_input.amax, weights)
        except ValueError as error:
            raise ConfigError(f"inputs of {next(iter(site.consumers))}: {error}") from None
        changed = apply_factors(site, factors)
        self.changed += [name for name in changed if name not in self._linears and name not in self.changed]
        for name in site.consumers:
            statistics[name] = statistics[name].divided_by(factors)

    @torch.inference_mode()
    def _fit(self, names: Sequence[str]) -> dict[str, Scales]:
        """Scales of the products of a layer; those that a checkpoint stacks share a scale of the tensor."""
        found: dict[str, Scales] = {}
        for stack in [stack for stack in self._stacks if stack and stack[0] in names]:
            first = self._fit_one(stack[0], _weight(self._linears[stack[0]]))
            if first.tensor_scale is not None:
                weights = [_weight(self._linears[name]) for name in stack]
                together = self._fit_one(stack[0], torch.cat(weights))
                rows = torch.split(together.scale, [len(weight) for weight in weights])
                found |= {name: together._replace(scale=scale) for name, scale in zip(stack, rows, strict=True)}
        return found | {n: self._fit_one(n, _weight(self._linears[n])) for n in names if n not in found}

    def _fit_one(self, name: str, weight: Tensor) -> Scales:
        try:
            return self._recipe.grid.fit(weight)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None

    @torch.inference_mode()
    def _round(
        self, names: Sequence[str], scales: Mapping[str, Scales], statistics: Mapping[str, InputStatistics]
    ) -> None:
        grid = self._recipe.grid
        for name in names:
            weight = _weight(self._linears[name])
            of_input = statistics.get(name)
            relative_error, is_plain = None, self._recipe.compensates
            if self._recipe.compensates and of_input is not None and of_input.hessian is not None:
                try:
                    found = round_with_compensation(weight, of_input.hessian, grid, scales[name])
                except ValueError as error:
                    raise ConfigError(f"{name}: {error}") from None
                rounded, relative_error, is_plain = found.rounded, found.relative_error, found.damping is None
            else:
                rounded = round_to_nearest(weight, grid, scales[name])
            weight.copy_(rounded)
            self.weights[name] = QuantizedWeight(functools.partial(_weight, self._linears[name]), scales[name])
            self.notes.append(RoundingNote(name, relative_error, is_plain))


def _weight(linear: Linear) -> Tensor:
    assert linear.weight is not None, "a packed weight in a model for calibration"
    return linear.weight.detach()
