"""A cache of a test's own that has the compiled native library of this one: compiling it takes many seconds."""

from pathlib import Path

from backend_engine import envs
from backend_engine.ops.native_runtime import native_runtime


def with_native_library(cache: Path) -> Path:
    """``cache``, with a link to the library."""
    assert native_runtime() is not None, "the machine that runs the tests has a C compiler"
    link = cache / "native"
    if not link.is_symlink():
        cache.mkdir(parents=True, exist_ok=True)
        link.symlink_to((Path(envs.INFLIGHT_CACHE.get()).expanduser() / "native").absolute())
    return cache
