"""``transformers`` ``generate``: one padded batch, eager, greedy; the reference of the greedy tokens."""

from typing import Any

from bench_common import Job

from peers.timeline import Recorder, Timeline
from peers.workloads import Phase


class TransformersGenerate:
    """One model, float32."""

    def load(self, model: str, precision: str, threads: int, max_num_tokens: int | None) -> str:
        """See ``Engine``; the number of tokens a step is what it is."""
        import torch
        import transformers

        assert precision == "float32" and max_num_tokens is None, (precision, max_num_tokens)
        torch.set_num_threads(threads)
        self._torch = torch
        auto: Any = transformers.AutoModelForCausalLM
        self._model = auto.from_pretrained(model, dtype=torch.float32).eval()
        return f"{transformers.__version__}, torch {torch.__version__}"

    def run(self, phase: Phase, recorder: Recorder) -> list[Timeline]:
        """See ``Engine``. Rows that need fewer tokens than the longest one stay in the batch to its end."""
        assert phase.late is None, "generate takes no further requests"
        timelines = [recorder.sent() for _ in phase.jobs]
        ids, mask = self._padded(phase.jobs)
        criteria = self._criteria(phase.jobs, timelines, recorder)
        self._model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=None, stopping_criteria=[criteria],
            max_new_tokens=max(job.num_output_tokens for job in phase.jobs),
        )  # fmt: skip
        return timelines

    def _padded(self, jobs: list[Job]) -> tuple[Any, Any]:
        """Token ids and mask ``[rows, longest prompt]``, padded on the left."""
        torch = self._torch
        longest = max(len(job.prompt_token_ids) for job in jobs)
        ids = torch.zeros(len(jobs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt_token_ids) :] = torch.tensor(job.prompt_token_ids)
            mask[row, longest - len(job.prompt_token_ids) :] = 1
        return ids, mask

    def _criteria(self, jobs: list[Job], timelines: list[Timeline], recorder: Recorder) -> Any:
        """Never stops; called after every step, it notes the new token of each row that still wants one."""
        torch = self._torch

        def note(ids: Any, scores: Any, **options: Any) -> Any:
            now = recorder.now()
            for job, timeline, token in zip(jobs, timelines, ids[:, -1].tolist(), strict=True):
                if len(timeline.token_ids) < job.num_output_tokens:
                    timeline.add([token], now)
            return torch.zeros(len(jobs), dtype=torch.bool)

        return note

    def close(self) -> None:
        """See ``Engine``."""
        del self._model


def create() -> TransformersGenerate:
    return TransformersGenerate()
