"""The compiled products of plain weights: against the reference in torch, and a token's bits in any company."""

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.ops import dense_packing, dense_products, native_runtime
from backend_engine.ops.dense_packing import pack_dense, pack_dense_reference
from backend_engine.ops.dense_products import (
    DenseKind,
    DenseWeight,
    dense_bytes,
    dense_reference,
    multiply_dense,
    unpack_dense,
)
from backend_engine.ops.huge_pages import HugePages
from tests.support.native_variants import HERE, VARIANTS, compiled_variant

KINDS = list(DenseKind)
# One row and column; odd ones; several panels; more than one block of each kind.
SHAPES = ((1, 1), (16, 8), (5, 1), (33, 577), (100, 288), (64, 1537), (17, 2500), (200, 96))
NUM_TOKENS = (*range(1, 21), 100, 241)


@pytest.fixture(params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The products as they run here, and as they would on other processors."""
    if request.param != HERE:
        runtime = compiled_variant(request.param, tmp_path_factory.getbasetemp())
        for module in (dense_products, dense_packing):
            monkeypatch.setattr(module, "native_runtime", lambda: runtime)
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def multiplied(w: DenseWeight, x: Tensor) -> Tensor:
    found = multiply_dense(w, x)
    assert found is not None, "the machine that runs the tests has a C compiler"
    return found


def peaks_around(kind: DenseKind, x: Tensor) -> Tensor:
    """For each number the largest magnitude that it is rounded with: the token's, of W8A8 that of 32 columns, which no
    factor makes less than a 511th of the token's.
    """
    most = x.abs().to(torch.float32).amax(1, keepdim=True)
    if kind != DenseKind.W8A8:
        return most.expand(x.shape)
    parts = torch.cat([part.abs().amax(1, keepdim=True).expand(part.shape) for part in x.split(32, 1)], 1)
    return parts + most / 511


def assert_close(w: DenseWeight, x: Tensor) -> None:
    """To the reference, and to the product in float64: floats within rounding, integers within that of x."""
    found, weight = multiplied(w, x), unpack_dense(w).double()
    assert found.shape == (x.shape[0], w.rows) and found.dtype == x.dtype
    exact, size = x.double() @ weight.T, x.abs().double() @ weight.abs().T
    if w.bias is not None:
        exact, size = exact + w.bias[: w.rows], size + w.bias[: w.rows].abs()
    if w.kind.is_integer:
        assert torch.equal(found, dense_reference(w, x))
        size = peaks_around(w.kind, x).double() @ weight.abs().T + size
    else:
        assert torch.allclose(found, dense_reference(w, x), rtol=1e-4, atol=1e-5 * float(size.max()))
    steps = {DenseKind.I8: 2**-16, DenseKind.I16: 2**-14, DenseKind.W8A8: 2**-7}
    step = steps.get(w.kind, 2**-24 * (w.columns + 2))
    bound = step * size + 2**-23 * size
    assert bool(((found - exact).abs() <= bound).all()), (w.kind, tuple(x.shape), float((found - exact).abs().max()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_what_is_packed_is_what_is_multiplied(variant: str, kind: DenseKind) -> None:
    for number, (rows, columns) in enumerate(SHAPES):
        w = pack_dense(random(rows, columns, seed=number), kind, random(rows) if number % 2 else None)
        for num_tokens in (1, 2, 3, 4, 5, 6, 7, 13, 50):
            assert_close(w, random(num_tokens, columns, seed=num_tokens))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_bits_of_a_token_do_not_depend_on_its_neighbours_or_threads(
    threads: None, kind: DenseKind, shape: tuple[int, int]
) -> None:
    w, x = pack_dense(random(*shape), kind, random(shape[0], seed=1)), random(max(NUM_TOKENS), shape[1], seed=2)
    torch.set_num_threads(1)
    alone = torch.cat([multiplied(w, x[i : i + 1]) for i in range(len(x))])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_tokens in NUM_TOKENS:
            assert torch.equal(multiplied(w, x[-num_tokens:]), alone[-num_tokens:]), (num_threads, num_tokens)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_chunks_of_a_large_weight_do_not_change_bits(threads: None, kind: DenseKind) -> None:
    w, x = pack_dense(random(3000, 200), kind), random(30, 200)
    torch.set_num_threads(1)
    expected = [multiplied(w, x[:n]) for n in (1, 2, 3, 30)]
    torch.set_num_threads(4)
    assert all(torch.equal(multiplied(w, x[: len(e)]), e) for e in expected)
    assert_close(w, x)


@given(
    rows=st.integers(1, 70), columns=st.integers(1, 1100), num_tokens=st.integers(1, 30), kind=st.sampled_from(KINDS),
    has_bias=st.booleans(), seed=st.integers(0, 1000), scale=st.sampled_from((1e-20, 1.0, 1e10)),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_shape(rows: int, columns: int, num_tokens: int, kind: DenseKind, **more: float) -> None:
    seed = int(more["seed"])
    w = pack_dense(random(rows, columns, seed=seed), kind, random(rows, seed=seed) if more["has_bias"] else None)
    x = random(num_tokens, columns, seed=seed + 1) * more["scale"]
    assert_close(w, x)
    assert torch.equal(multiplied(w, x[-1:])[0], multiplied(w, x)[-1])


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(variant: str, kind: DenseKind, bad: float) -> None:
    w, x = pack_dense(random(40, 577).abs() + 0.1, kind), random(9, 577)
    expected = multiplied(w, x)
    x[4, 576] = bad
    for first in (0, 3, 4):
        found = multiplied(w, x[first:])
        assert not found[4 - first].isfinite().any()
        others = torch.arange(first, 9) != 4
        assert torch.equal(found[others], expected[first:][others])
    if kind.is_integer:
        assert multiplied(w, x[4:5]).isnan().all() and torch.isnan(dense_reference(w, x)[4]).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_zeros_tiny_numbers_and_no_tokens(variant: str, kind: DenseKind) -> None:
    w = pack_dense(random(20, 30), kind, random(20))
    assert w.bias is not None
    for x in (torch.zeros(1, 30), torch.zeros(8, 30), torch.full((2, 30), 1e-42)):
        assert torch.equal(multiplied(w, x), w.bias[:20].expand(len(x), 20))
    assert multiplied(w, torch.zeros(0, 30)).shape == (0, 20)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_x_may_have_gaps_and_another_dtype(kind: DenseKind) -> None:
    w, wide = pack_dense(random(40, 100), kind), random(8, 300)
    for num_tokens in (1, 2, 8):
        x = wide[:num_tokens, 100:200]
        expected = multiplied(w, x.clone())
        assert torch.equal(multiplied(w, x), expected)
        assert torch.equal(multiplied(w, x.T.contiguous().T), expected)
        half = x.to(torch.bfloat16)
        assert torch.equal(multiplied(w, half), multiplied(w, half.float()).to(torch.bfloat16))


def test_nothing_is_written_beside_the_result() -> None:
    runtime = native_runtime.native_runtime()
    assert runtime is not None
    for kind in KINDS:
        w = pack_dense(random(21, 40), kind)
        for num_tokens in (1, 2, 4, 7):
            x, space = random(num_tokens, 40), torch.full((num_tokens + 1, 50), 7.0)
            rounded = torch.zeros(num_tokens, 48)
            into = dense_products.RoundOp(10, x.data_ptr(), 40, 40, kind, rounded.data_ptr(), 48)
            runtime.run(into, num_tokens)
            op = dense_products.DenseOp(
                1, ctypes.addressof(w.native), x.data_ptr(), 40, space.data_ptr() + 8 * 4, 50, rounded.data_ptr(), 48
            )
            runtime.run(op, num_tokens)
            assert torch.equal(space[:num_tokens, 8:29], multiplied(w, x))
            space[:num_tokens, 8:29] = 7.0
            assert bool((space == 7.0).all()), (kind, num_tokens)


def test_special_numbers_of_half_precision_are_read_as_they_are(variant: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.5, 65504.0])
    for kind in (DenseKind.F16, DenseKind.BF16):
        w = pack_dense(numbers.repeat(2)[:, None], kind)
        for num_tokens in (1, 3, 8):
            found = multiplied(w, torch.ones(num_tokens, 1))
            assert torch.equal(found, numbers.to(kind.dtype).float().repeat(2).expand(num_tokens, 16))
    w = pack_dense(torch.tensor([[math.inf], [-math.inf], [math.nan]]), DenseKind.F16)
    assert multiplied(w, torch.ones(1, 1))[0].tolist()[:2] == [math.inf, -math.inf]
    assert multiplied(w, torch.ones(1, 1))[0, 2].isnan()


def test_the_largest_codes_do_not_overflow(variant: str) -> None:
    """Sums of a block reach 2^31 but for 65 thousand."""
    for columns in (511, 512, 1024, 2049):
        w = pack_dense(torch.full((17, columns), -64.0), DenseKind.I8)
        for num_tokens in (1, 5, 9):
            x = torch.full((num_tokens, columns), -3.0)
            assert torch.equal(multiplied(w, x), dense_reference(w, x))
            assert torch.allclose(multiplied(w, x), torch.full((num_tokens, 17), 192.0 * columns))
            wide = pack_dense(torch.full((17, columns), -64.0), DenseKind.I16)
            assert torch.equal(multiplied(wide, x), dense_reference(wide, x))
            for sign in (1.0, -1.0):
                bytes_ = pack_dense(torch.full((17, columns), 64.0 * sign), DenseKind.W8A8)
                assert torch.equal(multiplied(bytes_, x), dense_reference(bytes_, x))
                assert torch.allclose(multiplied(bytes_, x), torch.full((num_tokens, 17), -192.0 * sign * columns))
            assert torch.allclose(multiplied(wide, x), torch.full((num_tokens, 17), 192.0 * columns))


def test_numbers_of_w8a8_are_rounded_by_their_neighbours(variant: str) -> None:
    """Not by large ones elsewhere in the token, unless they are more than 511 times as large."""
    x = random(3, 96)
    x[:, :32] *= 300.0
    weight = torch.zeros(16, 96)
    weight[:, 32:] = random(16, 64)
    w, alone = pack_dense(weight, DenseKind.W8A8), x.clone()
    alone[:, :32] = 0.0
    exact = alone.double() @ unpack_dense(w).double().T
    for numbers in (alone, x):
        error = (multiplied(w, numbers) - exact).abs().max()
        assert error < 0.03 * exact.abs().max()
    assert_close(w, x)


def test_codes_and_floats_survive_packing() -> None:
    for rows, columns in SHAPES:
        weight = random(rows, columns)
        for kind in (DenseKind.F32, DenseKind.F16, DenseKind.BF16):
            assert torch.equal(unpack_dense(pack_dense(weight.to(kind.dtype), kind)), weight.to(kind.dtype).float())
        packed = pack_dense(weight, DenseKind.I8)
        step = weight.abs().amax(1, keepdim=True) / 127
        assert bool(((unpack_dense(packed) - weight).abs() <= step * 0.50001).all())
        for begin in range(0, columns, 64):
            part = weight[:, begin : begin + 64]
            step = part.abs().amax(1, keepdim=True) / 4095
            error = unpack_dense(pack_dense(weight, DenseKind.I16))[:, begin : begin + 64] - part
            assert bool((error.abs() <= step * 0.5001).all())


def test_int8_of_rows_with_zeros_or_without_numbers() -> None:
    weight = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [1.0, -2.0]])
    unpacked = unpack_dense(pack_dense(weight, DenseKind.I8))
    assert unpacked[0].tolist() == [0.0, 0.0] and unpacked[1].isnan().all() and unpacked[2, 1] == -2.0


def assert_same_packing(found: DenseWeight, expected: DenseWeight) -> None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    of_size = bits[expected.kind.dtype.itemsize]
    assert torch.equal(found.data.view(of_size), expected.data.view(of_size)), expected.kind
    assert (found.scales is None) == (expected.scales is None)
    if found.scales is not None and expected.scales is not None:
        assert found.scales.shape == expected.scales.shape
        assert torch.equal(found.scales, expected.scales) or (
            torch.equal(found.scales.isnan(), expected.scales.isnan())
            and torch.equal(found.scales.nan_to_num(), expected.scales.nan_to_num())
        )


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_packed_in_c_and_by_torch_are_the_same_bits(variant: str, kind: DenseKind) -> None:
    for rows, columns in (*SHAPES, (3, 64), (49, 65), (16, 63)):
        wide = random(rows, columns + 7) * 10.0 ** torch.randint(-6, 4, (rows, 1)).float()
        for weight in (wide[:, 3:-4], wide[:, 3:-4].contiguous(), wide[:, 7:].T.contiguous().T, wide[:, 7:].double()):
            assert_same_packing(pack_dense(weight, kind), pack_dense_reference(weight, kind))
        for dtype in (torch.float16, torch.bfloat16):
            assert_same_packing(
                pack_dense(wide[:, 7:].to(dtype), kind), pack_dense_reference(wide[:, 7:].to(dtype), kind)
            )


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_special_numbers_are_packed_as_by_torch(variant: str, kind: DenseKind) -> None:
    special = [
        0.0,
        -0.0,
        1e-45,
        -1e-40,
        1e-38,
        6e-8,
        2**-25,
        65504.0,
        65519.9,
        65520.0,
        -70000.0,
        3e38,
        math.inf,
        -math.inf,
    ]
    weight = random(len(special) + 3, 130)
    for row, number in enumerate(special):
        weight[row, row * 9] = number
    weight[-1] = 0.0
    weight[-2, 40:90] = torch.arange(50) * 0.5 - 12.25  # halves between two codes
    weight[-2, 91] = 127.0
    weight[-3] = 1e-44
    assert_same_packing(pack_dense(weight, kind), pack_dense_reference(weight, kind))
    weight[5, 60] = math.nan
    found, expected = pack_dense(weight, kind), pack_dense_reference(weight, kind)
    if kind.is_integer:
        assert_same_packing(found, expected)
    else:
        assert torch.equal(found.data.isnan(), expected.data.isnan())


def test_threads_change_nothing_in_what_is_packed(threads: None) -> None:
    weight = random(3000, 200)
    for kind in KINDS:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert_same_packing(pack_dense(weight, kind), pack_dense_reference(weight, kind))


def test_the_reference_packs_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(100, 33)
    for kind in KINDS:
        whole = pack_dense_reference(weight, kind)
        with monkeypatch.context() as patch:
            patch.setattr(dense_products, "_CHUNK_NUMBERS", 33 * 40)
            assert_same_packing(pack_dense_reference(weight, kind), whole)


def test_without_a_native_library_torch_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(40, 70)
    for kind in KINDS:
        expected = pack_dense(weight, kind)
        with monkeypatch.context() as patch:
            patch.setattr(dense_packing, "native_runtime", lambda: None)
            assert_same_packing(pack_dense(weight, kind), expected)


def test_memory_is_what_was_said() -> None:
    for kind in KINDS:
        for rows, columns in SHAPES:
            assert pack_dense(random(rows, columns), kind).num_bytes == dense_bytes(kind, rows, columns)


def test_without_a_native_library_there_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_products, "native_runtime", lambda: None)
    assert multiply_dense(pack_dense(random(4, 4), DenseKind.F32), random(1, 4)) is None


def test_huge_pages_hand_out_memory_of_their_own() -> None:
    memory = HugePages()
    tensors = [memory.empty((3, n), dtype) for n in (0, 1, 7, 5 << 20) for dtype in (torch.int8, torch.float32)]
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and not tensor.any()
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()


def test_weights_keep_their_numbers_when_their_memory_is_let_go() -> None:
    memory = HugePages()
    weights = [pack_dense(random(40, 40, seed=i), DenseKind.F32, memory=memory) for i in range(3)]
    del memory
    assert all(torch.equal(unpack_dense(w), random(40, 40, seed=i)) for i, w in enumerate(weights))
