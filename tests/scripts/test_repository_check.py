"""Which repositories the launcher has completed at start: those filled before a tensor of ours was there."""

from pathlib import Path

import pytest
from render_repository import render_repository
from repository_check import needs_completion


@pytest.mark.parametrize(
    ("model", "name"),
    [("tensorrt_llm", "piece_group"), ("preprocessing", "RETURN_ERRORS_IN_BAND"), ("postprocessing", "ERROR_CODE")],
)
def test_a_repository_filled_before_a_tensor_was_there_is_completed(
    model: str, name: str, table_model_dir: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    render_repository(repository, {}, table_model_dir)
    assert not needs_completion(repository)
    config = repository / model / "config.pbtxt"
    assert f'"{name}"' in config.read_text()
    config.write_text(config.read_text().replace(f'"{name}"', '"another"'))
    assert needs_completion(repository)
