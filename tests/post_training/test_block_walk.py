"""Walking a model layer by layer: the same answers as in one pass, and statistics as transformers' modules see them."""

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_engine.attention.paged_kv import KvScales
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.core.kv_spec import KvSpec
from backend_engine.layers.linear import Linear
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.post_training import block_walk as module
from backend_engine.post_training.block_walk import BlockWalk
from backend_engine.post_training.calibration_model import load_for_calibration
from tests.support.parity import prompt
from tests.support.tiny_models import TINY_MODELS, build_tiny_model
from tests.support.window_logits import window_logits

WINDOWS = [prompt(27, seed) for seed in range(5)]
NUM_TOKENS = 5 * 27
FUSED = {"mixer.qkv_proj": "self_attn.q_proj", "mixer.o_proj": "self_attn.o_proj",
         "mlp.gate_up_proj": "mlp.gate_proj", "mlp.down_proj": "mlp.down_proj"}  # fmt: skip


def opened(folder: Path) -> LoadedModel:
    return load_for_calibration(open_checkpoint(folder), "cpu")


@torch.inference_mode()
def seen_by_transformers(model: Any, run: Callable[[], Any]) -> dict[str, Tensor]:
    """What came into each linear module of ``model`` during ``run``, ``[num_tokens, in_features]`` in float64."""
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        linear.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2).double())
        )
        for name, linear in model.named_modules()
        if isinstance(linear, torch.nn.Linear)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def check_statistics(stats: dict[str, module.InputStatistics], index: int, seen: dict[str, Tensor]) -> None:
    for ours, theirs in FUSED.items():
        found, x = stats[f"layers.{index}.{ours}.weight"], seen[f"model.layers.{index}.{theirs}"]
        assert found.num_tokens == len(x) == NUM_TOKENS
        assert found.hessian is not None and found.hessian.dtype == found.amax.dtype == torch.float32
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found.amax.double(), x.abs().amax(0), **close)
        torch.testing.assert_close(found.mean_abs.double(), x.abs().mean(0), **close)
        torch.testing.assert_close(found.hessian.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_an_idle_walk_is_a_forward_pass(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    loaded = opened(tmp_path)
    found: list[Tensor] = []
    num_products = 0
    # Two windows at once, and one left over.
    for block in BlockWalk(loaded, WINDOWS, max_tokens=2 * 27 + 5).blocks():
        if block.index % 2:
            stats = block.collect()
            assert all(entry.hessian is None for entry in stats.values())
            assert any(entry.num_tokens == NUM_TOKENS for entry in stats.values())
        num_products += len(block.linears)
        last = block.outputs()
    assert [len(x) for x, _ in last] == [54, 54, 27]
    with torch.inference_mode():
        found = [loaded.model.logits_of(x, residual, torch.arange(len(x), dtype=torch.int32)) for x, residual in last]
    torch.testing.assert_close(torch.cat(found), window_logits(loaded, WINDOWS), rtol=1e-4, atol=1e-4)
    assert num_products == sum(isinstance(part, Linear) for part in loaded.model.layers.modules())


def test_statistics_are_those_of_the_inputs(tmp_path: Path) -> None:
    reference = build_tiny_model("llama", tmp_path)
    seen = seen_by_transformers(reference, lambda: reference(torch.tensor(WINDOWS), use_cache=False))
    for block in BlockWalk(opened(tmp_path), WINDOWS, max_tokens=60).blocks():
        check_statistics(block.collect(block.linears), block.index, seen)


def test_only_wanted_hessians_are_made(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    block = next(BlockWalk(opened(tmp_path), WINDOWS).blocks())
    down = "layers.0.mlp.down_proj.weight"
    stats = block.collect([down])
    assert [name for name, entry in stats.items() if entry.hessian is not None] == [down]
    with pytest.raises(AssertionError, match="no products"):
        block.collect(["layers.1.mlp.down_proj.weight"])
    # No hook is left behind.
    again = block.collect()
    assert all(again[name].num_tokens == NUM_TOKENS for name in stats)
    assert not any(linear._forward_pre_hooks for linear in block.linears.values())


@pytest.mark.parametrize("is_rerun", [True, False])
def test_the_next_layer_sees_changed_weights_if_the_layer_is_run_again(is_rerun: bool, tmp_path: Path) -> None:
    reference = build_tiny_model("llama", tmp_path)
    inputs = torch.tensor(WINDOWS)
    blocks = BlockWalk(opened(tmp_path), WINDOWS, max_tokens=60).blocks()
    first = next(blocks)
    first.collect()
    with torch.inference_mode():
        first.linears["layers.0.mlp.down_proj.weight"].weight.mul_(-0.5)
        if is_rerun:
            first.run()
            reference.model.layers[0].mlp.down_proj.weight.mul_(-0.5)
    seen = seen_by_transformers(reference, lambda: reference(inputs, use_cache=False))
    second = next(blocks)
    check_statistics(second.collect(second.linears), 1, seen)
    assert next(blocks, None) is None


def test_statistics_after_smoothing_are_those_of_smoothed_inputs(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    block = next(BlockWalk(opened(tmp_path), WINDOWS).blocks())
    name = "layers.0.mixer.qkv_proj.weight"
    factors = torch.rand(64) + 0.5
    expected = block.collect([name])[name].divided_by(factors)
    with torch.inference_mode():
        block.block.mixer_norm.weight.div_(factors)
    found = block.collect([name])[name]
    for field in ("amax", "mean_abs", "hessian"):
        torch.testing.assert_close(getattr(expected, field), getattr(found, field), rtol=1e-5, atol=1e-5)
    without = dataclasses.replace(found, hessian=None).divided_by(factors)
    assert without.hessian is None and without.num_tokens == NUM_TOKENS


@pytest.mark.parametrize("windows", [WINDOWS, [[7]]], ids=["many tokens", "one token"])
def test_experts_get_the_tokens_that_chose_them(windows: list[list[int]], tmp_path: Path) -> None:
    build_tiny_model("mixtral", tmp_path)
    loaded = opened(tmp_path)
    router = loaded.model.layers[0].mlp.router
    with torch.inference_mode():
        # All tokens see the same scores: experts 5 and 6 are chosen, the others by nobody.
        loaded.model.layers[0].mlp_norm.weight.zero_()
        router.weight.zero_()
    router.bias = torch.nn.Parameter(torch.eye(8)[5] + torch.eye(8)[6], requires_grad=False)
    num_tokens = len(windows) * len(windows[0])
    stats = next(BlockWalk(loaded, windows).blocks()).collect(["layers.0.mlp.experts.2.down_proj.weight"])
    for expert, name in itertools.product(range(8), ("gate_up_proj", "down_proj")):
        entry = stats[f"layers.0.mlp.experts.{expert}.{name}.weight"]
        assert entry.num_tokens == (num_tokens if expert in (5, 6) else 0)
    assert stats["layers.0.mlp.router.weight"].num_tokens == num_tokens
    unused = stats["layers.0.mlp.experts.2.down_proj.weight"]
    assert unused.hessian is not None and not unused.hessian.any()
    assert not unused.amax.any() and not unused.mean_abs.any()


def test_experts_share_out_all_tokens(tmp_path: Path) -> None:
    build_tiny_model("mixtral", tmp_path)
    stats = next(BlockWalk(opened(tmp_path), WINDOWS, max_tokens=60).blocks()).collect()
    of_experts = [entry.num_tokens for name, entry in stats.items() if re.search(r"experts\.\d+\.down", name)]
    assert len(of_experts) == 8 and sum(of_experts) == 2 * NUM_TOKENS


def test_scales_of_an_fp8_cache_hold_the_largest_key_and_value(tmp_path: Path) -> None:
    reference = build_tiny_model("qwen3", tmp_path)
    with torch.inference_mode():
        cache = reference(torch.tensor(WINDOWS), use_cache=True).past_key_values
    for block in BlockWalk(opened(tmp_path), WINDOWS, max_tokens=60).blocks():
        block.run()
        layer = cache.layers[block.index]
        expected = (float(layer.keys.abs().max()) / 448, float(layer.values.abs().max()) / 448)
        assert block.kv_scales() == pytest.approx(expected, rel=1e-5)


def test_a_rerun_has_scales_of_its_own_and_nothing_has_none(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    block = next(BlockWalk(opened(tmp_path), WINDOWS).blocks())
    with pytest.raises(AssertionError, match="not been run"):
        block.kv_scales()
    block.run()
    before = block.kv_scales()
    qkv = block.linears["layers.0.mixer.qkv_proj.weight"]
    with torch.inference_mode():
        qkv.weight.mul_(0.5)
        block.run()
    assert before is not None and block.kv_scales() == pytest.approx((before.k / 2, before.v / 2), rel=1e-5)
    for nonsense in (0.0, torch.nan, torch.inf, 1e-42):
        with torch.inference_mode():
            qkv.weight.fill_(nonsense)
            block.run()
        assert block.kv_scales() == KvScales(1.0, 1.0)


@pytest.mark.parametrize("name", ["deepseek_v2", "granite_hybrid"])
def test_layers_without_keys_and_values_have_no_scales(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    loaded = opened(tmp_path)
    for block in BlockWalk(loaded, WINDOWS).blocks():
        block.run()
        has_keys = isinstance(loaded.traits.cache_specs[block.index], KvSpec)
        assert (block.kv_scales() is not None) == has_keys


def test_between_layers_there_are_hidden_states_only(tmp_path: Path) -> None:
    """A walk is over once it has been walked, and windows have to be alike."""
    build_tiny_model("llama", tmp_path)
    loaded = opened(tmp_path)
    walk = BlockWalk(loaded, WINDOWS)
    assert [block.index for block in walk.blocks()] == [0, 1]
    with pytest.raises(AssertionError, match="walked once"):
        next(walk.blocks())
    with pytest.raises(ValueError, match="inhomogeneous"):
        BlockWalk(loaded, [[1, 2], [3]])
