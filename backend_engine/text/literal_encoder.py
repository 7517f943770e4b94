"""``LiteralEncoder``: encodes a text in which only chosen spans are control tokens, and all else is ordinary text.

``Tokenizer.encode_literal`` keeps one for chat messages, in which a client may spell control tokens. Works on a copy of
the tokenizer; never changes the one it was made of.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ANCHOR = "\n"  # what stands before the middle of a text, and merges with nothing


def encode_inside(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Ids of ``text`` in the middle of another; ``encode`` gives those of whole texts.

    In front of a text some tokenizers put a blank of their own; after a line's end none does.
    """
    anchor, anchored = encode(_ANCHOR), encode(_ANCHOR + text)
    is_apart = anchored[: len(anchor)] == anchor and len(anchored) > len(anchor)
    return anchored[len(anchor) :] if is_apart else encode(text)


class LiteralEncoder:
    """A copy of the tokenizer that knows the control tokens by secret names only.

    The spans that are to be control tokens are renamed before encoding; what is spelled elsewhere then is ordinary
    text, while everything around added tokens (stripping, prefixes) stays the Rust library's doing.
    """

    def __init__(self, rust: Any, control_tokens: Mapping[str, int]) -> None:
        nonce = secrets.token_hex(8)  # nobody can write these names into a message
        self._aliases = {text: f"\U000f0000{nonce}x{i}\U000f0001" for text, i in control_tokens.items()}
        self._copy = type(rust).from_str(_rename_added_tokens(rust.to_str(), self._aliases))
        self._copy.no_truncation()
        self._copy.no_padding()
        originals = {alias: text for text, alias in self._aliases.items()}
        self._real_ids: dict[int, int] = {}
        for copied, token in self._copy.get_added_tokens_decoder().items():
            self._real_ids[copied] = rust.token_to_id(originals.get(token.content, token.content))
        self._spellings = {i: text for text, i in control_tokens.items()}

    def encode(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        parts: list[str] = []
        end = 0
        for start, stop in control_spans:
            parts += [text[end:start], self._aliases[text[start:stop]]]
            end = stop
        ids: list[int] = []
        for i in self._ids("".join(parts) + text[end:]):
            if i in self._real_ids:
                ids.append(self._real_ids[i])
            elif i in self._spellings:  # a unigram vocabulary may hold the spelling as an ordinary piece
                ids += [piece for character in self._spellings[i] for piece in encode_inside(self._ids, character)]
            else:
                ids.append(i)
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._copy.encode(text, add_special_tokens=False).ids)


def _rename_added_tokens(tokenizer_json: str, aliases: Mapping[str, str]) -> str:
    state = json.loads(tokenizer_json)
    for token in state["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    return json.dumps(state, ensure_ascii=False)
