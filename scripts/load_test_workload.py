"""The requests of a load test: prompts of a given length, output length, whole or streamed.

Both load generators of ``load_test.py`` send exactly these. Prompts differ, so that nothing is answered out of the
cache of another request, and are the same in every run.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
NEVER_ENDS = 1_048_576  # an end id outside every vocabulary: answers have the length asked for
NUM_PROMPTS = 64
_WORDS = "the quick brown fox jumps over a lazy dog and then it runs through quiet green fields to find its way home"

Value = str | int | bool


@dataclass(frozen=True)
class Workload:
    """What is sent to ``model``: about ``input_len`` tokens in (exact for tensorrt_llm), ``output_len`` tokens out."""

    model: str
    input_len: int
    output_len: int
    streaming: bool

    def requests(self, salt: int = 0) -> list[Mapping[str, Sequence[Value]]]:
        """``NUM_PROMPTS`` requests, each a flat list of values by input name. Another ``salt`` gives other prompts."""
        rng = random.Random(f"{salt}/{self.input_len}")
        return [self._request(rng) for _ in range(NUM_PROMPTS)]

    def _request(self, rng: random.Random) -> Mapping[str, Sequence[Value]]:
        common: dict[str, Sequence[Value]] = {"end_id": [NEVER_ENDS], "return_num_output_tokens": [True]}
        if self.model == "tensorrt_llm":
            # Ids below 256 are in every vocabulary in use.
            ids = [rng.randrange(10, 256) for _ in range(self.input_len)]
            own: dict[str, Sequence[Value]] = {
                "input_ids": ids, "input_lengths": [self.input_len], "request_output_len": [self.output_len],
                "streaming": [self.streaming],
            }  # fmt: skip
        else:
            text = " ".join(rng.choice(_WORDS.split()) for _ in range(self.input_len))
            own = {"text_input": [text], "max_tokens": [self.output_len], "stream": [self.streaming]}
        return {**own, **common, "exclude_input_in_output": [True]}
