#!/usr/bin/env python3
"""Writes what follows from the tables of ``backend_engine/triton_io``: templates, docs/tensors.md, docs/parameters.md.

Run it after a change of ``tensor_table``, ``option_table``, ``feature_table``, ``parameter_table`` or ``envs``; a test
compares what it would write with what is there. ``--check`` writes nothing and exits 1 when something differs.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from backend_engine import envs  # noqa: E402
from backend_engine.triton_io import tensor_table as tensors  # noqa: E402
from backend_engine.triton_io.parameter_table import PARAMETERS, Parameter, Status, parameters_of  # noqa: E402
from backend_engine.triton_io.tensor_rows import TensorRow  # noqa: E402

INTERNAL_NAMES = {"OUT_END_ID": "_PREPROCESSOR_END_ID", "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID"}
_POLICY = "model_transaction_policy {\n  decoupled: ${decoupled_mode}\n}\n"
_BATCHING = (
    "dynamic_batching {\n  preferred_batch_size: [ ${triton_max_batch_size} ]\n"
    "  max_queue_delay_microseconds: ${max_queue_delay_microseconds}\n"
    "  default_queue_policy: { max_queue_size: ${max_queue_size} }\n}\n"
)
_ABOUT = {
    tensors.PREPROCESSING: "Prompts and words as text -> token ids.",
    tensors.ENGINE: "The engine: token ids in, token ids and text out.",
    tensors.POSTPROCESSING: "Token ids -> text, or the engine's text handed through.",
    tensors.BLS: "Text in, text out, by calls of preprocessing and tensorrt_llm.",
    tensors.ENSEMBLE: "Text in, text out: preprocessing -> tensorrt_llm -> postprocessing.",
}


def internal_name(name: str) -> str:
    """Name of a tensor between two steps of the ensemble."""
    return INTERNAL_NAMES.get(name, f"_{name}")


def _tensor(row: TensorRow, *, is_input: bool) -> str:
    lines = [f'    name: "{row.name}"', f"    data_type: {row.dtype}", f"    dims: [ {', '.join(map(str, row.dims))} ]"]
    if row.reshape:
        lines.append("    reshape: { shape: [ ] }")
    if row.ragged and is_input:
        lines.append("    allow_ragged_batch: true")
    if row.optional and is_input:
        lines.append("    optional: true")
    return "\n".join(["  {", *lines, "  }"])


def _block(kind: str, rows: Iterable[TensorRow]) -> str:
    return f"{kind} [\n" + ",\n".join(_tensor(row, is_input=kind == "input") for row in rows) + "\n]\n"


def _parameters(model: str) -> str:
    return "".join(
        f'parameters: {{\n  key: "{p.key}"\n  value: {{\n    string_value: "${{{p.placeholder}}}"\n  }}\n}}\n'
        for p in parameters_of(model)
        if p.placeholder
    )


def _instances(count: str) -> str:
    return f"instance_group [\n  {{\n    count: {count}\n    kind: KIND_CPU\n  }}\n]\n"


def _step(name: str, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    def entries(kind: str, pairs: Iterable[tuple[str, str]]) -> str:
        return "".join(f'      {kind} {{\n        key: "{k}"\n        value: "{v}"\n      }}\n' for k, v in pairs)

    maps = entries("input_map", inputs) + entries("output_map", outputs)
    return f'    {{\n      model_name: "{name}"\n      model_version: -1\n{maps}    }}'


def _scheduling() -> str:
    between = tensors.ENGINE_FROM_PREPROCESSING
    first = _step(
        tensors.PREPROCESSING,
        [(name, text) for text, name in tensors.PREPROCESSING_FROM_TEXT.items()],
        [(name, internal_name(name)) for name in between],
    )
    results = [row.name for row in tensors.MODELS[tensors.ENSEMBLE].outputs if row.name != "text_output"]
    second = _step(
        tensors.ENGINE,
        [*((engine, internal_name(name)) for name, engine in between.items()),
         *((engine, text) for text, engine in tensors.engine_from_text().items())],
        [*((name, f"_{post}") for name, post in tensors.POSTPROCESSING_FROM_ENGINE.items()),
         *((name, name) for name in results)],
    )  # fmt: skip
    third = _step(
        tensors.POSTPROCESSING,
        [(name, f"_{name}") for name in tensors.POSTPROCESSING_FROM_ENGINE.values()],
        [("OUTPUT", "text_output")],
    )
    return "ensemble_scheduling {\n  step [\n" + ",\n".join((first, second, third)) + "\n  ]\n}\n"


def template(model: str) -> str:
    """The config.pbtxt template of ``model``."""
    kind = {
        tensors.ENSEMBLE: 'platform: "ensemble"',
        tensors.ENGINE: 'backend: "${triton_backend}"',
    }.get(model, 'backend: "python"')
    spare = [p.key for p in parameters_of(model) if not p.placeholder]
    named = (
        f"# Keys of other generations of fill lines, which mean nothing here: {', '.join(spare)}.\n" if spare else ""
    )
    head = f'# {_ABOUT[model]}\n{named}name: "{model}"\n{kind}\nmax_batch_size: ${{triton_max_batch_size}}\n'
    table = tensors.MODELS[model]
    body = _block("input", table.inputs) + _block("output", table.outputs) + _parameters(model)
    before, after = {
        tensors.PREPROCESSING: (_BATCHING, _instances("${preprocessing_instance_count}")),
        tensors.ENGINE: (_POLICY + _BATCHING, _instances("1")),
        tensors.POSTPROCESSING: ("dynamic_batching {}\n", _instances("${postprocessing_instance_count}")),
        tensors.BLS: (_POLICY, _instances("${bls_instance_count}")),
        tensors.ENSEMBLE: ("", _scheduling()),
    }[model]
    return head + before + body + after


def tensors_page() -> str:
    """docs/tensors.md."""
    parts = [
        "# Tensors\n\nEvery input and output of the five models, written by `scripts/write_contract.py` from "
        "`backend_engine/triton_io/tensor_table.py`.\nDims leave the batch dimension out. *scalar*: declared `[1]`, "
        "seen by the model without that dimension. *ragged*: rows of a\nbatch may differ in size. Fields marked "
        "*parameter* in the second list may be sent as request parameters too.\n"
    ]
    for model, table in tensors.MODELS.items():
        for kind, rows in (("inputs", table.inputs), ("outputs", table.outputs)):
            parts.append(f"\n## {model}: {kind}\n\n| Name | Type | Dims | | Meaning |\n|---|---|---|---|---|\n")
            parts += [_tensor_line(row, is_input=kind == "inputs") for row in rows]
    names = ", ".join(f"`{name}`" for name in sorted(tensors.SHARED_PARAMETERS))
    parts.append(f"\n## Fields that may be request parameters too\n\n{names}\n")
    return "".join(parts)


def _tensor_line(row: TensorRow, *, is_input: bool) -> str:
    flags = [("required" if not row.optional else "") if is_input else "", "scalar" if row.reshape else "",
             "ragged" if row.ragged else ""]  # fmt: skip
    dims = f"[{', '.join(map(str, row.dims))}]"
    kind = row.dtype.removeprefix("TYPE_")
    return f"| `{row.name}` | {kind} | {dims} | {', '.join(filter(None, flags))} | {row.doc} |\n"


def parameters_page() -> str:
    """docs/parameters.md."""
    head = (
        "| Placeholder | Key in config.pbtxt | Models | Values | Default | What it does |\n|---|---|---|---|---|---|\n"
    )

    def rows(status: Status) -> str:
        return head + "".join(_parameter_line(p) for p in PARAMETERS if p.status is status)

    variables = "".join(
        f"| `{v.name}` | {v.allowed} | {'unset' if v.default in ('', False) else v.default} | {v.help} |\n"
        for v in envs.TABLE
    )
    return (
        "# Parameters\n\nEvery placeholder of the templates, every parameter of the models and every environment "
        "variable, written by\n`scripts/write_contract.py` from `backend_engine/triton_io/parameter_table.py`.\n\n"
        "* A value that is empty, or still a `${placeholder}`, is unset and means the default.\n"
        "* Any other value that is not allowed fails the load of its model. The error names all problems of that model "
        "at once.\n"
        "* Booleans are `true`, `t`, `yes`, `y`, `1` or `false`, `f`, `no`, `n`, `0`, in any case.\n"
        "* A key that is none of these is ignored with a log line; one within two edits of a known key is refused.\n\n"
        "## Settings that count\n\nThose whose key is `field` stand in the config's own fields and have no default, "
        f"unless one is named.\n\n{rows(Status.BUILT)}\n"
        "## Accepted without effect\n\nAccepted so that existing set-ups go on working, and named once in the log of "
        f"the model's start.\n\n{rows(Status.NO_EFFECT)}\n"
        "## Not built yet\n\nAnswers would differ without these, so a value that asks for one fails the load.\n\n"
        f"{rows(Status.NOT_BUILT)}\n"
        f"## Environment variables\n\n| Variable | Values | Default | What it does |\n|---|---|---|---|\n{variables}"
    )


def _parameter_line(p: Parameter) -> str:
    kind = " / ".join(p.kind) if isinstance(p.kind, tuple) else p.kind
    if p.high is not None:
        kind += f", {p.low:g} to {p.high:g}"
    elif p.low is not None:
        kind += f", {p.low:g} or more"
    key = "field" if p.is_field else f"`{p.key}`"
    placeholder = f"`{p.placeholder}`" if p.placeholder else "none"
    models = "all" if len(p.models) == len(tensors.MODELS) else ", ".join(p.models)
    return f"| {placeholder} | {key} | {models} | {kind} | {p.default} | {p.help} |\n"


def contents() -> dict[Path, str]:
    """Every file this script owns and what it must hold."""
    files = {ROOT / "templates" / model / "config.pbtxt": template(model) for model in tensors.MODELS}
    return files | {ROOT / "docs" / "tensors.md": tensors_page(), ROOT / "docs" / "parameters.md": parameters_page()}


def main(argv: list[str] | None = None) -> int:
    """Write the files, or with ``--check`` compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    check = parser.parse_args(argv).check
    differing = [path for path, text in contents().items() if not path.exists() or path.read_text() != text]
    for path in differing:
        print(f"{path.relative_to(ROOT)}: {'differs from the tables' if check else 'written'}")
        if not check:
            path.write_text(contents()[path])
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
