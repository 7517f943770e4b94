"""Turns a conversation into the prompt text that a model folder's chat template makes of it.

``serve.py`` and ``chat.py`` use it on the client's side of the wire. It never talks to a server.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from backend_engine.errors import EngineError
from backend_engine.text.chat_template import ChatTemplate
from backend_engine.text.tokenizer import load_tokenizer


class PromptError(Exception):
    """The folder has no usable tokenizer, or its template refuses the messages; the message is one line."""


class PromptRenderer:
    """Renders conversations for the model in ``folder``. Raises ``PromptError`` when it has no tokenizer."""

    def __init__(self, folder: Path) -> None:
        try:
            tokenizer = load_tokenizer(folder)
        except EngineError as error:
            raise PromptError(str(error)) from None
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template(with_tools=False) else None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt up to where the answer begins; without a template the contents, a line each."""
        if self._template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return self._template.render(messages)
        except EngineError as error:
            raise PromptError(str(error)) from None
