"""Memory of a server that has warmed up stays where it is, whatever its clients do."""

from pathlib import Path

import pytest
import soak

from tests.support.server import running_server

pytestmark = pytest.mark.triton


def test_memory_stays_flat_over_many_requests(table_model_dir: Path) -> None:
    """The script's own measure over fewer requests; 5,000 of them are ``scripts/soak.py``."""
    settings = {"max_tokens_in_paged_kv_cache": "24576", "max_seq_len": "1024"}
    with running_server(model_dir=table_model_dir, settings=settings) as server:
        traffic = soak.Traffic(server.http_url.removeprefix("http://"), max_tokens=4)
        first, *later = soak.soak(server, traffic, [900, 1400, 1900], concurrency=8)
    assert max(sample.total for sample in later) < 1.03 * first.total, [s.megabytes for s in (first, *later)]
