"""The native library's threads, and recordings of operations."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from backend_engine.ops.native_ops import NativeOps
from backend_engine.ops.native_runtime import NativeRuntime, NativeStep, Recording

OPS = NativeOps()
WEIGHT = torch.linspace(0.5, 1.5, 512)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def runtime() -> NativeRuntime:
    found = OPS._runtime  # other tests let the process look for its own anew
    assert found is not None, "the machine that runs the tests has a C compiler"
    return found


def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A few operations, some of whose results are dropped on the way."""
    for _ in range(3):
        normed, residual = OPS.add_rms_norm(x, residual, WEIGHT, 1e-5)
        x = OPS.silu_and_mul(torch_free_copy(normed))
    return x, residual


def torch_free_copy(x: torch.Tensor) -> torch.Tensor:
    """Twice as wide, without torch: two heads of which each is ``x``."""
    return OPS.apply_rope(x.unsqueeze(1).expand(-1, 2, -1), *ROTATION[: x.shape[0]].unbind(1)).view(x.shape[0], -1)


# Cosine and sine of no rotation, in memory that a recording takes for its own in the tests.
ROTATION = torch.stack((torch.ones(400, 1, 512), torch.zeros(400, 1, 512)), 1)


def test_many_runs_of_many_threads_give_the_same_bits() -> None:
    x = torch.randn(400, 512)
    torch.set_num_threads(1)
    expected = OPS.rms_norm(x, WEIGHT, 1e-5)
    for num_threads in (2, 3, 4, 7) * 100:
        torch.set_num_threads(num_threads)
        assert torch.equal(OPS.rms_norm(x, WEIGHT, 1e-5), expected)


def test_callers_at_the_same_time() -> None:
    x = torch.randn(300, 512)
    expected = OPS.rms_norm(x, WEIGHT, 1e-5)
    wrong: list[int] = []

    def call(index: int) -> None:
        torch.set_num_threads(3)
        for _ in range(200):
            if not torch.equal(OPS.rms_norm(x, WEIGHT, 1e-5), expected):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert not wrong


def test_a_forked_process_has_threads_of_its_own() -> None:
    x = torch.randn(300, 512)
    expected = OPS.rms_norm(x, WEIGHT, 1e-5)
    child = os.fork()
    if child == 0:
        # torch.equal would use torch's own threads, which do not survive a fork.
        result = OPS.rms_norm(x, WEIGHT, 1e-5).numpy()
        os._exit(0 if (result == expected.numpy()).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def recorded(num_tokens: int) -> tuple[Recording, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A recording of ``layer``, its inputs and its results for as many tokens as may come."""
    recording = Recording(400)
    x, residual = recording.empty(400, 512), recording.empty(400, 512)
    recording.adopt(ROTATION)
    with runtime().record(recording):
        results = layer(x[:num_tokens], residual[:num_tokens])
    return recording, x, residual, (recording.whole(results[0]), recording.whole(results[1]))


@pytest.mark.parametrize("recorded_tokens", [2, 5])
def test_a_recording_does_what_was_done(recorded_tokens: int) -> None:
    recording, x, residual, results = recorded(recorded_tokens)
    assert recording.why_not is None
    assert recording.num_bytes < 400 * 512 * 4 * 12, "results that nobody holds give their place to others"
    for num_tokens in (1, 400, 3, 37):
        torch.manual_seed(num_tokens)
        x[:num_tokens].copy_(torch.randn(num_tokens, 512))
        residual[:num_tokens].copy_(torch.randn(num_tokens, 512))
        expected = layer(x[:num_tokens].clone(), residual[:num_tokens].clone())
        runtime().replay(recording, NativeStep(num_tokens=num_tokens))
        for result, value in zip(results, expected, strict=True):
            assert torch.equal(result[:num_tokens], value), num_tokens


def test_a_recording_says_what_it_did_not_see() -> None:
    recording = Recording(10)
    x = recording.empty(10, 512)
    with runtime().record(recording):
        OPS.silu(OPS.silu(x[:2]) * 2)
    assert recording.why_not == "something between two native operations is computed by torch"


def test_another_thread_is_not_recorded() -> None:
    recording = Recording(10)
    with runtime().record(recording):
        other = threading.Thread(target=lambda: OPS.rms_norm(torch.randn(3, 512), WEIGHT, 1e-5))
        other.start()
        other.join()
    assert len(recording.ops) == 0 and recording.why_not is None


def test_seconds_of_each_operation() -> None:
    recording, *_ = recorded(2)
    seconds = runtime().profile(recording, NativeStep(num_tokens=400))
    assert len(seconds) == len(recording.ops) and all(0 < each < 60 for each in seconds)
