"""Recorded operations put together: the same bits, fewer operations, and when they are left as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backend_engine.ops import dense_products
from backend_engine.ops.dense_packing import pack_dense
from backend_engine.ops.dense_products import DenseKind, multiply_dense
from backend_engine.ops.fused_ops import fuse
from backend_engine.ops.native_ops import NativeOps
from backend_engine.ops.native_runtime import NativeRuntime, NativeStep, OpKind, Recording, native_runtime

OPS = NativeOps()
INTEGERS = [kind for kind in DenseKind if kind.is_integer]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": OPS.silu_and_mul,
    "gelu": lambda x: OPS.gelu_and_mul(x, "none"),
    "gelu_tanh": lambda x: OPS.gelu_and_mul(x, "tanh"),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def runtime() -> NativeRuntime:
    found = native_runtime()
    assert found is not None, "the machine that runs the tests has a C compiler"
    return found


class Recorded:
    """``run`` of ``[num_tokens, columns]``, recorded for up to ``capacity`` tokens."""

    def __init__(self, run: Callable[[Tensor], Tensor], columns: int, capacity: int = 50) -> None:
        self.recording = Recording(capacity)
        self._x = self.recording.empty(capacity, columns)
        with runtime().record(self.recording):
            result = run(self._x[:2])
        assert self.recording.why_not is None
        self._result = self.recording.whole(result)

    @property
    def kinds(self) -> list[OpKind]:
        return [OpKind(op.kind) for op in self.recording.ops]

    def __call__(self, x: Tensor) -> Tensor:
        self._x[: len(x)] = x
        runtime().replay(self.recording, NativeStep(num_tokens=len(x)))
        return self._result[: len(x)].clone()


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda k: k.name)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns"), [(32, 70), (96, 577), (2048, 100)])
def test_a_product_that_gates_gives_the_bits_of_both(kind: DenseKind, act: str, rows: int, columns: int) -> None:
    w = pack_dense(random(rows, columns), kind, random(rows, seed=1) if rows > 32 else None)

    def run(x: Tensor) -> Tensor:
        product = multiply_dense(w, x)
        assert product is not None
        return ACTIVATIONS[act](product)

    recorded = Recorded(run, columns)
    fuse(recorded.recording)
    assert recorded.kinds == [OpKind.ROUND, OpKind.DENSE]
    for num_tokens in (1, 2, 5, 6, 7, 50):
        x = random(num_tokens, columns, seed=num_tokens)
        assert torch.equal(recorded(x), run(x)), num_tokens
    x = random(9, columns)
    x[3, 0] = torch.nan
    assert torch.equal(recorded(x).isnan().any(1), torch.arange(9) == 3)


@pytest.mark.parametrize(
    ("kind", "rows", "act"),
    [
        (DenseKind.F32, 64, OPS.silu_and_mul),
        (DenseKind.F16, 64, OPS.silu_and_mul),
        (DenseKind.I8, 48, OPS.silu_and_mul),  # one and a half panels a half
        (DenseKind.I8, 64, OPS.silu),  # gates nothing
        (DenseKind.I8, 64, lambda x: OPS.silu_and_mul(x[:, 16:])),  # not all of the product
    ],
)
def test_others_stay_as_they_are(kind: DenseKind, rows: int, act: Callable[[Tensor], Tensor]) -> None:
    w = pack_dense(random(rows, 40), kind)

    def run(x: Tensor) -> Tensor:
        product = multiply_dense(w, x)
        assert product is not None
        return act(product)

    recorded = Recorded(run, 40)
    before = recorded.kinds
    fuse(recorded.recording)
    assert recorded.kinds == before and before[-2:] == [OpKind.DENSE, OpKind.ACTIVATION]
    assert torch.equal(recorded(random(7, 40)), run(random(7, 40)))


def test_a_result_that_takes_the_place_of_what_the_product_reads() -> None:
    """As wide as the rounded tokens, whose memory is free once the product has been computed."""
    w = pack_dense(random(2 * 112, 200), DenseKind.I8)
    assert dense_products._rounded_width(DenseKind.I8, 200) == 112

    def run(x: Tensor) -> Tensor:
        product = multiply_dense(w, x)
        assert product is not None
        return OPS.silu_and_mul(product)

    recorded = Recorded(run, 200)
    fuse(recorded.recording)
    assert recorded.kinds == [OpKind.ROUND, OpKind.DENSE, OpKind.ACTIVATION]
    assert torch.equal(recorded(random(20, 200)), run(random(20, 200)))
