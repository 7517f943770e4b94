#!/usr/bin/env python3
"""Writes docs/models.md from the registry of architectures and the table of what the tests run.

Run it after a change of either; a test compares what it would write with what is there. ``--check`` writes nothing and
exits 1 when it differs.
"""

import argparse
import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from backend_engine.plugins.catalog import ARCHITECTURES  # noqa: E402
from tests.support.tiny_models import TINY_MODELS  # noqa: E402
from tests.support.tiny_transformers import FALLBACK_MODELS, REFUSED_MODELS  # noqa: E402

TARGET = ROOT / "docs" / "models.md"
HEAD = """<!-- Written by scripts/write_models.py; do not edit. -->
# Models

What a folder's `config.json` names under `architectures` decides who runs it.

## Native families

Declared in `backend_engine/models/families`, a file each. "Tested" is what `tests/models` runs against transformers in
float32 on a small random model: the same logits within 1e-4 and the same greedy tokens for a whole prompt, in chunks,
token by token, together with others, and paused and resumed (`test_family_parity.py`, which also holds bfloat16 and
float16 close to it); a random mix of requests that are chunked, paused, cancelled and share their beginnings, with the
cache's books checked after each step (`test_family_mix.py`); and random shapes (`test_family_shapes.py`).

| architecture | family | lines | tested |
|---|---|---|---|
"""
FALLBACK = """
## Everything else: transformers' own modules

Any other causal language model that transformers runs is run with its own modules on our scheduler and paged cache, if
its layers attend through transformers' attention interface. `model_backend` chooses: `auto` (native where there is a
family), `native`, or `transformers`. At load a short text is computed both ways and compared; a model that cannot be
run so is refused with the reason. Tested so, with the same parity as above:
"""
REFUSED = """
Refused at load, each with its reason (tested):

| kind | example | reason |
|---|---|---|
"""


def native_rows() -> list[str]:
    """One line for each registered architecture."""
    lines = []
    for architecture in ARCHITECTURES.names():
        name = ARCHITECTURES.module_of(architecture)
        assert name is not None, f"{architecture} of this package is registered by name"
        module = importlib.import_module(name)
        path = Path(inspect.getfile(module))
        summary = " ".join((module.__doc__ or "").split("\n\n")[0].split()).rstrip(".")
        tested = "; ".join(row.about for row in TINY_MODELS.values() if row.architecture == architecture)
        link = f"[{path.stem}](../{path.relative_to(ROOT)})"
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        lines.append(f"| `{architecture}` | {link}: {summary} | {num_lines} | {tested} |")
    return lines


def document() -> str:
    """The whole page."""
    fallback = ", ".join(f"`{architecture}`" for architecture in sorted(FALLBACK_MODELS, key=str.lower))
    refused = [
        f"| {kind} | `{architecture}` | {reason.replace('.*', '...')} |"
        for kind, (architecture, _, reason) in REFUSED_MODELS.items()
    ]
    return "".join([HEAD, "\n".join(native_rows()), "\n", FALLBACK, fallback, ".\n", REFUSED, "\n".join(refused), "\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    args = parser.parse_args()
    text = document()
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    if args.check:
        print(f"{TARGET.relative_to(ROOT)} is out of date; run scripts/write_models.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
