"""``ChatTemplate``: a conversation as the prompt that the model was trained on, by the model's own jinja2 template.

Used by ``LLM.chat`` and the frontends, from any thread. Templates run in jinja2's sandbox with bounded output. What a
client wrote never becomes a control token: see ``ChatTemplate.encode``. Never talks to the model.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from backend_engine.errors import InvalidRequestError
from backend_engine.text.template_environment import BudgetError, TemplateEnvironment
from backend_engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_RENDERED_CHARS = 4_000_000
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # a role may stand inside a control token, as in <|user|>
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MAX_DEPTH = 32
_PRIVATE_USE = range(0x100000, 0x10FFFE)
_MAX_REASON_CHARS = 300
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """Renders and encodes conversations.

    ``template`` is jinja2 source, by default the tokenizer's own. Messages are
    ``{"role": str, "content": str | list of {"type": "text", "text": str} | None, ...}``; text parts are joined by
    newlines, and content may be missing beside ``tool_calls``, whose arguments may be an object or its JSON text; the
    template gets an object. ``template_kwargs`` are further variables of the template (``enable_thinking``).
    Whatever is wrong with messages or template is an ``InvalidRequestError`` of one line, raised by ``render`` and
    ``encode``.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, max_rendered_chars: int = MAX_RENDERED_CHARS
    ) -> None:
        self._tokenizer = tokenizer
        self._max_rendered_chars = max_rendered_chars
        self._environment = TemplateEnvironment()
        sources = [template or tokenizer.chat_template(with_tools=tools) for tools in (False, True)]
        compiled = {source: self._compile(source) for source in sources}
        self._compiled = [compiled[source] for source in sources]
        # Longest first: where two control tokens begin at the same place the longer one is meant.
        controls = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, controls)) or r"(?!)")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, in which what a client wrote looks like what the template wrote. See ``encode``."""
        return self._render(self._check(messages, tools, template_kwargs), add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as ids: those of the rendered text, except that control tokens in what a client wrote stay text.

        Nothing is added around the text: a template that wants a begin token writes it, and then it stands there once.
        """
        written = self._check(messages, tools, template_kwargs)
        text = self._render(written, add_generation_prompt)
        for mask in self._masks(list(_strings(written)), text):
            try:
                masked = self._render(mask.apply_to_variables(written), add_generation_prompt)
            except InvalidRequestError:
                if mask.is_last:
                    raise
                continue  # the template looked for what was hidden
            if mask.is_last or mask.remove(masked) == text:
                return self._encode_masked(masked, mask, text)
        return self._tokenizer.encode_plain(text)

    def _masks(self, written: Sequence[str], text: str) -> Iterator["_Mask"]:
        """Ways to hide control tokens in what a client wrote, the thorough ones first; none when there is nothing.

        Hiding a character of each control token wherever it stands is thorough, also for a token that a template
        puts together from several strings, but a template may look for that very character (``<`` in ``</think>``).
        What always works is to hide the tokens that are spelled out.
        """
        controls = self._tokenizer.control_tokens
        first = {token[0] for token in controls}
        joined = "".join(written)
        if first.isdisjoint(joined):
            return
        used = set(joined) | set(text)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        second = {token[:2][-1] for token in controls}
        for characters in (first, second):
            yield _Mask({character: next(free) for character in sorted(characters)}, self._control, True, False)
        yield _Mask({character: next(free) for character in sorted(first)}, self._control, False, True)

    def _encode_masked(self, masked: str, mask: "_Mask", text: str) -> list[int]:
        """Encode what ``masked`` stands for; the control tokens that still show in it are the template's own."""
        spans = [match.span() for match in self._control.finditer(masked)]
        shown = mask.remove(masked)
        if shown == text and len(spans) == sum(1 for _ in self._control.finditer(text)):
            return self._tokenizer.encode_plain(text)
        return self._tokenizer.encode_literal(shown, spans)

    def _compile(self, source: str | None) -> jinja2.Template | str:
        """The template, or what is wrong with it: a model with a bad template still completes text."""
        if source is None:
            return "the model has no chat template; send the prompt as text"
        try:
            return self._environment.from_string(source)
        except _TEMPLATE_ERRORS as error:
            return f"the chat template is not valid: {_one_line(error)}"

    def _check(
        self, messages: Any, tools: Any, template_kwargs: Mapping[str, Any] | None
    ) -> dict[str, list[dict[str, Any]] | Any]:
        """All that a client wrote, as variables of the template; plain copies."""
        variables: dict[str, Any] = {}
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise InvalidRequestError(f"chat_template_kwargs must be an object, got {_short(template_kwargs)}")
        taken = {"messages", "tools", "add_generation_prompt", *self._tokenizer.special_token_names}
        for name, value in (template_kwargs or {}).items():
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name) or name in taken:
                raise InvalidRequestError(
                    f"chat_template_kwargs has the key {_short(name)}; keys must be names such as enable_thinking, "
                    f"and none of {', '.join(sorted(taken))}"
                )
            variables[name] = _plain(value, f"chat_template_kwargs.{name}", 1)
        return variables | {"messages": _check_messages(messages), "tools": _check_tools(tools)}

    def _render(self, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        template = self._compiled[1 if variables["tools"] else 0]
        if isinstance(template, str):
            raise InvalidRequestError(template)
        chunks: list[str] = []
        num_chars = 0
        try:
            with self._environment.budget():
                for chunk in template.generate(
                    **self._tokenizer.special_token_names,
                    **variables,
                    add_generation_prompt=add_generation_prompt,
                ):
                    chunks.append(chunk)
                    num_chars += len(chunk)
                    if num_chars > self._max_rendered_chars:
                        raise BudgetError(f"it writes more than {self._max_rendered_chars} characters")
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError(f"the chat template failed on these messages: {_one_line(error)}") from None
        return "".join(chunks)


class _Mask:
    """Replaces characters by private ones that stand nowhere else, one for one, and back.

    ``everywhere``: in all strings a client wrote, but for roles and keys. Else, and in keys, only where they begin a
    control token that is spelled out.
    """

    def __init__(
        self, characters: Mapping[str, str], control: re.Pattern[str], everywhere: bool, is_last: bool
    ) -> None:
        self._there = str.maketrans(dict(characters))
        self._back = str.maketrans({private: character for character, private in characters.items()})
        self._control = control
        self._everywhere = everywhere
        self.is_last = is_last

    def apply_to_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of what a client wrote, masked; the variables keep their names."""
        return {name: self.apply(value) for name, value in variables.items()}

    def apply(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(self._there) if self._everywhere else self._hide_tokens(value)
        if isinstance(value, list):
            return [self.apply(item) for item in value]
        if isinstance(value, dict):
            masked = {key: item if key == "role" else self.apply(item) for key, item in value.items()}
            return {self._hide_tokens(key): item for key, item in masked.items()}
        return value

    def _hide_tokens(self, text: str) -> str:
        return self._control.sub(lambda match: match[0].translate(self._there), text)

    def remove(self, text: str) -> str:
        return text.translate(self._back)


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Plain copies of the messages, or ``InvalidRequestError``."""
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError("messages is empty: it must have at least one message")
    return [_check_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequestError(f"{where}.role must be a name such as user, got {_short(role)}")
    plain: dict[str, Any] = {
        _check_key(key, where): _plain(value, f"{where}.{key}", 1)
        for key, value in message.items()
        if value is not None
    }
    if "tool_calls" in plain:
        _check_tool_calls(plain["tool_calls"], where)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_text_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif content is None:
        if not plain.get("tool_calls"):
            raise InvalidRequestError(f"{where}.content is missing: it must be a text")
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be a text or a list of text parts, got {_short(content)}")
    return plain


def _check_tool_calls(calls: Any, where: str) -> None:
    """Refuse what is no list of objects. Arguments that are the JSON text of an object become that object.

    Clients send them as text, and templates were written for objects. A text that is none stays as it is: a model
    said so.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequestError(f"{where}.tool_calls must be a list of objects, got {_short(calls)}")
    for at, call in enumerate(calls):
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(arguments, str):
            continue
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict):
            function["arguments"] = _plain(parsed, f"{where}.tool_calls[{at}]", 1)


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise InvalidRequestError(f"{where} is of type {_short(part['type'])}, which is not built yet; send text parts")
    raise InvalidRequestError(f'{where} must be {{"type": "text", "text": ...}}, got {_short(part)}')


def _check_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError(f"tools must be a list of objects, got {_short(tools)}")
    return [_plain(tool, f"tools[{at}]", 1) for at, tool in enumerate(tools)] or None


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of what JSON has, so that a template can reach nothing else."""
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{where.split('.')[0]} is nested more than {_MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {_check_key(key, where): _plain(item, where, depth + 1) for key, item in value.items()}
    raise InvalidRequestError(f"{where} must be made of text, numbers, lists and objects, got {type(value).__name__}")


def _check_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequestError(f"{where} has the key {_short(key)}; keys must be text")
    return key


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
