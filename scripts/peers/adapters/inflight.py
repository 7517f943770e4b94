"""Our engine, through ``LLM``: token times are those at which the executor hands the tokens out."""

import dataclasses
import queue
from typing import Any

from bench_common import ROOT, Job, commit  # also lets ``backend_engine`` be found

from peers.timeline import Recorder, Timeline
from peers.workloads import LATE_AFTER, Phase

KV_TOKENS = 24_576  # 1.1 GB in float32, about what the peers get
LLM_ARGUMENTS: dict[str, dict[str, Any]] = {
    "float": {"weight_only_precision": "float16", "kv_cache_dtype": "float16"},
    "float32": {},
    "int16": {"weight_only_precision": "int16", "kv_cache_dtype": "float16"},
    "int8": {"weight_only_precision": "int8", "kv_cache_dtype": "int8"},
    "w8a8": {"weight_only_precision": "w8a8", "kv_cache_dtype": "int8"},
    "int4": {},  # the model is a Q4_1 file, whose weights stay packed
}
"""What ``LLM`` is told for each precision, besides the dtype that it computes in (float32). The KV cache is
float16 beside weights of float16 and int16 (which costs less than 0.01 % of perplexity), and int8 beside those of int8,
as openvino-genai's is then."""


class Inflight:
    """``LLM`` in this process."""

    def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
        """See ``Engine``."""
        from backend_engine import LLM, SamplingParams
        from backend_engine.admission import Submission
        from backend_engine.config.engine_args import EngineArgs
        from backend_engine.config.engine_config import KvCacheConfig

        kv_dtype = LLM_ARGUMENTS[precision].get("kv_cache_dtype", "auto")
        known = {f.name for f in dataclasses.fields(EngineArgs)}
        extra = {name: value for name, value in LLM_ARGUMENTS[precision].items() if name in known}
        missing = sorted(set(LLM_ARGUMENTS[precision]) - set(extra) - {"kv_cache_dtype"})
        if max_num_tokens is not None:
            extra["max_num_tokens"] = max_num_tokens
        self._params, self._submission = SamplingParams, Submission
        self._llm = LLM(
            model, dtype="float32", num_threads=threads, skip_tokenizer_init=True, max_batch_size=16,
            kv_cache_config=KvCacheConfig(max_tokens=KV_TOKENS, dtype=kv_dtype), **extra,
        )  # fmt: skip
        without = f", without {', '.join(missing)}" if missing else ""
        return f"{commit() or ROOT.name}{without}"

    def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
        """See ``Engine``."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for job in phase.jobs:
            self._send(job, recorder, arrived)
        late, unfinished = phase.late, len(phase.all_jobs)
        while unfinished:
            output = arrived.get()
            if output.error is not None:
                raise output.error
            unfinished -= output.finished
            if late is not None and recorder.have(LATE_AFTER):
                self._send(late, recorder, arrived)
                late = None
        return recorder.timelines

    def _send(self, job: Job, recorder: Recorder, arrived: "queue.SimpleQueue[Any]") -> None:
        timeline = recorder.sent()

        def sink(output: Any) -> None:
            timeline.add(list(output.token_ids), recorder.now())
            arrived.put(output)

        params = self._params(max_tokens=job.num_output_tokens, ignore_eos=True, detokenize=False)
        self._llm.submit(self._submission(job.prompt_token_ids, params, sink))

    def close(self) -> None:
        """See ``Engine``."""
        self._llm.shutdown()


def create() -> Inflight:
    return Inflight()
