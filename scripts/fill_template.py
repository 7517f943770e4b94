#!/usr/bin/env python3
"""Fills the placeholders of config.pbtxt templates, one file at a time or a whole model repository.

With a file and a substitution string it does what the tool of the same name has always done, so that existing fill
lines go on working: ``fill_template.py [-i] FILE key:value,key:value``. With ``--set`` or ``--repository`` values are
taken as they are after the first colon, and nothing unknown or unfilled gets through. Needs only the standard library
for the former.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

_ALWAYS_FILLED = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}


def split(string: str, delimiter: str) -> list[str]:
    """Split ``string`` at each ``delimiter`` that no backslash protects.

    One level of backslashes is used up: a backslash goes, and the character after it stays as it is.
    """
    parts = [""]
    characters = iter(string)
    for character in characters:
        if character == "\\":
            parts[-1] += next(characters, "")
        elif character == delimiter:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def main(file_path: str | Path, substitutions: str, in_place: bool) -> None:
    """Fill one template the established way and print it, or write it back with ``in_place``.

    Items are separated by commas, key and value by one colon. Raises ``ValueError`` for an item without exactly one
    colon, ``AssertionError`` for a key that occurs nowhere in the file. Placeholders not named are left as they are.
    """
    text = Path(file_path).read_text()
    values = dict(_ALWAYS_FILLED)
    for item in split(substitutions, ","):
        key, value = split(item, ":")
        if key not in text:
            raise AssertionError(f"key '{key}' does not exist in the file {file_path}.")
        values[key] = value
    filled = Template(text).safe_substitute(values)
    if in_place:
        Path(file_path).write_text(filled)
    else:
        print(filled)


def _render(arguments: argparse.Namespace) -> None:
    """Do ``--repository OUT_DIR`` or ``FILE --set ...``. Raises ``RenderError``."""
    # Not at the top: the established mode must run where only the standard library is installed.
    import render_repository as renderer
    from template_defaults import MODEL_FOLDER_KEYS

    settings = renderer.parse_settings(arguments.settings)
    if arguments.repository is not None:
        models = renderer.render_repository(arguments.repository, settings, arguments.model_dir)
        print(f"{arguments.repository}: {', '.join(models)}")
        return
    text = Path(arguments.file_path).read_text()
    values = renderer.check_settings(settings, set(renderer.placeholders(text)))
    if arguments.model_dir is not None:
        values = dict.fromkeys(MODEL_FOLDER_KEYS, str(arguments.model_dir)) | values
    filled = renderer.render_template(text, values, str(arguments.file_path))
    if arguments.in_place:
        Path(arguments.file_path).write_text(filled)
    else:
        print(filled, end="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fill config.pbtxt templates.")
    parser.add_argument("file_path", nargs="?", help="template to fill")
    parser.add_argument("substitutions", nargs="?", help=r"key:value,key:value (protect , as \, and : as \\:)")
    parser.add_argument("-i", "--in_place", action="store_true", help="write the file back instead of printing it")
    parser.add_argument("--repository", type=Path, metavar="OUT_DIR", help="render all templates and adapters there")
    parser.add_argument("--model-dir", type=Path, help="model folder, for tokenizer_dir and engine_dir")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY:VALUE",
        help="fill one placeholder; the value is everything after the first colon (repeatable)",
    )
    return parser


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    renders = arguments.repository is not None or bool(arguments.settings) or arguments.model_dir is not None
    if (arguments.repository is None) == (arguments.file_path is None):
        parser.error("give a FILE to fill, or --repository OUT_DIR")
    if renders == (arguments.substitutions is not None):
        parser.error("give either key:value,key:value after FILE, or --set KEY:VALUE")
    if not renders:
        main(arguments.file_path, arguments.substitutions, arguments.in_place)
        return 0
    try:
        _render(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command_line())
