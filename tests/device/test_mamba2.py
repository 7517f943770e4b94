"""Mamba-2: the scan against the plain recurrence, and the layer, over states in blocks, against transformers' mixer."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from backend_engine.attention.interface import AttentionMetadata
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.core.kv_spec import StateSpec
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.layers.mamba2 import Mamba2, Mamba2Decl
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.layers.state_plan import MAX_CHUNK_TOKENS, StatePlan
from backend_engine.ops.state_space import ScanInputs, advance, chunk_scan
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized

CPU = torch.device("cpu")
NAN = float("nan")
HIDDEN = 24


def recurrence(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's tokens one after another in float64, as the paper writes it: y and the state at the end."""
    x, dt, a, b, c = (part.double() for part in inputs)
    heads_per_group = x.shape[1] // b.shape[1]
    state, outputs = state.double().clone(), []
    for t in range(x.shape[0]):
        y = torch.empty_like(x[t])
        for head in range(x.shape[1]):
            group = head // heads_per_group
            added = torch.outer(dt[t, head] * x[t, head], b[t, group])
            state[head] = torch.exp(dt[t, head] * a[head]) * state[head] + added
            y[head] = state[head] @ c[t, group]
        outputs.append(y)
    return torch.stack(outputs).float(), state.float()


def random_inputs(rng: torch.Generator, *leading: int, num_groups: int = 2, decay: float = 1.0) -> ScanInputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*leading, *shape, generator=rng)

    dt = torch.nn.functional.softplus(normal(4) * 2 - 1)
    return ScanInputs(
        normal(4, 6), dt, -decay * torch.rand(4, generator=rng), normal(num_groups, 5), normal(num_groups, 5)
    )


def at(inputs: ScanInputs, index: Any) -> ScanInputs:
    return ScanInputs(inputs.x[index], inputs.dt[index], inputs.a, inputs.b[index], inputs.c[index])


@pytest.mark.parametrize("decay", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_the_scan_is_the_recurrence_over_rows_of_different_length(num_groups: int, decay: float) -> None:
    rng = torch.Generator().manual_seed(num_groups)
    sizes = (3, 3, 1)  # two rows of two chunks, one of them ragged, and one of three
    inputs = random_inputs(rng, sum(sizes), MAX_CHUNK_TOKENS, num_groups=num_groups, decay=decay)
    inputs.dt[4, 20:] = 0
    initial = torch.randn(3, 4, 6, 5, generator=rng)
    y, ends = chunk_scan(inputs, initial, sizes)
    for row, chunks in enumerate(([0, 3, 6], [1, 4], [2, 5])):
        state = initial[row]
        for chunk in chunks:
            expected, state = recurrence(at(inputs, chunk), state)
            torch.testing.assert_close(y[chunk], expected, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(ends[chunk], state, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ends[4], recurrence(at(inputs, (4, slice(20))), ends[1])[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_one_token_for_many_requests_is_the_recurrence(num_groups: int) -> None:
    rng = torch.Generator().manual_seed(num_groups)
    inputs = random_inputs(rng, 7, num_groups=num_groups)
    before = torch.randn(7, 4, 6, 5, generator=rng)
    state = before.clone()
    y = advance(inputs, state)
    for row in range(7):
        expected, after = recurrence(at(inputs, slice(row, row + 1)), before[row])
        torch.testing.assert_close(y[row], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state[row], after, atol=1e-5, rtol=1e-5)


def build(**changes: Any) -> tuple[Mamba2, Mamba2Decl, Mamba2Mixer]:
    """Our layer and transformers' with the same random weights."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_heads": 4, "head_dim": 12, "state_size": 5, "n_groups": 2, "conv_kernel": 4,
        "num_hidden_layers": 1, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "chunk_size": 16, "time_step_limit": (0.0, math.inf), **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    reference = Mamba2Mixer(Mamba2Config(**values), layer_idx=0).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(std=0.4)
            if name in ("norm.weight", "D"):
                parameter.add_(1.0)
    decl = Mamba2Decl(
        num_heads=values["num_heads"],
        head_dim=values["head_dim"],
        state_size=values["state_size"],
        num_groups=values["n_groups"],
        conv_kernel=values["conv_kernel"],
        eps=values["layer_norm_epsilon"],
        time_step_limit=values["time_step_limit"],
        bias=values["use_bias"],
        conv_bias=values["use_conv_bias"],
    )
    ops = TorchOps()
    parts = ModelParts(ops, TorchAttention(ops, CPU), Unquantized(pack=False), TensorOptions(torch.float32, CPU))
    layer = Mamba2(decl, 1, HIDDEN, parts)
    theirs = {name: parameter.data for name, parameter in reference.named_parameters()}
    renamed = {"a_log": "A_log", "d": "D"}
    ours = dict(layer.named_parameters())
    assert len(ours) == len(theirs)
    for name, parameter in ours.items():
        parameter.data.copy_(theirs[renamed.get(name, name)])
    return layer, decl, reference


@torch.inference_mode()
def whole(reference: Mamba2Mixer, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = reference(x[None])[0]
    return result


class Blocks:
    """A pool full of NaN and block tables; runs steps of rows ``(table, start, inputs of the new tokens)``."""

    def __init__(self, layer: Mamba2, decl: Mamba2Decl, tokens_per_block: int, num_blocks: int = 64) -> None:
        self.layer = layer
        self.size = tokens_per_block
        self.pool = KVPool([StateSpec(((1,),)), decl.cache_spec()], num_blocks, tokens_per_block, torch.float32, CPU)
        for tensor in self.pool.tensors:
            tensor.fill_(NAN)

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[list[int], int, torch.Tensor]]) -> list[torch.Tensor]:
        q_lens = [len(x) for _, _, x in rows]
        kv_lens = [start + len(x) for _, start, x in rows]
        width = max(-(-n // self.size) for n in kv_lens)
        tables = np.array([(table + [0] * width)[:width] for table, _, _ in rows], np.int32)
        host = [np.array(values, np.int32) for values in (q_lens, kv_lens)]
        device = [torch.from_numpy(values) for values in (*host, tables)]
        slots = torch.zeros(sum(q_lens), dtype=torch.int32)
        metadata = AttentionMetadata(
            len(rows), sum(q_lens), self.size, device[0], device[1], device[2], slots, host[0], host[1], tables
        )
        step = LayerStep((), self.pool.layers, metadata, StatePlan.of(metadata))
        out = self.layer(torch.cat([x for _, _, x in rows]), step)
        assert out.shape == (sum(q_lens), HIDDEN)
        return list(torch.split(out, q_lens))


CONFIGS: list[dict[str, Any]] = [
    {},
    {"n_groups": 1, "use_bias": True, "conv_kernel": 2},
    {"n_groups": 4, "use_conv_bias": False, "conv_kernel": 7},
    {"time_step_limit": (0.4, 0.9), "state_size": 3, "conv_kernel": 1},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("tokens_per_block", [1, 5, 64, 300])
def test_any_mix_of_chunks_and_rows_is_transformers_mixer(config: dict[str, Any], tokens_per_block: int) -> None:
    layer, decl, reference = build(**config)
    pick = random.Random(tokens_per_block)
    torch.manual_seed(1)
    texts = [torch.randn(length, HIDDEN) for length in (1, 3, 40, 150, 200)]
    num_blocks = [-(-len(text) // tokens_per_block) for text in texts]
    blocks = Blocks(layer, decl, tokens_per_block, sum(num_blocks))
    ids = pick.sample(range(sum(num_blocks)), sum(num_blocks))
    tables = [[ids.pop() for _ in range(count)] for count in num_blocks]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(n < len(text) for n, text in zip(done, texts, strict=True)):
        open_rows = [i for i, text in enumerate(texts) if done[i] < len(text)]
        rows = pick.sample(open_rows, pick.randint(1, len(open_rows)))
        counts = [min(pick.choice([1, 1, 2, 7, 30, 90, 140]), len(texts[i]) - done[i]) for i in rows]
        outputs = blocks.step(
            [(tables[i], done[i], texts[i][done[i] : done[i] + n]) for i, n in zip(rows, counts, strict=True)]
        )
        for i, n, output in zip(rows, counts, outputs, strict=True):
            done[i] += n
            found[i].append(output)
    for text, parts in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole(reference, text), atol=2e-5, rtol=2e-5)


def test_full_blocks_serve_others_at_every_length_and_are_never_written_again() -> None:
    layer, decl, reference = build()
    blocks = Blocks(layer, decl, tokens_per_block=8)
    torch.manual_seed(2)
    first = torch.randn(30, HIDDEN)
    blocks.step([([3, 9, 1, 7], 0, first[:21])])
    blocks.step([([3, 9, 1, 7], 21, first[21:])])
    full = {block: [tensor[block].clone() for tensor in blocks.pool.layers[1]] for block in (3, 9, 1)}
    # Three others with the same beginning, in one step with the first, which goes on.
    texts = [torch.cat((first[:shared], torch.randn(length, HIDDEN))) for shared, length in ((8, 9), (16, 1), (24, 20))]
    tables = [[3, 20, 21], [3, 9, 22], [3, 9, 1, 23, 24, 25]]
    longer = torch.cat((first, torch.randn(1, HIDDEN)))
    rows = [(table, shared, text[shared:]) for table, text, shared in zip(tables, texts, (8, 16, 24), strict=True)]
    outputs = blocks.step([*rows, ([3, 9, 1, 7], 30, longer[30:])])
    for text, output in zip([*texts, longer], outputs, strict=True):
        torch.testing.assert_close(output, whole(reference, text)[-len(output) :], atol=2e-5, rtol=2e-5)
    for block, before in full.items():
        for tensor, kept in zip(blocks.pool.layers[1], before, strict=True):
            assert torch.equal(tensor[block], kept)


def test_a_row_whose_values_are_not_finite_spoils_no_other() -> None:
    layer, decl, reference = build()
    torch.manual_seed(3)
    text, spoiled = torch.randn(70, HIDDEN), torch.full((90, HIDDEN), NAN)
    blocks = Blocks(layer, decl, tokens_per_block=32)
    outputs = blocks.step([([0, 1, 2], 0, spoiled), ([3, 4, 5], 0, text[:69]), ([6], 0, spoiled[:1])])
    assert outputs[0].isnan().all() and outputs[2].isnan().all()
    outputs += blocks.step([([6], 1, spoiled[:1]), ([3, 4, 5], 69, text[69:])])
    torch.testing.assert_close(torch.cat((outputs[1], outputs[4])), whole(reference, text), atol=2e-5, rtol=2e-5)


def test_a_request_that_begins_reads_nothing_of_an_earlier_owner() -> None:
    layer, decl, reference = build()
    torch.manual_seed(4)
    blocks = Blocks(layer, decl, tokens_per_block=16)
    blocks.step([([5, 6], 0, torch.randn(20, HIDDEN))])
    for length in (1, 2):
        text = torch.randn(length, HIDDEN)
        (output,) = blocks.step([([5], 0, text)])
        torch.testing.assert_close(output, whole(reference, text), atol=2e-5, rtol=2e-5)


def test_states_stay_float32_when_weights_are_not() -> None:
    _, decl, _ = build()
    ops = TorchOps()
    options = TensorOptions(torch.bfloat16, CPU)
    layer = Mamba2(decl, 1, HIDDEN, ModelParts(ops, TorchAttention(ops, CPU), Unquantized(), options))
    dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
    exact = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert exact == {"a_log", "d", "dt_bias", "norm.weight", "conv1d.weight", "conv1d.bias"}
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    blocks = Blocks(layer, decl, tokens_per_block=16)
    (output,) = blocks.step([([5, 6], 0, torch.randn(20, HIDDEN, dtype=torch.bfloat16))])
    assert output.dtype == torch.bfloat16 and output.isfinite().all()
