"""What a tokenizer of the ``tokenizers`` library puts around a text, read from its post-processor's settings.

Called once a tokenizer by ``Tokenizer``. Encodes nothing, since a vocabulary need not hold any given text.
"""

import json
from collections.abc import Mapping
from typing import Any


def ids_around_texts(post_processor: Any) -> tuple[list[int], list[int]]:
    """Ids in front of a single text, and ids behind it; none for ``None`` and for kinds that add nothing."""
    return ([], []) if post_processor is None else _around(json.loads(post_processor.__getstate__()))


def _around(state: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    match state:
        case {"type": "Sequence", "processors": list(processors)}:
            # After the first that adds something the library takes the parts for several texts, and adds no more.
            return next((around for processor in processors if any(around := _around(processor))), ([], []))
        case {"type": "TemplateProcessing", "single": list(parts), "special_tokens": dict(tokens)}:
            at = next((i for i, part in enumerate(parts) if "Sequence" in part), len(parts))
            sides = (parts[:at], parts[at + 1 :])
            ids = [
                [i for part in side if "SpecialToken" in part for i in tokens[part["SpecialToken"]["id"]]["ids"]]
                for side in sides
            ]
            return ids[0], ids[1]
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(first)], "sep": [_, int(last)]}:
            return [first], [last]
        case _:
            return [], []
