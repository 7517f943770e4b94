#!/usr/bin/env python3
"""Build an engine folder from a checkpoint in any format: weights fused, packed, divided over ranks, with checksums.

    python scripts/build_engine.py --model FOLDER_OR_FILE_OR_HUB_ID --output ENGINE_FOLDER
    python scripts/build_engine.py --model FOLDER --output ENGINE_FOLDER --max-batch-size 16 --max-seq-len 4096

``--model`` of the default is the small model that serve.sh takes. The folder runs on any machine: LLM(ENGINE_FOLDER),
scripts/serve.sh --model ENGINE_FOLDER, or engine_dir of the templates. Prints progress and, last, one JSON line; exits
with 1 after one line that says what was wrong.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bench_common as common
from command_line import OneLineParser, ProgressBar, whole_number

from backend_engine.config.build_config import PRECISIONS, BuildConfig
from backend_engine.errors import EngineError


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        build(options)
    except EngineError as error:
        print(f"build_engine: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:  # who fetches the small model has said why
        return 1
    except KeyboardInterrupt:
        print(f"build_engine: interrupted; nothing was left in {options.output}", file=sys.stderr)
        return 130
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        "build_engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a folder, a file, or an id on the Hugging Face Hub (default: a small model)")
    parser.add_argument("--output", required=True, type=Path, help="the engine folder, which must not exist")
    parser.add_argument("--max-batch-size", type=whole_number, help="most requests in a step")
    parser.add_argument("--max-input-len", type=whole_number, help="longest prompt")
    parser.add_argument("--max-seq-len", type=whole_number, help="most tokens of a request; default: the model's")
    parser.add_argument("--max-num-tokens", type=whole_number, help="most tokens in a step")
    parser.add_argument(
        "--precision", default="auto", choices=("auto", *PRECISIONS), help="of plain weights; auto: the checkpoint's"
    )
    parser.add_argument("--tensor-parallel-size", "--tp", type=whole_number, default=1, metavar="N")
    parser.add_argument("--pipeline-parallel-size", "--pp", type=whole_number, default=1, metavar="N")
    parser.add_argument("--plugins", default="", help="plugins that the model needs, as the parameter plugins has them")
    parser.add_argument("--trust-remote-code", action="store_true", help="whether code in the model's folder may run")
    return parser.parse_args(argv)


def build(options: argparse.Namespace) -> None:
    """Build as the options say, and print what came of it."""
    from backend_engine.builder.engine_builder import build_engine
    from backend_engine.hub import local_path
    from backend_engine.plugins.discovery import load_plugins, plugin_names

    config = BuildConfig(
        options.max_batch_size,
        options.max_input_len,
        options.max_seq_len,
        options.max_num_tokens,
        options.precision,
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        plugin_names(options.plugins),
    )
    load_plugins(config.plugins)
    model = local_path(options.model or common.default_model())
    started = time.perf_counter()
    with ProgressBar("build") as progress:
        report = build_engine(model, options.output, config, options.trust_remote_code, progress)
    for warning in report.warnings:
        print(f"build_engine: note: {warning}", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(f"{options.output}: {report.num_bytes / 1e6:.1f} MB in {len(report.manifest.files)} files, {seconds:.1f} s")
    result = {"output": str(options.output), "bytes": report.num_bytes, "build_s": round(seconds, 3)}
    common.print_json({**result, "peak_bytes": common.peak_bytes()})


if __name__ == "__main__":
    sys.exit(main())
