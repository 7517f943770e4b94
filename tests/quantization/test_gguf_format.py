"""Every type of GGUF: unpacked and decoded, a weight is what the ``gguf`` library decodes it to, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from backend_engine.config.hf_config import HfConfig
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats.gguf import GgufFormat, read
from backend_engine.quantization.formats.gguf_blocks import BLOCK_TYPES
from backend_engine.quantization.weight_format import StoredTensors

SHAPE = (37, 512)
# Bytes of a block that are a float16, by type; a scale of any bits could be a NaN.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ1_M": (),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


def random_rows(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Rows of random bytes whose scales are numbers."""
    generator = np.random.default_rng(seed)
    columns, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // columns, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (generator.standard_normal(len(blocks)) * 0.1).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":
        scales = np.abs(generator.standard_normal(len(blocks)) * 0.1).astype(np.float16).view(np.uint16)
        for word in range(4):
            high = ((scales >> (4 * word)) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * word] = (blocks[:, 49 + 2 * word] & 15) | (high << 4)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(0, 253, len(blocks))
    if kind == "NVFP4":
        blocks[:, :4] &= 0x7F
    return blocks.reshape(shape[0], -1)


def decoded(kind: str, rows: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    packing = GgufFormat(kind)
    tensors = packing.unpack({".weight": torch.from_numpy(rows)}, shape)
    wanted = packing.scheme.components(shape[-1])
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {
        name: ((*shape[:-1], *component.shape), component.dtype) for name, component in wanted.items()
    }
    return packing.scheme.decode(tensors)


def test_every_type_that_the_library_decodes_is_known() -> None:
    known = {kind.name for kind in gguf.quants._type_traits} - {"BF16"}
    assert set(BLOCK_TYPES) == known == set(HALVES)


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_random_blocks_decode_as_in_the_library(kind: str) -> None:
    rows = random_rows(kind, SHAPE)
    expected = torch.from_numpy(gguf.dequantize(rows, Type[kind]))
    assert expected.isfinite().all() and expected.abs().max() > 0
    assert torch.equal(decoded(kind, rows, SHAPE), expected)


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantized_weights_decode_as_in_the_library(kind: str) -> None:
    weight = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32) * 0.05
    weight[3] = 0
    rows = gguf.quantize(weight, Type[kind])
    assert torch.equal(decoded(kind, rows, SHAPE), torch.from_numpy(gguf.dequantize(rows, Type[kind])))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_stacked_weights_keep_their_leading_dimension(kind: str) -> None:
    rows = np.stack([random_rows(kind, SHAPE, seed) for seed in range(3)])
    expected = torch.from_numpy(gguf.dequantize(rows, Type[kind]))
    assert torch.equal(decoded(kind, rows, (3, *SHAPE)), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "IQ2_XXS"])
def test_products_are_those_of_the_decoded_weight(kind: str) -> None:
    rows = random_rows(kind, SHAPE)
    if kind == "MXFP4":
        rows = gguf.quantize(np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32), Type.MXFP4)
    packing = GgufFormat(kind)
    tensors = packing.scheme.prepare(packing.unpack({".weight": torch.from_numpy(rows)}, SHAPE))
    x = torch.randn(5, SHAPE[1], generator=torch.Generator().manual_seed(0))
    expected = x @ torch.from_numpy(gguf.dequantize(rows, Type[kind])).T
    torch.testing.assert_close(packing.scheme.multiply(tensors, x), expected, rtol=1e-4, atol=1e-3)


def test_many_rows_are_unpacked_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows("Q4_K", SHAPE)
    whole = decoded("Q4_K", rows, SHAPE)
    monkeypatch.setattr("backend_engine.quantization.formats.gguf._CHUNK_NUMBERS", 5 * SHAPE[1])
    assert torch.equal(decoded("Q4_K", rows, SHAPE), whole)


def test_the_leaf_is_checked_by_type_and_bytes() -> None:
    assert GgufFormat("Q6_K").leaves((8, 4, 512)) == {".weight": ((8, 4, 420), ("Q6_K",), False)}
    with pytest.raises(ValueError, match="Q6_K packs 256 columns together, which do not divide 96"):
        GgufFormat("Q6_K").leaves((8, 96))


def test_types_are_looked_up_by_the_tensors() -> None:
    tensors = {
        "a.weight": TensorInfo((4, 144), "Q4_K"),
        "b.weight": TensorInfo((4, 256), "F16"),
        "c.weight": TensorInfo((4, 292), "Q8_K"),
    }
    quantization = read(HfConfig({"quant_method": "gguf"}), StoredTensors(tensors, "model.gguf"))
    assert quantization.format_of("a") == GgufFormat("Q4_K")
    assert quantization.format_of("b") is None and quantization.format_of("absent") is None
    with pytest.raises(ModelLoadError, match=r"^model.gguf: tensor c.weight is of type Q8_K; expected one of F64"):
        quantization.format_of("c")
