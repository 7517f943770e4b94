#!/usr/bin/env python3
"""Size and perplexity of every quantization format, on a model and on its rotated copy: a table and a plot.

    python scripts/bench_quantization.py

The copy's weights are rotated by a random orthogonal matrix, which leaves the model's function as it is: a model that
comes from a 4-bit file has so few distinct weights that 4-bit formats look lossless on it, and the rotation takes that
away. Runs scripts/quantize.py for each format (int8_dyn is int8_sq), one after the other, with the default calibration
texts. What was measured is kept in quantization.json of ``--output`` after each format, and a second run goes on where
the first ended; ``--fresh`` begins anew. Writes quantization.png there too, prints the table and, last, one JSON line.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bench_common as common

SCRIPTS = Path(__file__).resolve().parent
FORMATS = ("int8_wo", "int8_sq", "fp8", "nvfp4", "int4_gptq", "int4_awq")
MOST = {"int8": 1.0, "fp8": 2.0, "int4": 8.0, "nvfp4": 8.0}
"""How many percent a perplexity may rise, by the beginning of the format's name."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of Hugging Face's format (default: the model that serve.sh takes)")
    parser.add_argument("--qformats", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="FORMAT")
    parser.add_argument("--copies", nargs="+", default=["plain", "rotated"], choices=("plain", "rotated"))
    parser.add_argument("--calib-size", type=int, default=64, help="windows of 512 tokens to calibrate with (64)")
    parser.add_argument("--eval-size", type=int, default=16, help="windows of 512 tokens for the perplexity (16)")
    parser.add_argument("--output", type=Path, default=common.ROOT / "docs" / "performance")
    parser.add_argument("--keep", type=Path, help="a folder to keep the quantized models in")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    options = parser.parse_args()
    path = options.output / "quantization.json"
    rows: list[Row] = [] if options.fresh or not path.exists() else json.loads(path.read_text())["rows"]
    model = options.model or common.default_model()
    with tempfile.TemporaryDirectory() as scratch:
        for copy in options.copies:
            folder = ""
            for qformat in options.qformats:
                if any((row["copy"], row["qformat"]) == (copy, qformat) for row in rows):
                    continue
                folder = folder or (model if copy == "plain" else rotated(model, Path(scratch)))
                sizes = ["--calib-size", str(options.calib_size), "--eval-size", str(options.eval_size)]
                rows.append(measure(folder, copy, qformat, sizes, options.keep or Path(scratch)))
                if not options.keep:
                    shutil.rmtree(Path(scratch) / f"{copy}-{qformat}")
                path.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    plot(rows, options.output / "quantization.png")
    header = ["copy", "format", "weights MB", "of before", "perplexity", "rise", "allowed", "time s", "peak MB"]
    common.print_table(header, [cells(row) for row in rows])
    common.print_json({"rows": rows})


def rotated(model: str, scratch: Path) -> str:
    """The rotated copy of ``model``."""
    common.progress("rotating the model")
    command = [sys.executable, str(SCRIPTS / "rotate_checkpoint.py"), "--model", model]
    subprocess.run([*command, "--output", str(scratch / "rotated")], check=True, stdout=subprocess.DEVNULL)
    return str(scratch / "rotated")


def measure(model: str, copy: str, qformat: str, sizes: Sequence[str], folder: Path) -> Row:
    """Quantize, and keep what the script reports."""
    common.progress(f"{copy}: {qformat}")
    output = folder / f"{copy}-{qformat}"
    command = [sys.executable, str(SCRIPTS / "quantize.py"), "--model", model, "--qformat", qformat]
    command += ["--output", str(output), *sizes]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    kept = ("bytes_before", "bytes_after", "perplexity_before", "perplexity_after", "quantize_s", "peak_bytes")
    rise = 100 * (report["perplexity_after"] / report["perplexity_before"] - 1)
    allowed = next(most for name, most in MOST.items() if qformat.startswith(name))
    return {
        "copy": copy, "qformat": qformat, **{key: report[key] for key in kept},
        "rise_percent": round(rise, 3), "allowed_percent": allowed, "date": datetime.now(UTC).date().isoformat(),
        "commit": common.commit(), "sizes": " ".join(sizes),
    }  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row of the table."""
    return [
        row["copy"],
        row["qformat"],
        f"{row['bytes_after'] / 1e6:.1f}",
        f"{row['bytes_after'] / row['bytes_before']:.2f}",
        f"{row['perplexity_after']:.3f}",
        f"{row['rise_percent']:+.2f} %",
        f"{row['allowed_percent']:.0f} %",
        f"{row['quantize_s']:.0f}",
        f"{row['peak_bytes'] / 1e6:.0f}",
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Size against perplexity, one mark for each format, one panel for each copy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    copies = list(dict.fromkeys(row["copy"] for row in rows))
    figure, panels = pyplot.subplots(1, len(copies), figsize=(5.2 * len(copies), 4.2), squeeze=False, sharey=True)
    for panel, copy in zip(panels[0], copies, strict=True):
        for row in (row for row in rows if row["copy"] == copy):
            place = row["bytes_after"] / 1e6, row["perplexity_after"]
            panel.plot(*place, "o", color="#76b900")
            panel.annotate(row["qformat"], place, xytext=(5, 4), textcoords="offset points", fontsize=8)
        before = next(row for row in rows if row["copy"] == copy)
        panel.axhline(before["perplexity_before"], color="#999999", linestyle="--", linewidth=1, label="not quantized")
        panel.set_xlabel(f"MB of weights (not quantized: {before['bytes_before'] / 1e6:.0f})")
        panel.set_title(copy)
        panel.legend(loc="upper right", fontsize=8)
    panels[0][0].set_ylabel("perplexity")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
