#!/usr/bin/env python3
"""LiteLLM's ``triton/`` provider against a running server: ``completion``, whole and streamed, to the ensemble."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.client_check import (
    DRIVERS,
    Outcome,
    Target,
    guarded,
    last_json,
    main_guard,
    need,
    reference_text,
    run_client,
)
from compat.client_env import client_env

VERSION = "1.110.2"


def check(target: Target) -> list[Outcome]:
    """One outcome. The provider leaves the prompt in a whole answer, as the server does unless told otherwise."""

    def run() -> str:
        env = client_env("litellm", (f"litellm=={VERSION}",))
        expected = reference_text(target)
        api_base = f"http://{target.http}/v2/models/ensemble/generate"
        driver = [env.python, DRIVERS / "litellm_driver.py", api_base, target.prompt, str(target.max_tokens)]
        got = last_json(run_client([str(word) for word in driver]))
        whole, pieces = str(got["whole"]), [str(piece) for piece in list(got["pieces"])]  # type: ignore[call-overload]
        need(whole.endswith(expected), f"completion gave {whole!r}, the server {expected!r}")
        need("".join(pieces) == expected, f"streaming gave {pieces!r}, the server {expected!r}")
        return f"{len(pieces)} streamed pieces"

    return [guarded("LiteLLM", VERSION, "`completion` with model `triton/ensemble`, whole and `stream=True`", run)]


if __name__ == "__main__":
    main_guard(check, __doc__)
