"""A logits processor: only some tokens may be chosen, as for a question with a few possible answers.

A request asks for it with ``logits_processors={"allow_ids": {"ids": [17, 42]}}``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backend_engine.decoder.custom_processors import CustomLogitsProcessor


class AllowIds(CustomLogitsProcessor):
    """``ids``: the tokens that may be chosen."""

    def __init__(self, arguments: Mapping[str, Any], vocab_size: int) -> None:
        # The arguments come from a client: check them. What is raised here refuses the request, not the engine.
        ids, *others = arguments.get("ids"), *(key for key in arguments if key != "ids")
        if others:
            raise ValueError(f"unknown argument {others[0]!r}; there is ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise ValueError(f"ids {ids!r} must be a list of token ids from 0 to {vocab_size - 1}")
        self._is_forbidden = torch.ones(vocab_size, dtype=torch.bool)
        self._is_forbidden[ids] = False

    def apply(self, logits: Tensor, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        self._is_forbidden = self._is_forbidden.to(logits.device)
        logits.masked_fill_(self._is_forbidden, -torch.inf)
