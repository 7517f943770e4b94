"""The forms of the KV cache against a reference that rounds keys and values itself and attends to them densely.

Numbers of the formats come from their definition, not from torch: E4M3 and E5M2 as in "FP8 formats for deep learning"
(Micikevicius et al., 2022), bfloat16 by rounding the mantissa, float16 by numpy.
"""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.attention.interface import AttentionSpec
from backend_engine.attention.paged_kv import Fp8Kv, Int8Kv, KvScales, PagedKv, PlainKv, paged_kv
from backend_engine.kv_cache.kv_pool import KV_DTYPES
from tests.support.attention_cache import LATENT, LAYOUTS, SPEC, Cache, Rounding, spoil

SCALES = KvScales(0.037, 1.7)
VARIANTS = {
    "plain": SPEC,
    "window": replace(SPEC, sliding_window=5),
    "softcap": replace(SPEC, logit_softcap=0.7),
    "sinks": replace(SPEC, has_sinks=True),
    "all_together": replace(SPEC, num_kv_heads=6, sliding_window=9, logit_softcap=0.7, has_sinks=True),
    "latent": LATENT,
    "latent_and_window": replace(LATENT, sliding_window=5),
}


def fp8_table(exponent_bits: int) -> list[float]:
    """The number of each code from 0 to 127."""
    mantissa_bits = 7 - exponent_bits
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    numbers = []
    for code in range(128):
        exponent, mantissa = divmod(code, steps)
        if exponent_bits == 5 and exponent == 31:
            numbers.append(math.inf if mantissa == 0 else math.nan)
        elif exponent_bits == 4 and code == 127:
            numbers.append(math.nan)
        elif exponent == 0:
            numbers.append(mantissa / steps * 2.0 ** (1 - bias))
        else:
            numbers.append((1 + mantissa / steps) * 2.0 ** (exponent - bias))
    return numbers


FP8 = {torch.float8_e4m3fn: fp8_table(4), torch.float8_e5m2: fp8_table(5)}


def nearest_fp8(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest number of the format, the one with an even code between two, the largest beyond all."""
    numbers = np.array([number for number in FP8[dtype] if math.isfinite(number)])
    size = np.minimum(np.abs(x), numbers[-1])
    above = np.searchsorted(numbers, size)
    below = np.maximum(above - 1, 0)
    to_above, to_below = numbers[above] - size, size - numbers[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.copysign(np.where(takes_above, numbers[above], numbers[below]), x)


def rounding_of(kv_dtype: torch.dtype, scales: KvScales = KvScales()) -> Rounding:
    """What a cache of ``kv_dtype`` makes of ``x [num_tokens, num_kv_heads, dim]``, in numpy."""

    def to_kv(x: torch.Tensor, plane: int) -> torch.Tensor:
        values = x.double().numpy()
        if kv_dtype in FP8:
            values = nearest_fp8(values / scales[plane], kv_dtype) * scales[plane]
        elif kv_dtype == torch.int8:
            steps = np.abs(values).max(-1, keepdims=True) / 127
            values = np.round(values / np.where(steps > 0, steps, 1)) * steps
        elif kv_dtype == torch.bfloat16:
            mantissa, exponent = np.frexp(values)
            values = np.ldexp(np.round(mantissa * 256) / 256, exponent)
        elif kv_dtype == torch.float16:
            values = values.clip(-65504, 65504).astype(np.float16)
        return torch.from_numpy(values.astype(np.float32))

    return to_kv


def read(kv: PagedKv, codes: tuple[torch.Tensor, ...], plane: int = 0) -> torch.Tensor:
    out = torch.empty(codes[0].shape)
    kv.decode(codes, plane, out)
    return out


def cache_of(name: str, spec: AttentionSpec, num_requests: int, size: int = 4) -> Cache:
    scales = SCALES if name.startswith("fp8") else KvScales()
    kv_dtype = KV_DTYPES[name]
    rounding = rounding_of(kv_dtype, scales)
    return Cache(num_requests, spec, torch.float32, size=size, kv_dtype=kv_dtype, kv_scales=scales, rounding=rounding)


@pytest.mark.parametrize("kv_dtype", FP8)
def test_every_fp8_code_is_read_as_the_format_defines_it(kv_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor(FP8[kv_dtype] + [-number for number in FP8[kv_dtype]])
    kv = paged_kv(torch.zeros(1, 2, 1, 1, 1, dtype=kv_dtype))
    found = read(kv, (codes,))
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(found.signbit()[:127], expected.signbit()[:127])
    # Without any NaN the shorter way is taken.
    finite = expected.isfinite()
    assert torch.equal(read(kv, (codes[finite],)), expected[finite])


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_takes_the_nearest_number_and_beyond_the_largest_that(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator) * torch.logspace(-6, 4.7, 500)
    x = torch.cat((x, torch.tensor(FP8[kv_dtype]).nan_to_num(0, 6e4), torch.tensor([0.0, -0.0, 6e4, -6e4]))).to(dtype)
    kv = paged_kv(torch.zeros(1, 2, 1, 1, 1, dtype=kv_dtype))
    found = read(kv, kv.encode(x, 0))
    assert torch.equal(found.double(), torch.from_numpy(nearest_fp8(x.double().numpy(), kv_dtype)))
    special = read(kv, kv.encode(torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype), 1), 1)
    largest = torch.finfo(kv_dtype).max
    assert special[:2].tolist() == [largest, -largest] and special[2].isnan()


def test_float16_takes_its_largest_for_what_is_beyond_it() -> None:
    kv = paged_kv(torch.zeros(1, 2, 1, 1, 1, dtype=torch.float16))
    found = read(kv, kv.encode(torch.tensor([1e9, -1e9, 3.0, math.nan]), 0))
    assert found[:3].tolist() == [65504, -65504, 3] and found[3].isnan()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_int8_errs_by_half_a_step_of_its_head_at_most_and_never_overflows(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, -1)
    kv = Int8Kv((torch.zeros(1, 2, 1, 1, len(values), dtype=torch.int8), torch.zeros(1, 2, 1, 1, 1)))
    codes, scales = kv.encode(x, 0)
    assert scales.shape == (1, 1, 1) and bool(scales.isfinite().all()) and int(codes.abs().max()) <= 127
    found, largest = read(kv, (codes, scales)), float(x.abs().max())
    step = max(largest / 127, torch.finfo(torch.float32).tiny)
    assert float((found.double() - x.double()).abs().max()) <= step * (0.5 + 1e-4)


def test_int8_scales_each_head_of_each_token_and_nan_stays_where_it_is() -> None:
    x = torch.tensor([[[1.0, -2.0], [100.0, 3.0]], [[0.0, 0.0], [math.nan, 1.0]], [[1e30, -3e38], [1e-30, 0.0]]])
    kv = Int8Kv((torch.zeros(1, 2, 1, 2, 2, dtype=torch.int8), torch.zeros(1, 2, 1, 2, 1)))
    codes, scales = kv.encode(x, 0)
    expected = x.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(scales, expected.clamp_min(1e-37), equal_nan=True, atol=1e-37, rtol=1e-6)
    found = read(kv, (codes, scales))
    assert found[1, 0].tolist() == [0, 0] and found[1, 1].isnan().all()
    torch.testing.assert_close(found[2], x[2], rtol=0, atol=3e38 / 254 * 1.01)
    torch.testing.assert_close(found[2, 1], x[2, 1], rtol=1e-6, atol=0)
    assert codes[0].tolist() == [[64, -127], [127, 4]]
    infinite = read(kv, kv.encode(torch.tensor([[[math.inf, -1.0]]]), 0))
    torch.testing.assert_close(infinite[0, 0], torch.tensor([3.4028e38, 0.0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KV_DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_ragged_batches(variant: str, name: str, layout: str) -> None:
    pick = random.Random(variant + name)
    cache = cache_of(name, VARIANTS[variant], 4, LAYOUTS[layout])
    for _ in range(6):
        requests = pick.sample(range(4), pick.randint(1, 4))
        counts = sorted((pick.choice([1, 1, 2, 3, 4, 7, 9]) for _ in requests), reverse=True)
        found, expected = cache.step(list(zip(requests, counts, strict=True)))
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KV_DTYPES)
def test_models_in_16_bits(name: str, dtype: torch.dtype) -> None:
    kv_dtype = KV_DTYPES[name]
    rounding = rounding_of(kv_dtype)
    cache = Cache(2, SPEC, dtype, kv_dtype=kv_dtype, rounding=lambda x, plane: rounding(x, plane).to(torch.float32))
    for rows in ([(0, 9), (1, 4)], [(0, 5), (1, 1)], [(0, 1), (1, 1)]):
        found, expected = cache.step(rows)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("name", [name for name in KV_DTYPES if name != "float32"])
@pytest.mark.parametrize("spec", [SPEC, LATENT, VARIANTS["all_together"]])
def test_a_whole_prompt_is_attended_as_its_chunks_are(spec: AttentionSpec, name: str) -> None:
    whole, chunks, crowd, exact = (cache_of(n, spec, 3) for n in (name, name, name, "float32"))
    at_once, _ = whole.step([(1, 23)])
    crowd.step([(0, 6), (2, 3)])
    among, _ = crowd.step([(1, 23), (0, 2), (2, 1)])
    parts = [chunks.step([(1, count)])[0] for count in (5, 1, 9, 8)]
    torch.testing.assert_close(torch.cat(parts), at_once, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(among[:23], at_once, atol=2e-6, rtol=2e-6)
    # What is kept is the same to the bit, and is what was attended to: not the numbers that came.
    blocks = torch.from_numpy(whole.tables[1, :5]).long()
    for one, other in itertools.pairwise((whole, chunks, crowd)):
        for a, b in zip(one.paged.stored, other.paged.stored, strict=True):
            assert torch.equal(a[blocks].view(torch.uint8), b[blocks].view(torch.uint8))
    unrounded, _ = exact.step([(1, 23)])
    assert float((unrounded - at_once).abs().max()) > 1e-4


@pytest.mark.parametrize("name", KV_DTYPES)
@pytest.mark.parametrize("spec", [SPEC, LATENT, replace(SPEC, has_sinks=True)])
@pytest.mark.parametrize("size", LAYOUTS.values())
def test_what_an_earlier_owner_left_in_a_block_does_not_leak(size: int, spec: AttentionSpec, name: str) -> None:
    cache = cache_of(name, spec, 2, size)
    cache.step([(0, 11), (1, 3)])
    cache.keys[0] = cache.keys[0][:0]
    cache.values[0] = cache.values[0][:0]
    blocks = torch.from_numpy(cache.tables[0]).long()
    for tensor in cache.paged.stored:
        rest = torch.zeros_like(tensor)
        # The bytes of NaN in every format that has one.
        rest.view(torch.uint8).fill_(0xFF)
        tensor[blocks] = rest[blocks]
    for count in (5, 1, 1, 1, 1, 2):
        found, expected = cache.step([(0, count), (1, 1)])
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["float16", "fp8", "fp8_e5m2", "int8"])
def test_numbers_beyond_the_format_stay_numbers(name: str) -> None:
    cache = cache_of(name, SPEC, 1)
    cache.step([(0, 3)])
    q, k, v = cache.draw([(0, 4)])
    cache.draw = lambda rows: (q, k * 1e7, v * 1e7)  # type: ignore[method-assign]
    assert bool(cache.step([(0, 4)])[0].isfinite().all())


def test_each_form_has_its_class_and_knows_when_it_is_exact() -> None:
    layer = torch.zeros(2, 2, 4, 1, 8)
    plain, half = paged_kv(layer, SCALES), paged_kv(layer.to(torch.bfloat16))
    fp8 = paged_kv(layer.to(torch.float8_e5m2), SCALES)
    int8 = paged_kv((layer.to(torch.int8), torch.zeros(2, 2, 4, 1)))
    assert [type(kv) for kv in (plain, half, fp8, int8)] == [PlainKv, PlainKv, Fp8Kv, Int8Kv]
    assert isinstance(fp8, Fp8Kv) and fp8.scales == SCALES and fp8.dtype == torch.float8_e5m2
    models = (torch.float32, torch.bfloat16, torch.float16)
    assert [[kv.is_exact(dtype) for dtype in models] for kv in (plain, half, fp8, int8)] == [
        [True, True, True],
        [False, True, False],
        [False, False, False],
        [False, False, False],
    ]
    assert [kv.num_planes for kv in (plain, fp8, int8, paged_kv(torch.zeros(2, 1, 4, 1, 8)))] == [2, 2, 2, 1]
    with pytest.raises(AssertionError, match=r"k=0\.0"):
        paged_kv(layer.to(torch.float8_e5m2), KvScales(0.0, 1.0))


def test_spoiled_pools_hold_nan_where_they_can() -> None:
    tensors = [torch.zeros(3, dtype=dtype) for dtype in KV_DTYPES.values()]
    spoil(tensors)
    assert [bool(tensor.float().isnan().all()) for tensor in tensors] == [
        dtype != torch.int8 for dtype in KV_DTYPES.values()
    ]


@pytest.mark.parametrize("name", [name for name in KV_DTYPES if name != "float32"])
def test_what_is_decoded_in_several_goes_is_what_is_decoded_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(name, SPEC, 2)
    cache.step([(0, 23), (1, 18)])
    parts = torch.tensor([5, 0, 3, 40, 41, 7])
    at_once = cache.paged.gather(parts, 4, torch.float32)
    assert at_once.shape == (6, 4, 2, 8)
    # Two parts of 4 x 2 x 8 numbers at once, so that each plane's three take two goes.
    monkeypatch.setattr("backend_engine.attention.paged_kv._DECODED_AT_ONCE", 128)
    torch.testing.assert_close(cache.paged.gather(parts, 4, torch.float32), at_once, atol=0, rtol=0, equal_nan=True)
    half = cache.paged.gather(parts, 4, torch.bfloat16)
    torch.testing.assert_close(half, at_once.to(torch.bfloat16), atol=0, rtol=0, equal_nan=True)
