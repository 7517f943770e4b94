"""What the parity tests share: random prompts, and the comparison of an engine's answer with transformers."""

from pathlib import Path
from typing import Any

import torch

from tests.support.engine_driver import EngineDriver
from tests.support.tiny_models import reference_logits

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny models' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (length,), generator=generator).tolist()


def check_folder(folder: Path, model: Any, num_tokens: int = 23, **options: Any) -> None:
    """A checkpoint in the engine (``options``: of the driver): a prompt in two chunks, then tokens one by one, against
    the reference.
    """
    driver = EngineDriver(folder, **options)
    ids = prompt(num_tokens)
    request = driver.add(1, ids)
    driver.step([(request, 9)])
    driver.step([(request, num_tokens - 9)])
    for _ in range(4):
        driver.step(generation=[request])
    check(driver, model, 1, ids, list(request.output_token_ids))


def check(driver: EngineDriver, model: Any, request_id: int, ids: list[int], output: list[int]) -> None:
    """The engine's tokens and logits are those of the reference, which reads the whole text in one pass."""
    expected = reference_logits(model, ids, output)
    assert output == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(driver.logits[request_id]), expected, **TOLERANCE)
