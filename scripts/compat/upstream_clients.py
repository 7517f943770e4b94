#!/usr/bin/env python3
"""The clients of the tensorrtllm_backend repository (tag v0.19.0) against a running server.

Takes the path of a checkout of that repository (or of its ``triton_backend`` successor) and runs the scripts in it as
they are, with the flags that its documentation and tests use. A decoupled deployment is needed for all but the last.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.client_check import (
    CheckError,
    Outcome,
    Target,
    build_parser,
    guarded,
    need,
    reference_text,
    report,
    run_client,
    target_from,
)  # fmt: skip
from compat.client_env import ClientUnavailableError, client_env

END_TO_END = "inflight_batcher_llm/client/end_to_end_grpc_client.py"
IN_FLIGHT = "inflight_batcher_llm/client/inflight_batcher_llm_client.py"
REQUIREMENTS = ("numpy", "tritonclient[grpc]==2.73.0", "transformers")
PERF_TENSORS = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "first_token_time_ns", "acceptance_rate")
ERROR = "Received an error from server:"


@dataclass(frozen=True)
class Scenario:
    """One call of a client: its flags, and what its output must show (a function that raises ``CheckError``)."""

    name: str
    script: str
    flags: tuple[str, ...]
    check: Callable[[str], None]


def shows(*parts: str) -> Callable[[str], None]:
    """A check: the output has each of ``parts``."""

    def check(output: str) -> None:
        for part in parts:
            need(part in output, f"the output has no {part!r}: {_tail(output)!r}")

    return check


def lacks(part: str) -> Callable[[str], None]:
    """A check: the output does not have ``part``."""

    def check(output: str) -> None:
        need(part not in output, f"the output has {part!r}: {_tail(output)!r}")

    return check


def _tail(output: str) -> str:
    return output.strip()[-300:]


def end_to_end_scenarios(target: Target, model: str) -> list[Scenario]:
    """Calls of the text client to ``model``. Texts are compared by the client itself (``--check-outputs``)."""
    text = reference_text(target)
    words = text.split()
    need(len(words) > 1, f"the model answers {target.prompt!r} with {text!r}; two words are needed, use --prompt")
    stop = words[1]
    stopped = text[: text.index(stop, len(words[0])) + len(stop)]
    first = text[: text.index(words[0]) + len(words[0])]
    twice = target.prompt + target.prompt
    second = reference_text(target, prompt=twice)
    # The client's default temperature of 1 would sample here, so its own comparison needs 0.
    base = ("--model-name", model, "-o", str(target.max_tokens), "--temperature", "0")
    one = (*base, "-p", json.dumps([target.prompt]))
    both = (*base, "-p", json.dumps([target.prompt, twice]), "--batch-inputs")

    def expect(*texts: str) -> tuple[str, ...]:
        return ("--check-outputs", "--expected-outputs", json.dumps(texts))

    add = partial(Scenario, script=END_TO_END)
    fine = lacks(ERROR)
    return [
        add("whole", flags=(*one, *expect(text)), check=fine),
        add("streaming", flags=(*one, "-S", *expect(text)), check=fine),
        add("excluded input", flags=(*one, "--exclude-input-in-output", *expect(text)), check=fine),
        add("default temperature", flags=(*one[:4], "-p", target.prompt), check=shows("0: ")),
        add("request id", flags=(*one, "--request-id", "my_request", *expect(text)), check=fine),
        add("stop words", flags=(*one, "-S", "--stop-words", stop, *expect(stopped)), check=fine),
        add("bad words", flags=(*one, "-S", "--bad-words", first), check=lacks(f"0 [b'{first}']")),
        add("embedding bias", flags=(*one, "-S", "--embedding-bias-words", first, "--embedding-bias-weights=-100"),
            check=lacks(f"0 [b'{first}']")),
        add("log probs", flags=(*one, "--return-log-probs"), check=shows("output_log_probs.shape: (1, 1, ")),
        add("batch", flags=(*both, *expect(text, second)), check=fine),
        add("batch, streaming", flags=(*both, "-S", *expect(text, second)), check=fine),
        add("two sequences", flags=(*one, "-n", "2", *expect(text)), check=fine),
        add("perf metrics", flags=(*one, "--return-perf-metrics"), check=shows(*PERF_TENSORS)),
        add("context logits", flags=(*one, "--return-context-logits"), check=shows("context_logits.shape: (1, ")),
        add("generation logits", flags=(*one, "--return-generation-logits"),
            check=shows("generation_logits.shape: (1, 1, ")),
    ]  # fmt: skip


def in_flight_scenarios(target: Target) -> list[Scenario]:
    """Calls of the token client to ``tensorrt_llm``; it samples with top_k 1, so its text is the greedy one."""
    tokens = 4
    text = reference_text(target, max_tokens=tokens)
    base = ("--tokenizer-dir", str(target.tokenizer), "--text", target.prompt, "--request-output-len")
    short, long = (*base, str(tokens)), (*base, "400")
    output = f"Output beam 0: {text}"
    stop = (*long, "--request-id", "stop_me", "--stop-after-ms", "300")
    add = partial(Scenario, script=IN_FLIGHT)
    if not target.decoupled:
        return [
            add("whole", flags=short, check=shows(output)),
            add("log probs", flags=(*short, "--return-log-probs"), check=shows(output, "[[[")),
            add("stop request", flags=stop, check=shows("Got cancellation response")),
        ]
    named = ("--requested-outputs", "output_ids", "sequence_length")
    return [
        add("streaming", flags=(*short, "-S"), check=shows(output)),
        add("named outputs", flags=(*short, "-S", *named), check=shows(output)),
        add("log probs", flags=(*short, "-S", "--return-log-probs"), check=shows(output)),
        add("stop request", flags=(*stop, "-S"), check=shows("Got cancellation response")),
        add("cancelled", flags=(*stop, "-S", "--stop-via-request-cancel"), check=shows("Request is cancelled")),
    ]


def run_scenarios(target: Target, checkout: Path, scenarios: list[Scenario]) -> str:
    """Run each; returns their names. Raises ``CheckError`` naming every one that failed and why."""
    env = client_env("upstream-clients", REQUIREMENTS)
    problems = []
    for scenario in scenarios:
        script = checkout / scenario.script
        try:
            scenario.check(run_client([env.python, script, "-u", target.grpc, *scenario.flags]))
        except CheckError as error:
            problems.append(f"{scenario.name}: {error}")
    if problems:
        passed = len(scenarios) - len(problems)
        raise CheckError(f"{passed} of {len(scenarios)} passed; " + "; ".join(problems))
    return ", ".join(scenario.name for scenario in scenarios)


def checkout_version(checkout: Path) -> str:
    """Tag or commit of the checkout, as git tells it; "copy" for files that are no git checkout of their own."""
    command = ["git", "-C", str(checkout), "describe", "--tags", "--always"]
    if not (checkout / ".git").exists():
        return "copy"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "copy"


def check(target: Target, checkout: Path) -> list[Outcome]:
    """One outcome for each client and model."""
    outcomes: list[Outcome] = []
    version = checkout_version(checkout)

    def judge(script: str, model: str, scenarios: Callable[[], list[Scenario]]) -> None:
        def run() -> str:
            if not (checkout / script).is_file():
                raise ClientUnavailableError(f"{checkout} has no {script}; give a checkout of tag v0.19.0")
            return run_scenarios(target, checkout, scenarios())

        how = "decoupled" if target.decoupled else "not decoupled"
        outcomes.append(guarded(Path(script).name, version, f"to `{model}`, {how}", run))

    if target.decoupled:
        for model in ("ensemble", "tensorrt_llm_bls"):
            judge(END_TO_END, model, partial(end_to_end_scenarios, target, model))
    judge(IN_FLIGHT, "tensorrt_llm", partial(in_flight_scenarios, target))
    return outcomes


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = build_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path, help="checkout of the upstream repository")
    parser.add_argument("--max-tokens", type=int, default=Target.max_tokens, help="(default %(default)s)")
    arguments = parser.parse_args(argv)
    target = replace(target_from(arguments), max_tokens=arguments.max_tokens)
    return report(check(target, arguments.checkout.absolute()))


if __name__ == "__main__":
    sys.exit(main())
