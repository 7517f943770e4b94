#!/usr/bin/env python3
"""Downloads a model of the Hugging Face hub and prints its folder, the last line on standard output.

``serve.py`` runs it for ``--model OWNER/NAME``. Progress goes to standard error; failures are one line there.
"""

import sys

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def main(argv: list[str]) -> int:
    """Download ``argv[0]``; returns the exit code."""
    if len(argv) != 1:
        print("usage: download_model.py OWNER/NAME", file=sys.stderr)
        return 2
    try:
        print(snapshot_download(argv[0], allow_patterns=_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:  # no network comes as LocalEntryNotFoundError, an OSError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(
            f"error: cannot download {argv[0]} from the Hugging Face hub: {reason}; "
            "check the name and the network, or give a folder",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
