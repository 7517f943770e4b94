"""The compiled products of packed weights: against the reference in torch, and what happens where there are none."""

import importlib
import logging
import math
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend_engine.errors import ConfigError
from backend_engine.ops import native_library, native_runtime, packed_products
from backend_engine.ops.packed_products import Codes, PackedProducts, PackedWeight
from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
from backend_engine.quantization.schemes.float8 import Float8
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.weight_scheme import WeightScheme
from tests.support.native_variants import HERE, VARIANTS, compiled_variant

IRREGULAR = tuple(math.sin(i * i) for i in range(16))
E5M2 = torch.float8_e5m2
SCHEMES = {
    "int4": GroupwiseInt(4, 32),
    "int4, zeros": GroupwiseInt(4, 128, "codes", torch.bfloat16),
    "int4, offsets": GroupwiseInt(4, 16, "offsets", torch.float32),
    "int4, one group": GroupwiseInt(4, None, "codes"),
    "int4, groups of 7": GroupwiseInt(4, 7, "offsets"),
    "int8": GroupwiseInt(8, None, scale_dtype=torch.float32),
    "int8, zeros": GroupwiseInt(8, 32, "codes"),
    "int8, offsets": GroupwiseInt(8, 24, "offsets", torch.bfloat16),
    "int8, groups of 5": GroupwiseInt(8, 5, "codes"),
    "nvfp4": Codebook4(E2M1, 16, "e4m3", has_row_scale=True),
    "mxfp4": Codebook4(E2M1, 32, "e8m0"),
    "nf4": Codebook4(IRREGULAR, 64),
    "iq4_nl": Codebook4(IRREGULAR, 32, "float16"),
    "codebook, groups of 3": Codebook4(IRREGULAR, 3, "e4m3"),
    "e4m3": Float8(),
    "e4m3, groups": Float8(group_size=128),
    "e5m2": Float8(E5M2),
    "e5m2, groups of 9": Float8(E5M2, 9),
}
# More than a block, a block and a half vector, and fewer columns than a vector.
COLUMNS = (1350, 576, 34, 6)
NUM_ROWS = (1, 21)


def products() -> PackedProducts:
    found = packed_products.packed_products()
    assert found is not None, "the machine that runs the tests has a C compiler"
    return found


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedProducts:
    """The products as they run here, and as they would on other processors."""
    if request.param == HERE:
        return products()
    return PackedProducts(compiled_variant(request.param, tmp_path_factory.getbasetemp()))


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The products are looked for anew, in an empty cache."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    for cached in (packed_products.packed_products, native_runtime.native_runtime):
        cached.cache_clear()
    yield tmp_path / "cache" / "native"
    for cached in (packed_products.packed_products, native_runtime.native_runtime):
        cached.cache_clear()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the package logs."""
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    caplog.set_level("INFO")
    return caplog


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stored(scheme: WeightScheme, num_rows: int, columns: int, seed: int = 0) -> dict[str, Tensor]:
    """Random components; every code of eight bits and every finite float8 is among them if they are many."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, component in scheme.components(columns).items():
        shape = (num_rows, *component.shape)
        if name == "codes":
            found[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            if component.dtype != torch.uint8:
                magnitude = found[name] & 127
                is_number = magnitude < (0x7C if component.dtype == E5M2 else 0x7F)
                found[name] = torch.where(is_number, found[name], 56).view(component.dtype)
        elif component.dtype == torch.uint8:
            low, high = (0, 256) if name == "zeros" else (110, 135)
            found[name] = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        else:
            found[name] = torch.randn(shape, generator=generator).mul_(0.3).to(component.dtype)
    return found


def packed(scheme: WeightScheme, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> PackedWeight:
    """What the scheme hands to the products."""
    seen: list[PackedWeight] = []
    with monkeypatch.context() as patch:
        module = importlib.import_module(type(scheme).__module__)
        patch.setattr(module, "multiply_packed", lambda weight, x: seen.append(weight) or x)
        scheme.multiply(tensors, torch.zeros(1, 1))
    return seen[0]


def assert_close(found: Tensor, weight: Tensor, x: Tensor) -> None:
    """As near to the exact product as float32 sums are, whatever their order."""
    exact = x.double() @ weight.double().T
    allowed = (x.double().abs() @ weight.double().abs().T) * 2e-6 + 1e-30
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= allowed).all(), ((found.double() - exact).abs() / allowed).max()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_decoded_and_multiplied_as_by_the_reference(
    name: str, columns: int, variant: PackedProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = SCHEMES[name]
    for num_rows in NUM_ROWS:
        tensors = stored(scheme, num_rows, columns)
        weight, expected = packed(scheme, tensors, monkeypatch), scheme.decode(tensors)
        assert torch.equal(variant.decode(weight), expected)
        for num_tokens in (0, 1, 3, 8, 9, 64):
            x = torch.randn(num_tokens, columns)
            assert_close(variant.multiply(weight, x), expected, x)


@pytest.mark.parametrize("kind", [Codes.INT8, Codes.E4M3, Codes.E5M2])
def test_an_odd_number_of_columns(kind: Codes, variant: PackedProducts) -> None:
    codes = torch.arange(3 * 37).view(3, 37).remainder(100).to(torch.uint8)
    scales = torch.rand(3, 4)
    weight = PackedWeight(kind, codes, scales, 10, 128.0 if kind == Codes.INT8 else 0.0)
    plain = {Codes.E4M3: torch.float8_e4m3fn, Codes.E5M2: E5M2}
    numbers = codes.float() - 128 if kind == Codes.INT8 else codes.view(plain[kind]).float()
    expected = numbers * scales.repeat_interleave(10, 1)[:, :37]
    x = torch.randn(2, 37)
    assert torch.equal(variant.decode(weight), expected)
    assert_close(variant.multiply(weight, x), expected, x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, E5M2])
def test_every_number_of_eight_bits(dtype: torch.dtype, variant: PackedProducts) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    kind = Codes.E5M2 if dtype == E5M2 else Codes.E4M3
    for size in (None, 1):  # in vectors, and one by one
        scales = torch.ones(1, 1 if size is None else 256)
        decoded, expected = variant.decode(PackedWeight(kind, codes, scales, size)), codes.view(dtype).float()
        torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(decoded.signbit() & ~expected.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_every_kind_of_scale(dtype: torch.dtype, variant: PackedProducts) -> None:
    bits = torch.arange(65536) if dtype.itemsize == 2 else torch.arange(256)
    if dtype == torch.float32:
        scales = torch.tensor([0.0, -0.0, 1e-40, 1.5, -3e38, math.inf, math.nan, 1e-30])
        expected = scales
    elif dtype == torch.uint8:
        scales = bits.to(torch.uint8)
        expected = torch.where(bits == 255, math.nan, torch.exp2(bits.double() - 127)).float()
    else:
        scales = bits.to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
        expected = scales.float()
    codes = torch.full((scales.numel(), 1), 129, dtype=torch.uint8)  # 1 above the midpoint
    for view, size in ((scales.view(-1, 1), None), (scales.view(-1, 8), 1)):
        weight = PackedWeight(Codes.INT8, codes.view(view.shape[0], -1), view, size, 128.0)
        decoded = variant.decode(weight).flatten()
        torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("columns", [576, 1350])
def test_a_tokens_result_has_the_same_bits_alone_among_others_and_on_two_threads(
    name: str, columns: int, variant: PackedProducts, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    scheme = SCHEMES[name]
    weight = packed(scheme, stored(scheme, 203, columns), monkeypatch)
    x = torch.randn(65, columns)
    together = variant.multiply(weight, x)
    for count in (1, 2, 3, 4, 5, 8, 9, 16):
        assert torch.equal(variant.multiply(weight, x[:count]), together[:count]), count
    assert torch.equal(variant.multiply(weight, x[7:8]), together[7:8])
    torch.set_num_threads(1)
    assert torch.equal(variant.multiply(weight, x), together)


def test_rows_do_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SCHEMES["int4"]
    tensors = stored(scheme, 37, 64)
    x = torch.randn(5, 64)
    together = products().multiply(packed(scheme, tensors, monkeypatch), x)
    for start, end in ((0, 1), (1, 2), (11, 37), (36, 37)):
        some = packed(scheme, {name: t[start:end] for name, t in tensors.items()}, monkeypatch)
        assert torch.equal(products().multiply(some, x), together[:, start:end])


def test_a_scale_that_is_no_number_spoils_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("int4", "int8", "nvfp4", "mxfp4", "e4m3"):
        scheme = SCHEMES[name]
        tensors = stored(scheme, 6, 64)
        tensors["scales"].view(torch.uint8)[2] = 255
        for num_tokens in (1, 5):
            out = scheme.multiply(tensors, torch.randn(num_tokens, 64))
            assert out[:, 2].isnan().all() and out[:, [0, 1, 3, 4, 5]].isfinite().all(), name


def test_inputs_with_gaps_and_of_other_dtypes() -> None:
    scheme = SCHEMES["int4, zeros"]
    tensors = stored(scheme, 5, 128)
    weight = scheme.decode(tensors)
    x = torch.randn(3, 256)
    for gaps in (x[:, ::2], x[:, :128], torch.randn(128, 4).T):
        assert_close(scheme.multiply(tensors, gaps), weight, gaps)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x[:, :128].to(dtype)
        out = scheme.multiply(tensors, narrow)
        assert out.dtype == dtype
        assert torch.equal(out, products().multiply(_weight_of(tensors), narrow.float()).to(dtype))


def _weight_of(tensors: dict[str, Tensor]) -> PackedWeight:
    return PackedWeight(Codes.INT4, tensors["codes"], tensors["scales"], 128, zeros=tensors["zeros"])


def test_weights_with_gaps_and_inputs_in_float64_take_the_reference() -> None:
    scheme = SCHEMES["int8, zeros"]
    tensors = stored(scheme, 4, 64)
    x = torch.randn(2, 64)
    gaps = {name: torch.stack((t, t), -1)[..., 0] for name, t in tensors.items()}
    assert not gaps["codes"].is_contiguous()
    assert torch.equal(scheme.multiply(gaps, x), WeightScheme.multiply(scheme, tensors, x))
    assert torch.equal(scheme.multiply(tensors, x.double()), WeightScheme.multiply(scheme, tensors, x.double()))


def test_shapes_that_do_not_belong_together_never_reach_the_library() -> None:
    good = _weight_of(stored(SCHEMES["int4, zeros"], 4, 256))
    x = torch.zeros(1, 256)
    assert good.zeros is not None
    for bad in (
        good._replace(scales=good.scales[:, :1]),
        good._replace(scales=good.scales[:3]),
        good._replace(zeros=good.zeros[:, :1]),
        good._replace(zeros=good.zeros.to(torch.int32)),
        good._replace(offsets=torch.zeros(4, 3)),
        good._replace(row_scale=torch.ones(4, 1)),
        good._replace(group_size=64),
    ):
        with pytest.raises(AssertionError):
            products().multiply(bad, x)
    with pytest.raises(AssertionError):
        products().multiply(good, x[:, :255])
    with pytest.raises(KeyError):
        products().multiply(good._replace(scales=good.scales.to(torch.float64)), x)


def test_nothing_to_multiply() -> None:
    weight = PackedWeight(Codes.INT8, torch.zeros(0, 8, dtype=torch.uint8), torch.ones(0, 1), None, 128.0)
    assert products().multiply(weight, torch.ones(2, 8)).shape == (2, 0)
    assert products().decode(weight).shape == (0, 8)


# ---- where there is no library ------------------------------------------------------------------------------------


def takes_the_reference(said: pytest.LogCaptureFixture, reason: str) -> None:
    """The same numbers as ever, and one line that says why they take long."""
    scheme = SCHEMES["int4"]
    tensors = stored(scheme, 6, 64)
    x = torch.randn(3, 64)
    prepared = scheme.prepare(tensors)
    for _ in range(2):
        assert torch.equal(scheme.multiply(prepared, x), WeightScheme.multiply(scheme, tensors, x))
    lines = [record.getMessage() for record in said.records if "torch" in record.getMessage()]
    assert len(lines) == 1 and reason in lines[0] and "\n" not in lines[0], lines


def test_without_a_compiler(
    fresh: Path, said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    takes_the_reference(said, "there is no C compiler (cc, gcc, clang)")


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A ``cc`` that comes before every other; ``$real`` in the script is the real one."""
    compiler = folder / "cc"
    compiler.write_text(f"#!/bin/sh\nreal={shutil.which('cc') or shutil.which('gcc')}\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_compiler_that_fails(
    fresh: Path, said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, 'echo "note: hm" >&2; echo "x.c:1: error: no such processor" >&2; exit 1')
    takes_the_reference(said, "native.c: x.c:1: error: no such processor")
    assert not list(fresh.iterdir()), "nothing half-made stays in the cache"


def test_a_compiler_that_cannot_be_run(
    fresh: Path, said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, "")
    (tmp_path / "cc").write_bytes(b"\x7fELF of another processor")
    takes_the_reference(said, f"the C compiler {tmp_path}/cc cannot be run")


def test_a_compiler_whose_result_cannot_be_loaded(
    fresh: Path, said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, 'for last; do :; done; [ "$last" = /dev/null ] || echo no library > "$last"')
    takes_the_reference(said, "the compiled library cannot be loaded")


def test_a_library_with_wrong_answers(
    fresh: Path, said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(native_library.FOLDER, tmp_path / "native")
    header = folder / "packed.h"
    wrong = header.read_text().replace("out[r] + sums[r] : sums[r]", "out[r] : 2 * sums[r]")
    assert wrong != header.read_text()
    header.write_text(wrong)
    monkeypatch.setattr(native_library, "FOLDER", folder)
    monkeypatch.setattr(native_library, "SOURCE", folder / "native.c")
    monkeypatch.setattr(native_library, "_FLAGS", ("-O1", *native_library._FLAGS[1:]))  # which takes less time
    takes_the_reference(said, "give wrong answers")


def test_switched_off_by_the_environment(
    fresh: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_OPS", "torch")
    takes_the_reference(said, "ENGINE_OPS=torch")
    assert not fresh.exists(), "nothing was compiled"


def test_a_wrong_value_of_the_switch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_OPS", "fast")
    with pytest.raises(ConfigError, match="ENGINE_OPS='fast' is not allowed; use native or torch"):
        packed_products.packed_products()


def test_the_source_is_installed_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["backend_engine.ops"]
    for path in (native_library.SOURCE, *native_library.FOLDER.glob("*.h")):
        assert any(path.match(pattern) for pattern in patterns), path
