"""Chats in a request: the JSON text of ``messages`` -> the prompt's token ids, by the model's chat template.

``PromptBuilder`` calls ``ChatPrompts`` for each row that has messages. Reads and bounds the JSON; what a message may
hold is the template's affair. Knows nothing of Triton Server.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.word_lists import decode_text

_KEYS = ("messages", "tools", "chat_template_kwargs")
_FORM = (
    'it must be a JSON list such as [{"role": "user", "content": "..."}], '
    'or an object {"messages": [...], "tools": [...], "chat_template_kwargs": {...}}'
)


class ChatEncoder(Protocol):
    """What is needed of ``backend_engine.text.chat_template.ChatTemplate``."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> list[int]: ...


class ChatPrompts:
    """Encodes chats of at most ``max_bytes`` bytes and ``max_messages`` messages. Safe for calls from several threads.

    The prompt ends where the assistant's answer begins. Control tokens spelled in a message are text, and nothing is
    added around what the template writes, so that a begin token stands there once at most.
    """

    def __init__(self, template: ChatEncoder, max_bytes: int, max_messages: int) -> None:
        self._template = template
        self._max_bytes = max_bytes
        self._max_messages = max_messages

    def encode(self, data: Any, name: str) -> list[int]:
        """Token ids of the chat in ``data``, an element of a STRING tensor.

        ``data``: a JSON list of messages, or a JSON object with ``messages`` and optional ``tools`` and
        ``chat_template_kwargs``. ``InvalidRequestError`` names ``name``, and the place where something is wrong.
        """
        chat = _parse(decode_text(data, name, self._max_bytes), name)
        messages = chat["messages"]
        if len(messages) > self._max_messages:
            raise InvalidRequestError(f"{name} has {len(messages)} messages; at most {self._max_messages} are allowed")
        try:
            return self._template.encode(messages, chat.get("tools"), True, chat.get("chat_template_kwargs"))
        except InvalidRequestError as error:
            reason = str(error)
            raise InvalidRequestError(reason if reason.startswith(name) else f"{name}: {reason}") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    """The object form of ``text``; a list stands for an object with messages alone."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{name} is not JSON ({error.msg} at character {error.pos}); {_FORM}") from None
    except RecursionError:
        raise InvalidRequestError(f"{name} is nested too deep; {_FORM}") from None
    except ValueError:
        raise InvalidRequestError(f"{name} holds a number that is no JSON number or has too many digits") from None
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is a JSON {_kind(value)}; {_FORM}")
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise InvalidRequestError(f"{name} has the key {unknown[0][:64]!r}; {_FORM}")
    if not isinstance(value.get("messages"), list):
        raise InvalidRequestError(f"{name}: its key messages must be a list of messages; {_FORM}")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "number"
