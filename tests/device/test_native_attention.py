"""The native attention backend beside the one in torch and a dense one, and the same bits however a text is cut.

Pools start full of NaN, so reading a place that nobody wrote is seen at once.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend_engine.attention import native_attention
from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.attention.native_attention import NativeAttention, pieces_of_work
from backend_engine.attention.paged_kv import KvScales, paged_kv
from backend_engine.attention.select import select_backend
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.attention.torch_pieces import fresh_parts, part_len
from backend_engine.core.kv_spec import KvSpec
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.ops.torch_ops import TorchOps
from tests.device.test_attention import VARIANTS
from tests.support.attention_cache import CPU, LATENT, LAYOUTS, MAX_LEN, SPEC, Cache, metadata_of, sinks_of, spoil

SPECS = {
    "group_of_three": AttentionSpec(0, 9, 3, 64, 0.125),
    "multi_head": AttentionSpec(0, 3, 3, 16, 0.25),
    "multi_query": AttentionSpec(0, 7, 1, 24, 0.2),
    "wide_group": AttentionSpec(0, 71, 1, 8, 0.3),
    "window": AttentionSpec(0, 4, 2, 40, 0.2, sliding_window=37),
    "window_of_one": AttentionSpec(0, 2, 2, 8, 0.2, sliding_window=1),
    "softcap_and_sinks": AttentionSpec(0, 8, 2, 80, 0.4, logit_softcap=1.5, has_sinks=True),
    "window_and_sinks": AttentionSpec(0, 4, 1, 96, 0.1, sliding_window=100, has_sinks=True),
    "widest": AttentionSpec(0, 4, 2, 512, 0.05),
}
SCALES = KvScales(0.5, 0.03)
Chunk = tuple[int, int, int]  # request, its first token now, number of tokens


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many as there were, whatever a test sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Texts:
    """Requests whose q, k, v are known from the beginning, in a pool of shuffled blocks."""

    def __init__(
        self, lengths: list[int], spec: AttentionSpec, size: int, dtype: str = "float32", seed: int = 0
    ) -> None:
        self.spec, self.size = spec, size
        heads, dim = spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
        # A request's numbers depend neither on the others nor on the layout.
        self.fused = [
            torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(100 * seed + i))
            for i, length in enumerate(lengths)
        ]
        width = -(-max(lengths) // size)
        ids = np.random.default_rng(seed).permutation(len(lengths) * width)
        self.tables = ids.reshape(len(lengths), width).astype(np.int32)
        pool = KVPool([KvSpec(spec.num_kv_heads, dim)], len(ids), size, KV_DTYPES[dtype], CPU)
        spoil(pool.tensors)
        self.kv = paged_kv(pool.layers[0], SCALES)

    def fill(self, request: int, count: int) -> None:
        """Put the first tokens of a request into the pool, as an earlier step would have: a block is zeroed first."""
        if count:
            metadata = metadata_of([count], [count], self.tables[request : request + 1], self.size)
            parts, slots = fresh_parts(metadata, CPU), metadata.slot_mapping
            if parts is not None:
                self.kv.clear(parts.of(self.kv.num_planes), part_len(self.size))
            _, k, v = self._split(self.fused[request][:count])
            ops = TorchOps()
            self.kv.append(ops, k, v, ops.kv_rows(slots, self.size))

    def step(self, backend: AttentionBackend, rows: list[Chunk]) -> list[torch.Tensor]:
        """The results of each row."""
        q, k, v = self._split(torch.cat([self.fused[r][start : start + count] for r, start, count in rows]))
        tables = self.tables[[request for request, _, _ in rows]]
        counts = [count for _, _, count in rows]
        ends = [start + count for _, start, count in rows]
        backend.prepare(metadata_of(counts, ends, tables, self.size))
        out = backend.forward(q, k, v, self.spec, self.kv, sinks_of(self.spec))
        assert out.shape == q.shape and out.dtype == torch.float32
        return list(out.split(counts))

    def written(self, rows: list[Chunk]) -> list[torch.Tensor]:
        """What the pool's tensors hold of the rows' new tokens."""
        ops = TorchOps()
        found = []
        for request, start, count in rows:
            metadata = metadata_of([count], [start + count], self.tables[request : request + 1], self.size)
            keys, values = ops.kv_rows(metadata.slot_mapping, self.size)
            for tensor in self.kv.stored:
                found.append(tensor.flatten(0, 2)[torch.cat((keys, values))])
        return found

    def _split(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        return fused.split((heads, kv_heads, kv_heads), 1)


def native() -> NativeAttention:
    return NativeAttention(TorchOps(), CPU)


@pytest.mark.parametrize("name", [name for name, spec in VARIANTS.items() if spec.value_dim is None] + ["sinks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_ragged_batches_beside_a_dense_attention(layout: str, name: str) -> None:
    pick = random.Random(name)
    cache = Cache(5, VARIANTS.get(name, replace(SPEC, has_sinks=True)), torch.float32, size=LAYOUTS[layout])
    cache.backend = native()
    for _ in range(8):
        requests = pick.sample(range(5), pick.randint(1, 5))
        counts = sorted((pick.choice([1, 1, 2, 3, 4, 7, 9]) for _ in requests), reverse=True)
        found, expected = cache.step(list(zip(requests, counts, strict=True)))
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=4),
    size=st.integers(1, 128),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.integers(1, 16).map(lambda n: 8 * n),
    window=st.none() | st.integers(1, 150),
    softcap=st.none() | st.floats(0.5, 50),
    has_sinks=st.booleans(),
    dtype=st.sampled_from(sorted(KV_DTYPES)),
    num_threads=st.integers(1, 3),
)  # fmt: skip
@example([(1, 1), (2, 1)], 3, 1, 1, 8, None, None, False, "bfloat16", 1)  # begins within a block
def test_it_is_as_the_reference_in_torch(
    rows: list[tuple[int, int]], size: int, kv_heads: int, group: int, dim: int, window: int | None,
    softcap: float | None, has_sinks: bool, dtype: str, num_threads: int,
) -> None:  # fmt: skip
    spec = AttentionSpec(0, kv_heads * group, kv_heads, dim, dim**-0.5, window, softcap, None, has_sinks)
    chunks = [(i, past, count) for i, (past, count) in enumerate(sorted(rows, key=lambda row: -row[1]))]
    torch.set_num_threads(num_threads)
    found, expected, written = [], [], []
    for backend, results in ((native(), found), (TorchAttention(TorchOps(), CPU), expected)):
        texts = Texts([past + count for _, past, count in chunks], spec, size, dtype)
        for request, past, _ in chunks:
            texts.fill(request, past)
        results += texts.step(backend, chunks)
        written.append(texts.written(chunks))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for a, b in zip(*written, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_a_token_has_the_same_bits_alone_in_a_batch_in_chunks_and_on_any_number_of_threads(
    name: str, dtype: str
) -> None:
    spec, pick = SPECS[name], random.Random(name)
    lengths = [170, 66]
    alone = Texts(lengths, spec, 16, dtype)
    torch.set_num_threads(1)
    backend = native()
    expected = [
        torch.cat([alone.step(backend, [(request, i, 1)])[0] for i in range(length)])
        for request, length in enumerate(lengths)
    ]
    for size, num_threads in ((16, 2), (7, 1), (128, 3), (1, 2)):
        torch.set_num_threads(num_threads)
        texts = Texts(lengths, spec, size, dtype)
        done, found = [0, 0], [[], []]
        while done != lengths:
            rows = [
                (request, done[request], min(pick.choice([1, 2, 5, 16, 17, 64, 170]), length - done[request]))
                for request, length in enumerate(lengths)
                if done[request] < length
            ]
            for (request, _, count), out in zip(rows, texts.step(backend, rows), strict=True):
                done[request] += count
                found[request].append(out)
        for request in range(2):
            assert torch.equal(torch.cat(found[request]), expected[request]), (size, num_threads)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "fp8"])
@pytest.mark.parametrize("name", ["group_of_three", "window", "softcap_and_sinks"])
def test_single_tokens_taken_one_after_another_are_as_alone(name: str, dtype: str) -> None:
    """Some threads take several, and what the next one needs is fetched before it is its turn."""
    spec, pick = SPECS[name], random.Random(name)
    pasts = [pick.choice([0, 1, 15, 62, 63, 64, 65, 127, 128, 200]) for _ in range(41)]
    texts = Texts([past + 1 for past in pasts], spec, 16, dtype)
    for request, past in enumerate(pasts):
        texts.fill(request, past)
    rows = [(request, past, 1) for request, past in enumerate(pasts)]
    torch.set_num_threads(1)
    alone = [texts.step(native(), [row])[0] for row in rows]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for count in (41, 17, 7, 2):
            for found, expected in zip(texts.step(native(), rows[:count]), alone, strict=False):
                assert torch.equal(found, expected), (num_threads, count)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["group_of_three", "multi_head", "window", "softcap_and_sinks", "widest"])
def test_what_a_token_does_not_see_never_reaches_it(name: str, bad: float) -> None:
    spec, length, where = SPECS[name], 150, 70
    clean, spoilt = Texts([length], spec, 16), Texts([length], spec, 16)
    for plane in range(2):
        spoilt.fused[0][where, spec.num_heads + plane * spec.num_kv_heads :] = bad
    (good,), (found,) = (texts.step(native(), [(0, 0, length)]) for texts in (clean, spoilt))
    end = length if spec.sliding_window is None else where + spec.sliding_window
    assert torch.equal(found[:where], good[:where]) and torch.equal(found[end:], good[end:])
    assert found[where:end].isnan().all(-1).any(-1).all()
    for i in range(where):
        (one,) = spoilt.step(native(), [(0, i, 1)])
        assert torch.equal(one[0], good[i])


def test_what_an_earlier_owner_left_in_a_block_does_not_leak() -> None:
    for size in LAYOUTS.values():
        cache = Cache(2, SPEC, torch.float32, size=size)
        cache.backend = native()
        cache.step([(0, 11), (1, 3)])
        cache.keys[0] = cache.keys[0][:0]
        cache.values[0] = cache.values[0][:0]
        cache.kv[torch.from_numpy(cache.tables[0]).long()] = math.inf
        for count in (5, 1, 1, 1, 1, 2):
            found, expected = cache.step([(0, count), (1, 1)])
            torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", sorted(KV_DTYPES))
def test_numbers_are_written_as_the_reference_writes_them(dtype: str) -> None:
    spec = AttentionSpec(0, 1, 1, 512, 1.0)
    largest = torch.finfo(KV_DTYPES[dtype] if dtype != "int8" else torch.float32).max
    magnitudes = torch.cat((
        torch.logspace(-46, 38, 1024, dtype=torch.float64).float(),
        # Ties, and the numbers beside them, down to the smallest.
        torch.tensor([2.0**e * (1 + n / 64) for e in range(-28, 17) for n in range(64)]),
        torch.tensor([0.0, largest, math.nextafter(largest, math.inf), 65519.9, 65520.0, 464.0, 465.0, 3.4e38]),
        torch.tensor([math.inf]),
    ))  # fmt: skip
    numbers = torch.cat((magnitudes, -magnitudes))
    numbers = torch.cat((numbers, torch.zeros(-len(numbers) % 512))).view(-1, 1, 512)
    texts = Texts([len(numbers)], spec, 8, dtype)
    texts.fused[0] = numbers.repeat(1, 3, 1)
    texts.step(native(), [(0, 0, len(numbers))])
    found = texts.written([(0, 0, len(numbers))])
    for index, tensor in enumerate(found):
        for plane, part in enumerate(tensor.chunk(2)):
            assert torch.equal(part, texts.kv.encode(numbers, plane)[index])


@pytest.mark.parametrize("dtype", sorted(KV_DTYPES))
def test_no_number_stays_none(dtype: str) -> None:
    spec = AttentionSpec(0, 1, 1, 8, 1.0)
    texts = Texts([3], spec, 4, dtype)
    texts.fused[0][1, 1:, 5] = math.nan
    texts.step(native(), [(0, 0, 3)])
    out = torch.zeros(6, 1, 8)
    for plane in range(2):
        half = tuple(tensor.chunk(2)[plane] for tensor in texts.written([(0, 0, 3)]))
        texts.kv.decode(half, plane, out[3 * plane : 3 * plane + 3])
    assert out[[1, 4], 0, 5].isnan().all() and out[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e4, 1e18])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_huge_and_tiny_scores(factor: float, has_sinks: bool) -> None:
    cache = Cache(1, replace(SPEC, scale=factor, has_sinks=has_sinks), torch.float32)
    cache.backend = native()
    for count in (40, 1, 30, 1):
        found, expected = cache.step([(0, count)])
        if factor < 1e3:
            torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
        assert found.isfinite().all()
        assert found.abs().max() <= cache.values[0].abs().max() * 1.0001


def test_scores_without_end() -> None:
    spec = AttentionSpec(0, 1, 1, 8, 1.0)
    texts = Texts([130], spec, 16)
    q, k, v = texts.fused[0].unbind(1)
    q.fill_(1)
    k.fill_(-3e38)  # every score is minus infinity
    k[100] = 0
    (out,) = texts.step(native(), [(0, 0, 130)])
    assert out[:100].isnan().all()  # of no weights at all there is no mean
    assert torch.equal(out[100:, 0], v[100].expand(30, 8))
    (one,) = texts.step(native(), [(0, 129, 1)])
    assert torch.equal(one[0], out[129])


def test_layers_of_one_step_may_differ() -> None:
    cache = Cache(3, SPEC, torch.float32)
    cache.backend = native()
    cache.step([(0, 9), (1, 4), (2, 6)])
    q, k, v = cache.draw([(0, 5), (1, 1), (2, 1)])
    cache.backend.prepare(metadata_of([5, 1, 1], [14, 5, 7], cache.tables, cache.size))
    wide = cache.backend.forward(q, k, v, SPEC, cache.paged)
    narrow = cache.backend.forward(q, k, v, replace(SPEC, sliding_window=3), cache.paged)
    assert not torch.allclose(narrow, wide)
    assert torch.equal(wide, cache.backend.forward(q, k, v, SPEC, cache.paged))
    gaps = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(wide, cache.backend.forward(*gaps, SPEC, cache.paged))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=1, max_size=20))
def test_pieces_cover_every_token_once_and_the_longest_come_first(rows: list[tuple[int, int]]) -> None:
    q_lens, past = (np.array(values, np.int32) for values in zip(*rows, strict=True))
    items = pieces_of_work(q_lens, q_lens + past)
    assert items.dtype == np.int32 and items.flags.c_contiguous
    starts = np.cumsum(q_lens) - q_lens
    tokens = []
    for row, first, count, position in items.tolist():
        assert 0 < count <= 64 and position - past[row] == first - starts[row]
        assert starts[row] <= first and first + count <= starts[row] + q_lens[row]
        tokens += range(first, first + count)
    assert sorted(tokens) == list(range(q_lens.sum()))
    work = [count * (2 * position + count) for _, _, count, position in items.tolist()]
    assert work == sorted(work, reverse=True)


def test_recorded_steps_find_the_step_where_it_was() -> None:
    texts, backend = Texts([5, 40], SPECS["multi_head"], 4), native()
    step = backend.native_step
    texts.step(backend, [(0, 0, 5)])
    assert (step.num_tokens, step.num_items, step.tokens_per_block, step.table_stride) == (5, 1, 4, 10)
    texts.step(backend, [(1, 0, 39)])
    texts.step(backend, [(0, 4, 1), (1, 39, 1)])
    assert backend.native_step is step and (step.num_tokens, step.num_items) == (2, 2)


def test_forward_wants_a_step_that_fits() -> None:
    q, k, v = torch.zeros(2, 6, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)
    cache = Cache(1, SPEC, torch.float32)
    backend = native()
    with pytest.raises(AssertionError, match="forward before prepare"):
        backend.forward(q, k, v, SPEC, cache.paged)
    backend.prepare(metadata_of([3], [3], cache.tables, cache.size))
    with pytest.raises(AssertionError, match=r"\(2, 3\)"):
        backend.forward(q, k, v, SPEC, cache.paged)
    with pytest.raises(AssertionError, match="layer 0: has_sinks is True"):
        backend.forward(q, k, v, replace(SPEC, has_sinks=True), cache.paged)
    backend.prepare(metadata_of([2], [2], cache.tables, cache.size))
    with pytest.raises(AssertionError, match=r"layer 0: cache \(2, 2, 8\), expected \(2, 6, 8\)"):
        backend.forward(q, q, q, replace(SPEC, num_kv_heads=6), cache.paged)


def test_it_is_taken_by_itself_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(spec: AttentionSpec, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[str]:
        return NativeAttention.unsupported(spec, dtype, torch.device(device))

    assert select_backend("auto", [SPEC], torch.float32, CPU) is NativeAttention
    assert select_backend("auto", [SPEC, LATENT], torch.float32, CPU) is TorchAttention
    assert reasons(SPEC) == []
    assert reasons(SPEC, torch.bfloat16) == ["dtype torch.bfloat16 is not float32"]
    assert reasons(SPEC, device="meta") == ["device meta is not a CPU"]
    assert reasons(LATENT) == ["the cache holds one vector for keys and values"]
    for dim in (12, 520):
        assert reasons(replace(SPEC, head_dim=dim)) == [f"head_dim {dim} is not a multiple of 8 up to 512"]
    monkeypatch.setattr(native_attention, "native_runtime", lambda: None)
    assert reasons(SPEC) == ["there is no native library"]
    assert select_backend("auto", [SPEC], torch.float32, CPU) is TorchAttention


def test_a_text_longer_than_many_tiles() -> None:
    assert MAX_LEN < 700
    spec = SPECS["group_of_three"]
    results = []
    for backend in (native(), TorchAttention(TorchOps(), CPU)):
        texts = Texts([700, 650], spec, 32)
        texts.fill(0, 600)
        texts.fill(1, 649)
        results.append(torch.cat(texts.step(backend, [(0, 600, 100), (1, 649, 1)])))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
