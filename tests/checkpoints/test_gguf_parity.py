"""Every architecture of GGUF through the whole engine: the logits of the folder it was written from."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.engine_driver import EngineDriver
from tests.support.parity import check, prompt
from tests.support.tiny_gguf import TINY_GGUFS, build_tiny, packed_as, plain, split_parts, write_gguf


def run(path: Path, model: Any) -> None:
    driver, ids = EngineDriver(path), prompt(45)
    output = driver.generate(driver.add(0, ids), 6, chunk=11)
    check(driver, model, 0, ids, output)


@pytest.mark.parametrize("name", TINY_GGUFS)
def test_plain_weights_give_the_folders_logits(name: str, tmp_path: Path) -> None:
    model = build_tiny(name, tmp_path / "hf")
    run(write_gguf(tmp_path / "hf", tmp_path / "model.gguf", plain), model)


@pytest.mark.parametrize("name", TINY_GGUFS)
def test_packed_weights_give_the_rounded_folders_logits(name: str, tmp_path: Path) -> None:
    kind = Type.MXFP4 if name == "gpt_oss" else Type.Q4_0
    model = build_tiny(name, tmp_path / "hf", kind)
    run(write_gguf(tmp_path / "hf", tmp_path / "model.gguf", packed_as(kind)), model)


def test_parts_of_a_split_file_give_the_same(tmp_path: Path) -> None:
    model = build_tiny("llama", tmp_path / "hf", Type.Q8_0)
    path = write_gguf(tmp_path / "hf", tmp_path / "model.gguf", packed_as(Type.Q8_0))
    first, *_ = split_parts(path, 2)
    run(first, model)
