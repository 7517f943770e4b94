"""What preprocessing does: texts and chats of a request -> the tensors that the engine model takes.

``PromptBuilder`` is used by the preprocessing adapter, once a request, which may hold several rows. Refusals name
the fields as the clients of the text models know them, and the row where there are several. Knows nothing of Triton
Server.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.chat_prompt import ChatEncoder, ChatPrompts
from backend_engine.triton_io.parameters import PreprocessingParameters
from backend_engine.triton_io.request_view import Array, scalar
from backend_engine.triton_io.tensor_rows import PREPROCESSING
from backend_engine.triton_io.tensor_table import PREPROCESSING_FROM_TEXT
from backend_engine.triton_io.unbuilt import refuse_features
from backend_engine.triton_io.word_lists import decode_text, read_elements, read_words, to_word_ids

_TEXT_NAMES = {name: text_name for text_name, name in PREPROCESSING_FROM_TEXT.items()}


class TextEncoder(Protocol):
    """What is needed of ``backend_engine.text.tokenizer.Tokenizer``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def token_variants(self, word: str) -> Sequence[Sequence[int]]: ...


class ModelFacts(NamedTuple):
    """``end_ids``: every id that ends a text, the first one first. ``pad_id``: as stated or the first end id."""

    vocab_size: int
    end_ids: tuple[int, ...]
    pad_id: int

    @classmethod
    def of(cls, tokenizer: TextEncoder, hf_config: Mapping[str, Any], end_ids: Sequence[int]) -> "ModelFacts":
        """From config.json (empty = there is none) and the stated end ids; the tokenizer says what they do not."""
        text_config = hf_config.get("text_config")  # of a model that also sees or hears
        stated = hf_config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
        ends = tuple(end_ids)
        if not ends and tokenizer.eos_token_id is not None:
            ends = (tokenizer.eos_token_id,)
        pad_id = tokenizer.pad_token_id
        if pad_id is None:
            pad_id = ends[0] if ends else 0
        return cls(stated if isinstance(stated, int) else tokenizer.vocab_size, ends, pad_id)


class PromptBuilder:
    """Turns the inputs of one request into the outputs of preprocessing. Safe for calls from several threads."""

    NEVER_ENDS = -1

    def __init__(
        self, tokenizer: TextEncoder, chat: ChatEncoder, facts: ModelFacts, parameters: PreprocessingParameters
    ) -> None:
        self._tokenizer = tokenizer
        self._chats = ChatPrompts(chat, parameters.max_text_bytes, parameters.max_messages)
        self._facts = facts
        self._parameters = parameters

    def build(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Output tensors by name, each with the request's batch size. ``InvalidRequestError`` names the culprit."""
        refuse_features(PREPROCESSING, inputs, _TEXT_NAMES)
        num_rows = self._num_rows(inputs)
        prompts = [self._prompt(inputs, index, num_rows) for index in range(num_rows)]
        end_ids = self._ids(inputs, "END_ID", num_rows, "end_id")
        pad_ids = self._ids(inputs, "PAD_ID", num_rows, "pad_id")
        self._ids(inputs, "REQUEST_OUTPUT_LEN", num_rows, "max_tokens")
        default_end = self._facts.end_ids[0] if self._facts.end_ids else self.NEVER_ENDS
        outputs: dict[str, Array] = {
            "INPUT_ID": _padded(prompts, _column(pad_ids, self._facts.pad_id, num_rows)),
            "REQUEST_INPUT_LEN": np.array([[len(ids)] for ids in prompts], np.int32),
            "DECODER_INPUT_ID": _column(pad_ids, self._facts.pad_id, num_rows),
            "REQUEST_DECODER_INPUT_LEN": np.ones((num_rows, 1), np.int32),
            "BAD_WORDS_IDS": self._word_ids(inputs, "BAD_WORDS_DICT", "bad_words", num_rows),
            "STOP_WORDS_IDS": self._word_ids(inputs, "STOP_WORDS_DICT", "stop_words", num_rows),
            "EMBEDDING_BIAS": self._embedding_bias(inputs, num_rows),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"].reshape(num_rows, 1),
            "OUT_END_ID": _column(end_ids, default_end, num_rows),
            "OUT_PAD_ID": _column(pad_ids, self._facts.pad_id, num_rows),
            "OUT_PROMPT_TABLE_EXTRA_IDS": np.zeros((num_rows, 0), np.uint64),
            "DETOKENIZE": np.ones((num_rows, 1), np.bool_),
            "ERRORS_IN_BAND": np.ones((num_rows, 1), np.bool_),
        }
        if any(any(row.reshape(-1)) for row in _rows(inputs.get("STOP_WORDS_DICT"))):  # all read and bounded above
            outputs["STOP_WORDS_TEXT"] = inputs["STOP_WORDS_DICT"].astype(np.object_)
        if end_ids is None and self._facts.end_ids:
            outputs["STOP_TOKEN_IDS"] = np.tile(np.array(self._facts.end_ids, np.int32), (num_rows, 1))
        return outputs

    def _num_rows(self, inputs: Mapping[str, Array]) -> int:
        """How many rows all inputs have."""
        for name in ("QUERY", "REQUEST_OUTPUT_LEN"):
            if name not in inputs:
                raise InvalidRequestError(f"{_TEXT_NAMES[name]} is required")
        num_rows = len(inputs["QUERY"])
        if not 1 <= num_rows <= self._parameters.max_sequences:
            raise InvalidRequestError(
                f"text_input has {num_rows} rows; 1 to {self._parameters.max_sequences} are allowed"
            )
        for name, values in inputs.items():
            if len(values) != num_rows and name != "RETURN_ERRORS_IN_BAND":
                raise InvalidRequestError(
                    f"{_TEXT_NAMES.get(name, name)} has {len(values)} rows and text_input {num_rows}; "
                    "they must be as many"
                )
        return num_rows

    def _prompt(self, inputs: Mapping[str, Array], index: int, num_rows: int) -> list[int]:
        """Token ids of a row's prompt: of its text, or of its chat where it has messages."""
        text_name, chat_name = (_in_row(name, index, num_rows) for name in ("text_input", "messages"))
        text = decode_text(scalar(inputs["QUERY"][index], text_name), text_name, self._parameters.max_text_bytes)
        chat = scalar(inputs["MESSAGES"][index], chat_name) if "MESSAGES" in inputs else ""
        if not chat:
            ids = list(self._tokenizer.encode(text, self._parameters.add_special_tokens))
        elif text:
            raise InvalidRequestError(
                f"{chat_name} and {text_name} are both given; text_input must be empty where messages are sent"
            )
        else:
            ids = self._chats.encode(chat, chat_name)
        if not ids:
            name = chat_name if chat else text_name
            raise InvalidRequestError(f"the prompt is empty: {name} must give at least one token")
        if max(ids) >= self._facts.vocab_size:
            name = chat_name if chat else text_name
            raise InvalidRequestError(
                f"{name} spells token {max(ids)}, which the model has no embedding for; its vocabulary has "
                f"{self._facts.vocab_size}"
            )
        return ids

    def _ids(self, inputs: Mapping[str, Array], name: str, num_rows: int, shown: str) -> Array | None:
        values = inputs.get(name)
        if values is None:
            return None
        if values.size != num_rows:
            each = "a single value" if num_rows == 1 else f"one value a row for {num_rows} rows"
            raise InvalidRequestError(f"{shown} must be {each}, got {values.size} values")
        return values.reshape(-1)

    def _word_ids(self, inputs: Mapping[str, Array], name: str, field: str, num_rows: int) -> Array:
        if name not in inputs:
            return to_word_ids(None, num_rows)
        rows: list[list[list[int]]] = []
        for index, row in enumerate(_rows(inputs[name])):
            words = read_words(row, _in_row(field, index, num_rows), self._parameters.word_limits)
            rows.append([ids for word in words for ids in self._spellings(word, field)])
        return to_word_ids(rows, num_rows)

    def _spellings(self, word: str, field: str) -> list[list[int]]:
        """A bad word is blocked in each of its spellings; a stop word is matched as it is."""
        if field == "bad_words":
            return [list(ids) for ids in self._tokenizer.token_variants(word)]
        ids = list(self._tokenizer.encode(word, False))
        return [ids] if ids else []

    def _embedding_bias(self, inputs: Mapping[str, Array], num_rows: int) -> Array:
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        limits = self._parameters.word_limits
        rows = [
            read_elements(row, _in_row("embedding_bias_words", index, num_rows), limits)
            for index, row in enumerate(_rows(words))
        ] or [[]] * num_rows
        weight_rows = [row.reshape(-1) for row in _rows(weights)] or [np.zeros(0, np.float32)] * num_rows
        if not any(any(row) for row in rows) and not any(len(row) for row in weight_rows):
            return np.zeros((num_rows, 0), np.float32)
        bias = np.zeros((num_rows, self._facts.vocab_size), np.float32)
        for index, (row, values) in enumerate(zip(rows, weight_rows, strict=True)):
            names = tuple(_in_row(f"embedding_bias_{part}", index, num_rows) for part in ("words", "weights"))
            self._add_bias(bias[index], row, values, names)
        return bias

    def _add_bias(self, bias: Array, words: Sequence[str], weights: Array, names: tuple[str, ...]) -> None:
        words_name, weights_name = names
        if len(words) != len(weights):
            raise InvalidRequestError(
                f"{words_name} has {len(words)} words and {weights_name} {len(weights)} weights; they must be as many"
            )
        if not np.isfinite(weights).all():
            raise InvalidRequestError(f"{weights_name} must be finite numbers")
        for word, weight in zip(words, weights, strict=True):
            for token_id in self._tokenizer.encode(word, False) if word else ():
                if token_id < len(bias):
                    bias[token_id] += weight


def _rows(values: Array | None) -> list[Array]:
    return [] if values is None else list(values)


def _in_row(field: str, index: int, num_rows: int) -> str:
    """How to call ``field`` in a refusal."""
    return field if num_rows == 1 else f"{field} of row {index}"


def _padded(rows: Sequence[Sequence[int]], pad_ids: Array) -> Array:
    """``[B, longest]``, each row padded on the right with its own id of ``pad_ids`` ``[B, 1]``."""
    result = np.repeat(pad_ids, max(len(ids) for ids in rows), axis=1)
    for index, ids in enumerate(rows):
        result[index, : len(ids)] = ids
    return result


def _column(values: Array | None, default: int, num_rows: int) -> Array:
    """``[B, 1]`` of what was sent, else of ``default``."""
    if values is None:
        return np.full((num_rows, 1), default, np.int32)
    return values.astype(np.int32).reshape(num_rows, 1)
