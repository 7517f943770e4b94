"""What each rank holds: all of a model's parameters once, and of the right heads: models of the ranks, filled with what
they hold, compute what the whole model does.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend_engine.attention.paged_kv import paged_kv
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.errors import ConfigError
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.layers.attention_layer import AttentionDecl, AttentionLayer
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.model_engine.memory_plan import outline
from backend_engine.model_engine.rank_shards import Shard, rank_shards
from backend_engine.model_engine.rank_spec import rank_of
from backend_engine.models.arch_spec import ArchSpec
from backend_engine.models.causal_lm import CausalLM
from backend_engine.models.weight_rules import LoadTarget
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.plugins.catalog import ARCHITECTURES
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized
from tests.support.attention_cache import CPU, metadata_of
from tests.support.tiny_models import TINY_MODELS

TOKENS, BLOCK = 13, 4
Ranks = list[dict[str, Shard]]


def spec_of(name: str, **values: Any) -> ArchSpec:
    row = TINY_MODELS[name]
    config = {**json.loads(row.config().to_json_string()), **values}
    spec: ArchSpec = ARCHITECTURES.get(row.architecture).from_hf(config)
    return spec


def is_recurrent(spec: ArchSpec) -> bool:
    return any(isinstance(layer.mixer, Mamba2Decl) for layer in spec.layers)


SPECS = {name: spec_of(name) for name in TINY_MODELS}
# Sizes that no number of ranks divides: inner widths, the vocabulary; and more ranks than there are rows to share.
SPECS["llama_uneven"] = spec_of("llama", intermediate_size=110, vocab_size=97)
SPECS["gpt2_uneven"] = spec_of("gpt2", n_inner=77, vocab_size=99)
SPECS["llama_narrow"] = spec_of("llama", intermediate_size=5, vocab_size=6)
SPECS["qwen2_moe_uneven"] = spec_of("qwen2_moe", shared_expert_intermediate_size=33)
SPECS["llama_one_kv"] = spec_of("llama", num_key_value_heads=1)
DIVIDED = [(name, tp) for name, spec in SPECS.items() if not is_recurrent(spec) for tp in (2, 4)]
LAYOUTS = [
    (name, tp, pp)
    for name, spec in SPECS.items()
    for tp in ((1,) if is_recurrent(spec) else (1, 2, 4))
    for pp in (1, 2)
]


def held(target: LoadTarget, shard: Shard) -> Iterator[tuple[slice, slice]]:
    first, last = shard.columns or (0, target.shape[1] if len(target.shape) > 1 else 1)
    for start, stop in shard.rows:
        assert 0 <= start < stop <= target.shape[0] and 0 <= first < last, shard
        yield slice(start, stop), slice(first, last)


@pytest.mark.parametrize(("name", "tp", "pp"), LAYOUTS)
def test_the_ranks_hold_every_parameter_exactly(name: str, tp: int, pp: int) -> None:
    spec = SPECS[name]
    targets = outline(spec, torch.float32).load_targets()
    ranks = rank_shards(spec, tp, pp)
    assert len(ranks) == tp * pp and {key for rank in ranks for key in rank} == targets.keys()
    rank_targets = outline(rank_of(spec, tp), torch.float32).load_targets()
    for parameter, target in targets.items():
        shards = {rank[parameter] for rank in ranks if parameter in rank}
        pieces = {
            (rows.start, rows.stop, columns.start, columns.stop) for s in shards for rows, columns in held(target, s)
        }
        count = np.zeros((target.shape[0], target.shape[1] if len(target.shape) > 1 else 1), np.int32)
        for start, stop, first, last in pieces:
            count[start:stop, first:last] += 1
        assert (count == 1).all(), parameter
        # No rank has more room than the model that is planned for it.
        rank_rows, *rank_columns = rank_targets[parameter].shape
        for shard in shards:
            assert sum(stop - start for start, stop in shard.rows) <= rank_rows
            assert shard.columns is None or shard.columns[1] - shard.columns[0] <= rank_columns[0]
        assert all(parameter in rank for rank in ranks) or ".experts." in parameter or pp > 1 or "narrow" in name


@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, tp in DIVIDED if tp == 2])
def test_stages_hold_layers_and_the_ends(name: str, tp: int) -> None:
    spec = SPECS[name]
    ranks, flat = rank_shards(spec, tp, 2), rank_shards(spec, tp, 1)
    first_half = -(-spec.num_layers // 2)
    for stage in (0, 1):
        for tp_rank in range(tp):
            layers = range(first_half) if stage == 0 else range(first_half, spec.num_layers)
            ends = ("embed_",) if stage == 0 else ("norm.", "lm_head.", *(["embed_tokens."] * spec.tie_embeddings))
            beginnings = (*ends, *(f"layers.{i}." for i in layers))
            expected = {name: shard for name, shard in flat[tp_rank].items() if name.startswith(beginnings)}
            assert ranks[stage * tp + tp_rank] == expected


def test_numbers_worked_out_by_hand() -> None:
    """4 heads of 16 over 64 wide, 2 of keys and values: rows of q 0 to 64, of k 64 to 96, of v 96 to 128."""
    name = "layers.1.mixer.qkv_proj.weight"
    assert [rank[name].rows for rank in rank_shards(SPECS["llama"], 2, 1)] == [
        ((0, 32), (64, 80), (96, 112)), ((32, 64), (80, 96), (112, 128)),
    ]  # fmt: skip
    four = rank_shards(SPECS["llama"], 4, 2)
    assert [name in rank for rank in four] == [False] * 4 + [True] * 4
    assert [rank[name].rows for rank in four[4:]] == [
        ((0, 16), (64, 80), (96, 112)), ((16, 32), (64, 80), (96, 112)),
        ((32, 48), (80, 96), (112, 128)), ((48, 64), (80, 96), (112, 128)),
    ]  # fmt: skip
    assert [rank["layers.1.mixer.o_proj.weight"] for rank in four[4:]] == [
        Shard(((0, 64),), (start, start + 16)) for start in (0, 16, 32, 48)
    ]
    assert [rank.get("embed_tokens.weight") for rank in rank_shards(SPECS["llama_narrow"], 4, 1)] == [
        Shard(((0, 2),)), Shard(((2, 4),)), Shard(((4, 6),)), None,
    ]  # fmt: skip
    experts = [
        [int(key.split(".")[4]) for key in rank if ".experts." in key and key.startswith("layers.0") and "down" in key]
        for rank in rank_shards(SPECS["mixtral_windowed"], 4, 1)
    ]
    assert experts == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize(
    ("name", "tp", "pp", "message"),
    [
        ("llama", 3, 1, "tensor_parallel_size 3 does not divide the heads of the model; use 1, 2, 4"),
        ("llama", 0, 1, "tensor_parallel_size 0 is not allowed; use a whole number of 1 or more"),
        ("llama", 1, -1, "pipeline_parallel_size -1 is not allowed; use a whole number of 1 or more"),
        ("llama", 2, 3, "pipeline_parallel_size 3 is more than the model can be divided into; use 1 to 2"),
        ("mamba2", 2, 1, "tensor_parallel_size 2: recurrent layers are not divided; use 1"),
        ("granite_hybrid", 2, 2, "tensor_parallel_size 2: recurrent layers are not divided; use 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name: str, tp: int, pp: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rank_shards(SPECS[name], tp, pp)
    assert str(caught.value) == message


class Built(NamedTuple):
    """A model, and the pool of its own that its attention works on."""

    model: CausalLM
    backend: TorchAttention
    caches: list[Any]

    def step(self) -> LayerStep:
        table = np.arange(-(-TOKENS // BLOCK), dtype=np.int32)[None]
        metadata = metadata_of([TOKENS], [TOKENS], table, BLOCK)
        self.backend.prepare(metadata)
        positions = torch.arange(TOKENS)
        ropes = tuple(rotary(positions, torch.full((TOKENS,), TOKENS)) for rotary in self.model.rotaries)
        return LayerStep(ropes, self.caches, metadata, None)


def build(spec: ArchSpec) -> Built:
    """All parameters 0."""
    backend = TorchAttention(TorchOps(), CPU)
    parts = ModelParts(TorchOps(), backend, Unquantized(), TensorOptions(torch.float32, CPU))
    model = CausalLM(spec, parts)
    for parameter in model.parameters():
        if parameter.device == CPU:
            parameter.data.zero_()
    pool = KVPool(spec.cache_specs, -(-TOKENS // BLOCK), BLOCK, torch.float32, CPU)
    return Built(model, backend, [paged_kv(layer) for layer in pool.layers])


def tensor_of(target: LoadTarget) -> Tensor:
    tensor = target.tensor if target.layer is None else target.layer.weight
    assert tensor is not None
    return tensor.data


def fill(built: Built, weights: dict[str, Tensor], shards: dict[str, Shard], targets: dict[str, LoadTarget]) -> None:
    """Put what the rank holds into its model. ``targets``: of the whole model. What is not held stays 0."""
    for name, target in built.model.load_targets().items():
        if name not in shards:
            continue
        pieces = [weights[name][rows, columns] if weights[name].ndim > 1 else weights[name][rows]
                  for rows, columns in held(targets[name], shards[name])]  # fmt: skip
        room, start = tensor_of(target), 0
        # Parts that are smaller than the room for them are followed by zeros.
        sizes = target.part_sizes if len(pieces) == len(target.part_sizes) else (room.shape[0],)
        assert len(pieces) == len(sizes), name
        for piece, size in zip(pieces, sizes, strict=True):
            place = room[start : start + piece.shape[0]]
            (place[:, : piece.shape[1]] if place.ndim == 2 else place).copy_(piece)
            start += size


class KnownNorm(nn.Module):
    """A norm of heads that are on several ranks: each has its own weights, and all have the sum over all heads, which
    ranks would exchange.
    """

    def __init__(self, weight: Tensor, factor: Tensor) -> None:
        super().__init__()
        self.weight, self.factor = weight, factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * self.weight


def divide(spec: ArchSpec, tp: int) -> tuple[Built, list[Built], Ranks]:
    """The whole model with random weights, and the models of its ranks."""
    whole = build(spec)
    generator = torch.Generator().manual_seed(tp)
    targets = whole.model.load_targets()
    weights = {}
    for name, target in targets.items():
        tensor_of(target).normal_(std=0.4, generator=generator)
        weights[name] = tensor_of(target).clone()
    ranks, shards = [], rank_shards(spec, tp, 1)
    for held_by_rank in shards:
        ranks.append(build(rank_of(spec, tp)))
        fill(ranks[-1], weights, held_by_rank, targets)
    for built in (whole, *ranks):
        built.model.after_loading()
    return whole, ranks, shards


def share_norms(whole: AttentionLayer, ranks: list[AttentionLayer], x: Tensor) -> None:
    qkv = whole.qkv_proj(x)
    q_size, kv_size, _ = whole.qkv_proj.out_sizes
    for name, part in (("q_norm", qkv[:, :q_size]), ("k_norm", qkv[:, q_size : q_size + kv_size])):
        eps = getattr(whole, name)._decl.eps
        factor = (part.square().mean(-1, keepdim=True) + eps).rsqrt()
        for rank in ranks:
            setattr(rank, name, KnownNorm(getattr(rank, name).weight, factor))


@torch.inference_mode()
@pytest.mark.parametrize(("name", "tp"), DIVIDED)
def test_ranks_compute_together_what_the_whole_computes(name: str, tp: int) -> None:
    spec = SPECS[name]
    whole, ranks, shards = divide(spec, tp)
    x = torch.randn(TOKENS, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    steps = [built.step() for built in (whole, *ranks)]
    for i, layer in enumerate(whole.model.layers):
        mixers = [built.model.layers[i].mixer for built in ranks]
        decl = spec.layers[i].mixer
        if isinstance(decl, AttentionDecl) and decl.qk_norm is not None and not decl.qk_norm.per_head:
            share_norms(layer.mixer, mixers, x)
        expected = layer.mixer(x, steps[0])
        total = sum(mixer(x, step) for mixer, step in zip(mixers, steps[1:], strict=True))
        check(total, expected, layer.mixer.o_proj.bias, tp)
        down = getattr(layer.mlp, "down_proj", None)
        total = sum(built.model.layers[i].mlp(x) for built in ranks)
        check(total, layer.mlp(x), None if down is None else down.bias, tp)
    check_ends(spec, whole, ranks, shards)


def check(total: Tensor, expected: Tensor, bias: Tensor | None, tp: int) -> None:
    """``bias``: of a product whose columns are divided, which every rank adds."""
    if bias is not None:
        total = total - (tp - 1) * bias
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(total, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def check_ends(spec: ArchSpec, whole: Built, ranks: list[Built], shards: Ranks) -> None:
    """Every rank looks its own tokens up and makes logits of them."""
    ids = torch.arange(spec.vocab_size)
    x = torch.randn(TOKENS, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    table = torch.zeros(spec.vocab_size, spec.hidden_size)
    logits = []
    head = "embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    for built, held_by_rank in zip(ranks, shards, strict=True):
        if "embed_tokens.weight" in held_by_rank:
            ((start, stop),) = held_by_rank["embed_tokens.weight"].rows
            table[start:stop] += built.model.embed_tokens(ids[: stop - start])
        if head in held_by_rank:
            ((start, stop),) = held_by_rank[head].rows
            logits.append(built.model.lm_head(x)[:, : stop - start])
    assert torch.equal(table, whole.model.embed_tokens(ids))
    torch.testing.assert_close(torch.cat(logits, 1), whole.model.lm_head(x), atol=1e-5, rtol=1e-5)


def test_a_wrong_order_of_heads_would_be_seen() -> None:
    """The ranks' shares of keys swapped: the sum is another."""
    spec = dataclasses.replace(SPECS["llama"], layers=SPECS["llama"].layers[:1])
    whole, ranks, _ = divide(spec, 2)
    x = torch.randn(TOKENS, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = whole.model.layers[0].mixer(x, whole.step())
        projections = [built.model.layers[0].mixer.o_proj for built in ranks]
        for built, other in zip(ranks, reversed(projections), strict=True):
            built.model.layers[0].mixer.o_proj = other
        total = sum(built.model.layers[0].mixer(x, built.step()) for built in ranks)
        assert (total - expected).abs().max() > 0.1
