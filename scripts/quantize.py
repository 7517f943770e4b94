#!/usr/bin/env python3
"""Quantize a model: a checkpoint in any format -> a Hugging Face folder in compressed-tensors' format.

    python scripts/quantize.py --qformat int4_awq --output FOLDER
    python scripts/quantize.py --model FOLDER_OR_FILE_OR_HUB_ID --qformat int8_sq --kv-cache-dtype int8 --output FOLDER

Without ``--model`` it is the small model that serve.sh takes. The folder is served as it is (serve.sh --model FOLDER),
built into an engine folder (build_engine.py), or given to vLLM, SGLang or transformers. Prints progress, then size,
perplexity before and after, time and memory as a table, and last one JSON line; exits with 1 after one line that says
what was wrong.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_common as common
from bench_load import files_of
from command_line import OneLineParser, ProgressBar, whole_number

from backend_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from backend_engine.checkpoint.checkpoint import Checkpoint
    from backend_engine.post_training.quantize_model import QuantizationReport
    from backend_engine.post_training.recipes import Recipe

Windows = list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        row = quantize(options)
    except EngineError as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:  # who fetches the small model has said why
        return 1
    except KeyboardInterrupt as interrupt:
        what_is_left = str(interrupt) or f"nothing was left in {options.output}"
        print(f"quantize: interrupted; {what_is_left}", file=sys.stderr)
        return 130
    common.print_table(["", "before", "after"], table(row))
    common.print_json({key: in_json(value) for key, value in row.items()})
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        "quantize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a folder, a file, or an id on the Hugging Face Hub (default: a small model)")
    parser.add_argument("--qformat", required=True, help="int8_wo, int8_dyn, int8_sq, int4_awq, int4_gptq, fp8, nvfp4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (the model's dtype), fp8 or int8")
    parser.add_argument("--output", required=True, type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--group-size", type=whole_number, help="columns that share a scale, int4 only (default: 32)")
    parser.add_argument("--calib-data", type=Path, help="a .txt or .jsonl file (default: topics of Python's manual)")
    parser.add_argument("--calib-size", type=whole_number, default=64, help="windows of text to calibrate with (64)")
    parser.add_argument("--calib-max-seq-length", type=whole_number, default=512, help="tokens of a window (512)")
    parser.add_argument("--eval-size", type=whole_number, default=16, help="windows for the perplexity (16)")
    parser.add_argument("--no-perplexity", action="store_true", help="do not measure the perplexity")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    parser.add_argument("--trust-remote-code", action="store_true", help="whether code in the model's folder may run")
    return parser.parse_args(argv)


def quantize(options: argparse.Namespace) -> dict[str, Any]:
    """Quantize as the options say. Returns what is reported."""
    from backend_engine.builder.new_folder import check_output
    from backend_engine.checkpoint.open_checkpoint import open_checkpoint
    from backend_engine.hub import local_path
    from backend_engine.post_training.quantize_model import quantize_checkpoint
    from backend_engine.post_training.recipes import check_kv_dtype, recipe_of
    from backend_engine.post_training.source_weights import stored_dtype

    device = chosen_device(options.device)
    recipe = recipe_of(options.qformat, options.group_size)
    check_kv_dtype(options.kv_cache_dtype)
    check_output(options.output)
    model = local_path(options.model or common.default_model())
    checkpoint = open_checkpoint(model)
    recipe = recipe_of(options.qformat, options.group_size, stored_dtype(checkpoint))
    calibration, evaluation = texts(options, checkpoint, recipe)
    started = time.perf_counter()
    with ProgressBar(f"quantize {options.qformat}") as progress:
        report = quantize_checkpoint(
            checkpoint,
            options.output,
            recipe,
            calibration,
            options.kv_cache_dtype,
            device,
            options.trust_remote_code,
            progress,
        )
    seconds = time.perf_counter() - started
    peak = peak_bytes_of(device)
    tell(report)
    before = after = None
    try:
        if not options.no_perplexity:
            before = measure(model, evaluation, device, "auto", "perplexity before")
            after = measure(str(options.output), evaluation, device, options.kv_cache_dtype, "perplexity after")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{options.output} is whole, but its perplexity was not measured") from None
    return {
        "model": str(model), "output": str(options.output), "qformat": options.qformat,
        "kv_cache_dtype": options.kv_cache_dtype, "bytes_before": weight_bytes_of(Path(model)),
        "bytes_after": weight_bytes_of(options.output), "perplexity_before": before, "perplexity_after": after,
        "quantize_s": round(seconds, 1), "peak_bytes": peak, "num_weights": report.num_weights,
    }  # fmt: skip


def chosen_device(name: str) -> str:
    """``cpu`` or ``cuda``. Raises ``ConfigError`` for anything else, and for a GPU that is not there."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not allowed; use auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' is not available: torch sees no CUDA device; use device 'cpu' or 'auto'")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def peak_bytes_of(device: str) -> int:
    """The most memory that was taken so far, of the device that computed."""
    import torch

    return common.peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()


def texts(options: argparse.Namespace, checkpoint: "Checkpoint", recipe: "Recipe") -> tuple[Windows, Windows]:
    """Windows to calibrate and to judge with; none where they are not needed."""
    from backend_engine.model_engine.model_loader import describe_model
    from backend_engine.post_training.calibration_data import WindowLimits, calibration_windows, evaluation_windows
    from backend_engine.text.tokenizer import load_tokenizer

    is_calibrated = recipe.is_calibrated or options.kv_cache_dtype == "fp8"
    if not is_calibrated and options.no_perplexity and options.calib_data is None:
        return [], []
    facts = describe_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint.path, options.trust_remote_code)
    vocab_size = checkpoint.config.get("vocab_size")
    limits = WindowLimits(vocab_size if isinstance(vocab_size, int) else None, facts.max_positions)
    length = options.calib_max_seq_length
    calibration: Windows = []
    if is_calibrated or options.calib_data is not None:
        calibration = calibration_windows(tokenizer, options.calib_data, options.calib_size, length, limits)
    if options.no_perplexity:
        return calibration, []
    return calibration, evaluation_windows(tokenizer, None, options.eval_size, length, limits)


def measure(model: str, windows: Windows, device: str, kv_cache_dtype: str, what: str) -> float:
    """The perplexity of a model as it is loaded from its folder or file."""
    from backend_engine.model_engine.model_loader import load_model
    from backend_engine.post_training.perplexity import perplexity

    dtype = "float32" if device == "cpu" else "bfloat16"
    loaded = load_model(model, dtype, device)
    with ProgressBar(what, "window") as progress:
        return perplexity(loaded, windows, dtype if kv_cache_dtype == "auto" else kv_cache_dtype, progress)


def tell(report: "QuantizationReport") -> None:
    """What is noteworthy, on standard error."""
    notes = list(report.notes)
    notes += [f"{name} stays plain: {reason}" for name, reason in report.left_plain.items()]
    plain = [note.name for note in report.rounding if note.is_plain]
    if plain:
        notes.append(
            f"{len(plain)} weights were rounded to the nearest, since no text came through them: {plain[0]} ..."
        )
    errors = [(note.relative_error, note.name) for note in report.rounding if note.relative_error is not None]
    if errors:
        worst, name = max(errors)
        mean = sum(error for error, _ in errors) / len(errors)
        notes.append(
            f"error of the products' outputs on the texts: {mean:.2%} of their energy, at most {worst:.2%} ({name})"
        )
    for note in notes:
        print(f"quantize: note: {note}", file=sys.stderr)


def weight_bytes_of(model: Path) -> int:
    """Bytes of the files that hold weights."""
    return sum(path.stat().st_size for path in files_of(model))


def in_json(value: Any) -> Any:
    """``None`` for a number that is not finite: JSON has no word for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(row: dict[str, Any]) -> list[list[str]]:
    """The report for people."""
    before, after = row["perplexity_before"], row["perplexity_after"]
    rows = [["weights", *(f"{row[key] / 1e6:.1f} MB" for key in ("bytes_before", "bytes_after"))]]
    if before is not None and after is not None:
        rows.append(["perplexity", f"{before:.3f}", f"{after:.3f} ({after / before - 1:+.2%})"])
    rows.append(["time", "", f"{row['quantize_s']:.1f} s"])
    rows.append(["peak memory", "", f"{row['peak_bytes'] / 1e6:.0f} MB"])
    return rows


if __name__ == "__main__":
    sys.exit(main())
