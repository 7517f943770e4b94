#!/usr/bin/env python3
"""Chat with a running server in the terminal: answers stream in as they are made.

``/reset`` forgets the conversation, ``/exit`` (or end of input) leaves, Ctrl-C ends the current answer only. From a
pipe each line of standard input is one turn. The chat template is the model's own, rendered here.
"""

import argparse
import signal
import sys
import threading
from pathlib import Path

from chat_client import ChatClient, ChatError
from prompt import PromptError, PromptRenderer

_FLOATS = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address of the server")
    parser.add_argument("--model-name", choices=("tensorrt_llm_bls", "ensemble"), default="tensorrt_llm_bls")
    parser.add_argument(
        "--tokenizer-dir", type=Path, help="model folder (default: as the server's preprocessing has it)"
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens per answer")
    for name in _FLOATS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="stop word (repeatable)")
    return parser


def sampling_from(arguments: argparse.Namespace) -> dict[str, float | int | list[str]]:
    """Return the sampling inputs that were given, by tensor name."""
    names = {**{name: name for name in _FLOATS}, "top_k": "top_k", "seed": "seed", "stop": "stop_words"}
    given = {tensor: getattr(arguments, name) for name, tensor in names.items()}
    return {tensor: value for tensor, value in given.items() if value is not None}


def find_tokenizer(client_url: str, given: Path | None) -> Path:
    """Return the folder whose chat template to use: ``given``, else what the server's preprocessing was started with.

    Raises ``ChatError`` when the server does not say, or the folder is not on this machine.
    """
    if given is not None:
        return given
    config = ChatClient(client_url, "preprocessing").config
    folder = config.parameters["tokenizer_dir"].string_value if "tokenizer_dir" in config.parameters else ""
    if not Path(folder).is_dir() or not folder:
        raise ChatError(f"the server's tokenizer folder {folder!r} is not on this machine; give --tokenizer-dir")
    return Path(folder)


class Conversation:
    """The turns so far and how to take the next one."""

    def __init__(self, client: ChatClient, renderer: PromptRenderer, arguments: argparse.Namespace) -> None:
        self._client = client
        self._renderer = renderer
        self._arguments = arguments
        self._messages: list[dict[str, str]] = []
        self.cancel = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Forget every turn but the system message."""
        system = self._arguments.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def take_turn(self, text: str) -> None:
        """Ask ``text``, print the answer as it comes and its figures after it. Raises ``ChatError``."""
        self._messages.append({"role": "user", "content": text})
        self.cancel.clear()
        try:
            answer = self._client.stream(
                self._renderer.render(self._messages),
                self._arguments.max_tokens,
                sampling_from(self._arguments),
                lambda delta: print(delta, end="", flush=True),
                self.cancel,
            )
        except (ChatError, PromptError):
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer.text})
        suffix = "" if answer.is_complete else ", cancelled"
        print(flush=True)
        print(f"[{answer.summary()}{suffix}]", file=sys.stderr, flush=True)


def converse(conversation: Conversation, is_interactive: bool) -> int:
    """Read turns until the end of input; returns the exit code, 1 when a turn of a pipe failed."""
    exit_code = 0
    while True:
        try:
            text = input("> " if is_interactive else "").strip()
        except EOFError:
            return exit_code
        except KeyboardInterrupt:
            print()
            return exit_code
        if text == "/exit":
            return exit_code
        if text == "/reset":
            conversation.reset()
            continue
        if not text:
            continue
        # Only while an answer runs does Ctrl-C mean that answer; at the prompt it means to leave.
        previous = signal.signal(signal.SIGINT, lambda number, frame: conversation.cancel.set())
        try:
            conversation.take_turn(text)
        except (ChatError, PromptError) as error:
            print(f"error: {error}", file=sys.stderr)
            exit_code = 0 if is_interactive else 1
        finally:
            signal.signal(signal.SIGINT, previous)


def main(argv: list[str] | None = None) -> int:
    """Run the chat; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        client = ChatClient(arguments.url, arguments.model_name)
        renderer = PromptRenderer(find_tokenizer(arguments.url, arguments.tokenizer_dir))
    except (ChatError, PromptError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(f"{arguments.model_name} at {arguments.url}. /reset starts over, /exit leaves, Ctrl-C ends an answer.")
    return converse(Conversation(client, renderer, arguments), is_interactive)


if __name__ == "__main__":
    sys.exit(main())
