"""``ModelInputs``: one step as a model takes it. Made by ``ModelInputsBuilder``; data only."""

from dataclasses import dataclass

from torch import Tensor

from backend_engine.attention.interface import AttentionMetadata


@dataclass(frozen=True)
class ModelInputs:
    """int32 tensors: ``input_ids, position_ids, text_lens [num_tokens]``, ``logits_indices [num_logits]`` (tokens whose
    logits are wanted), and what attention needs.

    ``text_lens``: length of the text with which a token is first computed, that is its request's prompt, or for a
    generated token the text up to it; position schemes that depend on the length read it.

    The first logits are those of ``SchedulerOutput.logits_rows``; then, for each of ``context_logits``, a request id
    and a number of tokens, come those of that many prompt tokens of this request.
    """

    input_ids: Tensor
    position_ids: Tensor
    text_lens: Tensor
    logits_indices: Tensor
    attention: AttentionMetadata
    context_logits: tuple[tuple[int, int], ...] = ()
