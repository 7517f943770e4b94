"""docs/models.md is what the registry and the table of tested models say."""

import write_models


def test_the_page_is_up_to_date() -> None:
    assert write_models.TARGET.read_text(encoding="utf-8") == write_models.document()


def test_every_registered_architecture_is_tested() -> None:
    tested = {row.architecture for row in write_models.TINY_MODELS.values()}
    assert tested == set(write_models.ARCHITECTURES.names())
