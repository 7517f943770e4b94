#!/usr/bin/env python3
"""Downloads a model of the Hugging Face hub and prints its folder or file, the last line on standard output.

``serve.py`` runs it for ``--model OWNER/NAME``. Progress goes to standard error; failures are one line there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backend_engine.errors import ModelLoadError
from backend_engine.hub import local_path


def main(argv: list[str]) -> int:
    """Download ``argv[0]``; returns the exit code."""
    if len(argv) != 1:
        print("usage: download_model.py OWNER/NAME[/FILE.gguf]", file=sys.stderr)
        return 2
    try:
        print(local_path(argv[0]))
    except ModelLoadError as error:
        print(f"error: {error}; check the name and the network, or give a folder", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
