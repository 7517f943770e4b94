"""Factors that move between a product's weights and what comes into it, without changing the model's function.

AWQ and SmoothQuant choose such factors; where they may be put, the layers tell (``layers/smoothing.py``). Changes
weights in place and chooses nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend_engine.layers.linear import Linear
from backend_engine.layers.norm import RMSNorm
from backend_engine.layers.smoothing import Rows, Smoothing
from backend_engine.models.blocks import Block
from backend_engine.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Site:
    """A place for factors. producer: name in the model of the module whose output is divided. consumers: the products
    that read it, by the name of their weight; all have the same inputs.
    """

    producer: str
    consumers: Mapping[str, Linear]
    smoothing: Smoothing

    @property
    def num_channels(self) -> int:
        """Width of the factors."""
        return next(iter(self.consumers.values())).in_features


def smoothing_sites(model: CausalLM, layer_idx: int) -> list[Site]:
    """The places of one layer, in the order of the computation; no product is a consumer in two of them."""
    block = model.layers[layer_idx]
    assert isinstance(block, Block), type(block)
    names = {module: name for name, module in block.named_modules(prefix=f"layers.{layer_idx}")}
    return [
        Site(
            names[_module(smoothing)],
            {f"{names[linear]}.weight": linear for linear in smoothing.consumers},
            smoothing,
        )
        for smoothing in block.smoothable()
    ]


@torch.inference_mode()
def apply_factors(site: Site, factors: Tensor) -> list[str]:
    """Divide what the producer gives by ``factors [num_channels]``, finite and above 0, and multiply the consumers'
    columns. Returns the names of all parameters that are changed, those of the consumers' weights among them.
    """
    assert factors.shape == (site.num_channels,), (site.producer, factors.shape, site.num_channels)
    assert bool((factors > 0).all()) and bool(factors.isfinite().all()), f"{site.producer}: factors {factors}"
    producer = site.smoothing.producer
    rows = slice(producer.start, producer.start + producer.num_rows) if isinstance(producer, Rows) else slice(None)
    changed = []
    for name, parameter in _module(site.smoothing).named_parameters(recurse=False):
        part = parameter[rows]
        assert part.shape[0] == factors.shape[0], (site.producer, name, part.shape, factors.shape)
        part.div_(factors.to(part).view(-1, *[1] * (part.ndim - 1)))
        changed.append(f"{site.producer}.{name}")
    for name, linear in site.consumers.items():
        assert linear.weight is not None, f"{name} is not plain"
        linear.weight.mul_(factors.to(linear.weight))
        changed.append(name)
    return changed


def stored_parameters(model: CausalLM, names: Iterable[str]) -> dict[str, Tensor]:
    """Parameters as checkpoints store them: a norm that is stored as the distance to 1 is given as that."""
    found = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, RMSNorm) and leaf == "weight":
            found[name] = module.stored_weight().detach()
        else:
            found[name] = model.get_parameter(name).detach()
    return found


def _module(smoothing: Smoothing) -> nn.Module:
    return smoothing.producer.layer if isinstance(smoothing.producer, Rows) else smoothing.producer
