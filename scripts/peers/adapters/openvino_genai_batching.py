"""openvino-genai's continuous batching pipeline, stepped by us; prefix caching on."""

from typing import Any

from bench_common import Job

from peers.timeline import Recorder, Timeline
from peers.workloads import LATE_AFTER, Phase


class OpenvinoGenai:
    """``ContinuousBatchingPipeline`` on the CPU; the model folder says the weights' precision."""

    def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
        """See ``Engine``. float32: everything in float32; int8: int8 weights, and the plug-in's own u8 KV cache."""
        import numpy as np
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = 16
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        if max_num_tokens is not None:
            scheduler.max_num_batched_tokens = max_num_tokens
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        if precision == "float32":
            options["KV_CACHE_PRECISION"] = "f32"
        self._np, self._openvino, self._genai = np, openvino, openvino_genai
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler_config=scheduler, device="CPU", properties=options
        )
        self._next_id = 0
        return str(openvino_genai.__version__)

    def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
        """See ``Engine``."""
        handles = [self._send(job, recorder) for job in phase.jobs]
        late = phase.late
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, timeline in zip(handles, recorder.timelines, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        timeline.add(list(output.generated_ids), recorder.now())
            if late is not None and recorder.have(LATE_AFTER):
                handles.append(self._send(late, recorder))
                late = None
        return recorder.timelines

    def _send(self, job: Job, recorder: Recorder) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = self._openvino.Tensor(self._np.array([job.prompt_token_ids], dtype=self._np.int64))
        self._next_id += 1
        recorder.sent()
        return self._pipeline.add_request(self._next_id, ids, config)

    def close(self) -> None:
        """See ``Engine``."""
        del self._pipeline


def create() -> OpenvinoGenai:
    return OpenvinoGenai()
