"""vLLM's engine for CPUs, in this process, stepped by us; a budget of tokens a step goes with eager mode."""

import os
import sys
from typing import Any

from bench_common import Job

from peers.timeline import Recorder, Timeline
from peers.workloads import LATE_AFTER, Phase


class VllmEngine:
    """``LLMEngine`` without its own process."""

    def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
        """See ``Engine``."""
        assert precision == "float32", precision
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": os.path.join(sys.prefix, "cache"),
        }  # fmt: skip
        import torch
        import vllm

        torch.set_num_threads(threads)
        extra = {} if max_num_tokens is None else {"max_num_batched_tokens": max_num_tokens, "enforce_eager": True}
        args: Any = vllm.EngineArgs(
            model=model, dtype="float32", max_num_seqs=16, max_model_len=4096, skip_tokenizer_init=True, **extra
        )
        self._engine: Any = vllm.LLMEngine.from_engine_args(args)
        self._vllm: Any = vllm
        self._next_id = 0
        return f"{vllm.__version__}, torch {torch.__version__}{', eager' if extra else ''}"

    def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
        """See ``Engine``."""
        by_id: dict[str, Timeline] = {}
        for job in phase.jobs:
            self._send(job, recorder, by_id)
        late = phase.late
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                by_id[output.request_id].add(list(output.outputs[0].token_ids), recorder.now())
            if late is not None and recorder.have(LATE_AFTER):
                self._send(late, recorder, by_id)
                late = None
        return recorder.timelines

    def _send(self, job: Job, recorder: Recorder, by_id: dict[str, Timeline]) -> None:
        self._next_id += 1
        by_id[str(self._next_id)] = recorder.sent()
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=job.num_output_tokens, ignore_eos=True, detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )  # fmt: skip
        self._engine.add_request(str(self._next_id), {"prompt_token_ids": job.prompt_token_ids}, params)

    def close(self) -> None:
        """See ``Engine``."""
        del self._engine


def create() -> VllmEngine:
    return VllmEngine()
