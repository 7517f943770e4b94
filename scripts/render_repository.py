"""Renders the templates and adapters into a complete model repository that Triton Server can load.

``fill_template.py --repository``, ``serve.py`` and the tests call it. Values are taken as they are and escaped for
where they stand; nothing unknown and nothing unfilled gets through. It starts nothing and never changes its sources.
"""

import difflib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from google.protobuf import text_format
from paths import ADAPTERS, TEMPLATES
from template_defaults import ALLOWED, DEFAULTS, MODEL_FOLDER_KEYS, RETIRED, UNQUOTED
from tritonclient.grpc import model_config_pb2

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<dollar>\$(?:\$|\{[^}]*\}?|[A-Za-z_]\w*)?)""",
    re.VERBOSE,
)
_DOLLAR = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<braced>[A-Za-z_]\w*)\}|(?P<named>[A-Za-z_]\w*)|(?P<bad>\{[^}\"]*\}?|))"
)
_ESCAPES = {"\\": "\\\\", '"': '\\"', "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_VERSION = "1"


class RenderError(ValueError):
    """A repository cannot be rendered; the message has one line per problem."""


def parse_settings(items: Iterable[str]) -> dict[str, str]:
    """Split each ``KEY:VALUE`` at its first colon; the value is taken as it is. Raises ``RenderError``."""
    settings: dict[str, str] = {}
    for item in items:
        key, colon, value = item.partition(":")
        if not (key and colon):
            raise RenderError(f"--set {item!r} is not allowed; use KEY:VALUE")
        if key in settings and settings[key] != value:
            raise RenderError(f"--set {key} is given twice, as {settings[key]!r} and as {value!r}")
        settings[key] = value
    return settings


def placeholders(text: str) -> list[str]:
    """Return the names of the placeholders in a template, each once, in order of appearance (comments aside)."""
    names: list[str] = []

    def collect(name: str, is_quoted: bool) -> str:
        names.append(name)
        return ""

    _substitute(text, collect, "template")
    return list(dict.fromkeys(names))


def render_template(text: str, values: Mapping[str, str], source: str) -> str:
    """Return ``text`` with every placeholder replaced, by ``values`` or else by its default.

    ``source`` names the template in messages. Raises ``RenderError`` naming each placeholder that has no value, or
    a value that cannot stand where the template puts it.
    """
    problems: list[str] = []

    def replace(name: str, is_quoted: bool) -> str:
        value = values.get(name, DEFAULTS.get(name))
        if value is None and is_quoted and name not in MODEL_FOLDER_KEYS:
            return ""
        if value is None:
            folder = " or --model-dir FOLDER" if name in MODEL_FOLDER_KEYS else ""
            problems.append(f"{source}: no value for {name}; give --set {name}:VALUE{folder}")
            return ""
        if is_quoted:
            return escape(value)
        if not UNQUOTED.accepts(value):
            problems.append(f"{source}: {name}={value!r} is not allowed there; use {UNQUOTED.words}")
        return value

    rendered = _substitute(text, replace, source)
    if problems:
        raise RenderError("\n".join(dict.fromkeys(problems)))
    return rendered


def escape(value: str) -> str:
    """Escape ``value`` for a quoted string of text-format protobuf, so that it reads back as the same bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RenderError(f"value {value!r} is not valid UTF-8") from None
    return "".join(_ESCAPES.get(c) or (f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c) for c in value)


def _substitute(text: str, replace: Callable[[str, bool], str], source: str) -> str:
    """Put ``replace(name, is_quoted)`` for every placeholder of ``text``; comments stay, without their dollar signs."""

    def fill(match: re.Match[str], is_quoted: bool) -> str:
        if match["escaped"]:
            return "$"
        if match["bad"] is not None:
            raise RenderError(f"{source}: {match[0]!r} is no placeholder; write ${{name}}, or $$ for a dollar sign")
        return replace(match["braced"] or match["named"], is_quoted)

    def token(match: re.Match[str]) -> str:
        if match["comment"]:
            return match[0].replace("$", "")
        return _DOLLAR.sub(lambda inner: fill(inner, match["string"] is not None), match[0])

    return _TOKEN.sub(token, text)


def render_repository(
    out_dir: Path,
    settings: Mapping[str, str],
    model_dir: Path | None = None,
    templates: Path = TEMPLATES,
    adapters: Path = ADAPTERS,
) -> list[str]:
    """Write a complete model repository into ``out_dir`` and return the names of its models.

    Every folder of ``templates`` is a model: its rendered config.pbtxt, and beside it what ``adapters`` holds for it
    (an empty version folder when nothing). ``model_dir`` fills tokenizer_dir and engine_dir. All settings are checked
    before anything is written; doing it twice gives the same files. Raises ``RenderError`` with all problems.
    """
    sources = {path.parent.name: path.read_text() for path in sorted(templates.glob("*/config.pbtxt"))}
    if not sources:
        raise RenderError(f"no templates in {templates}: expected folders that hold a config.pbtxt")
    values = dict.fromkeys(MODEL_FOLDER_KEYS, str(model_dir)) if model_dir else {}
    values |= check_settings(settings, {name for text in sources.values() for name in placeholders(text)})
    rendered: dict[str, str] = {}
    problems: list[str] = []
    for model, text in sources.items():
        try:
            rendered[model] = render_template(text, values, model)
            _check_config(model, rendered[model])
        except RenderError as error:
            problems.append(str(error))
    if problems:
        raise RenderError("\n".join(problems))
    for model, config in rendered.items():
        _write_model(out_dir / model, config, adapters / model)
    return list(rendered)


def check_settings(settings: Mapping[str, str], known: set[str]) -> dict[str, str]:
    """Return ``settings`` without retired names. Raises ``RenderError`` naming every unknown key and bad value."""
    problems = []
    kept = {}
    for key, value in settings.items():
        if key in known:
            kept[key] = value
            if key in ALLOWED and not ALLOWED[key].accepts(value):
                problems.append(f"{key}={value!r} is not allowed; use {ALLOWED[key].words}")
        elif key in RETIRED:
            print(f"note: {key} has no effect any more and is ignored", file=sys.stderr)
        else:
            near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.7)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
            problems.append(f"unknown setting {key!r}; {hint}")
    merged = {**DEFAULTS, **kept}
    if "postprocessing_instance_count" in known and not problems and merged["decoupled_mode"].lower() == "true":
        count = merged["postprocessing_instance_count"]
        if count != "1":
            problems.append(
                f"postprocessing_instance_count={count} is not allowed with decoupled_mode:true; use 1 "
                "(several instances would deliver streamed tokens out of order)"
            )
    if problems:
        raise RenderError("\n".join(problems))
    return kept


def _check_config(model: str, text: str) -> None:
    try:
        text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise RenderError(f"{model}: the rendered config.pbtxt is not valid: {error}") from None


def _write_model(target: Path, config: str, adapter: Path) -> None:
    version = target / _VERSION
    version.mkdir(parents=True, exist_ok=True)
    if adapter.is_dir():
        shutil.copytree(adapter, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (target / "config.pbtxt").write_text(config)
