"""Fixtures that tests of every level share. Heavy imports stay inside them: most host tests need no torch."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Continuous integration tries the same examples each time, so that a change is judged by itself; elsewhere every run
# tries new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def table_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the table model M; read only."""
    from tests.support.table_model import build_table_model

    return build_table_model(tmp_path_factory.mktemp("models") / "table")


@pytest.fixture(scope="session")
def random_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random model R; read only."""
    from tests.support.table_model import build_random_model

    return build_random_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def table_ids() -> dict[str, int]:
    """Token id of each word of the table model."""
    from tests.support.table_model import SPECIAL_TOKENS, WORDS, token_id

    return {word: token_id(word) for word in (*WORDS, *SPECIAL_TOKENS)}
