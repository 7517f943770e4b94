"""Checkpoints of Megatron-LM and NeMo in the engine: the logits of the model that they were written from."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.test_megatron import KINDS, build
from tests.support import megatron_writer as writer
from tests.support.engine_driver import EngineDriver
from tests.support.parity import check

PROMPT = [5, 89, 3, 41, 17, 17, 60, 8, 77, 23, 4]


def engine_agrees(path: Path, model: Any) -> None:
    driver = EngineDriver(path)
    output = driver.generate(driver.add(0, PROMPT), 6, chunk=4)
    check(driver, model, 0, PROMPT, output)


@pytest.mark.parametrize("kind", KINDS)
def test_megatron(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    engine_agrees(writer.save_megatron(tmp_path, model, tp=2, pp=2), model)


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2", "gpt_neox"])
def test_nemo_archive(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    engine_agrees(writer.pack(tmp_path / "tiny.nemo", writer.nemo1_files(model, tp=2)), model)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_nemo_folder(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    engine_agrees(writer.save_nemo2(tmp_path, model), model)
