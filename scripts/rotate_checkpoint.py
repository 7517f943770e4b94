#!/usr/bin/env python3
"""Write a copy of a Llama-like model whose residual stream is rotated: other weights, the same function.

    python scripts/rotate_checkpoint.py --model FOLDER --output FOLDER [--seed 0]

What reads or writes the residual stream is multiplied by one random orthogonal matrix, after the weights of the norms
were folded into the products behind them (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456). What it is for: a
model that came out of a 4-bit file lies on a 4-bit grid already, so quantizers to 4 bits look lossless with it; with
its rotated copy none does. Tensors keep their dtype: a copy in float32 has the same logits, one in bfloat16 nearly.
Tied embeddings become two tensors.
"""

import argparse
import enum
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import bench_common  # noqa: F401 (puts the root on the path)
import torch
from torch import Tensor
from tqdm import tqdm

from backend_engine.builder.new_folder import new_folder
from backend_engine.builder.weight_files import WeightFiles
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import CONFIG_FILE, SAFETENSORS, architecture, open_hf_folder
from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.core.tensor_info import TensorInfo
from backend_engine.errors import EngineError, ModelLoadError, shown

# RMS norms without an offset, each in front of a sublayer, and Llama's names.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
IN_LAYER = re.compile(r"(model\.layers\.\d+\.)([a-z_.]+)\.([a-z_]+)")
# What reads the residual stream, with the norm in front of it, and what adds to the stream.
NORM_OF_READER = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
DTYPES = ("F16", "BF16", "F32", "F64")
COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")


class Role(enum.Enum):
    """What a tensor has to do with the residual stream: its columns read it, its rows add to it, it is the weight of a
    norm of it, or nothing.
    """

    READS = enum.auto()
    WRITES = enum.auto()
    NORM = enum.auto()
    APART = enum.auto()


def role_of(name: str) -> tuple[Role, str | None]:
    """The role of a tensor, and the weight of the norm that it reads the stream through. Raises ``ModelLoadError``."""
    if name in (EMBEDDING, HEAD):  # the embedding adds its rows, each of which lies like one that is read
        return Role.READS, FINAL_NORM if name == HEAD else None
    if name == FINAL_NORM:
        return Role.NORM, None
    found = IN_LAYER.fullmatch(name)
    layer, module, kind = found.groups() if found else ("", "", "")
    if module in NORM_OF_READER and kind == "weight":
        return Role.READS, f"{layer}{NORM_OF_READER[module]}.weight"
    if module in WRITERS and kind in ("weight", "bias"):
        return Role.WRITES, None
    if module in NORM_OF_READER.values() and kind == "weight":
        return Role.NORM, None
    if (module in NORM_OF_READER and kind == "bias") or kind == "inv_freq":  # angles, which older exports hold
        return Role.APART, None
    raise ModelLoadError(f"the model holds {shown(name)}, which is no tensor of {', '.join(ARCHITECTURES)}")


class Rotation:
    """One orthogonal matrix, and what it makes of each tensor. ``read``: a tensor of the model by its name."""

    def __init__(self, read: Callable[[str], Tensor], hidden_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        gaussian = torch.randn(hidden_size, hidden_size, generator=generator, dtype=torch.float64)
        orthogonal, triangular = torch.linalg.qr(gaussian)
        self._read = read
        # With these signs every rotation is as likely as any other.
        self._matrix: Tensor = orthogonal * triangular.diagonal().sign()

    def copy_of(self, name: str, source: str) -> Tensor:
        """Tensor ``name`` of the copy, in the dtype of ``source``, the tensor it is made from."""
        original = self._read(source)
        value = original.double()
        match role_of(name):
            case Role.READS, norm:
                value = (value if norm is None else value * self._read(norm).double()) @ self._matrix
            case Role.WRITES, _:
                value = self._matrix.T @ value
            case Role.NORM, _:
                value = torch.ones_like(value)
        value = value.to(original.dtype).contiguous()
        if not value.isfinite().all():
            raise ModelLoadError(f"{name} of the copy would hold NaN or infinity as {original.dtype}")
        return value


def open_rotatable(model: Path) -> tuple[Checkpoint, list[TensorReader]]:
    """The model and its files, if we know how to rotate it. Raises ``ModelLoadError``."""
    checkpoint = open_hf_folder(model)
    name = architecture(checkpoint.config)
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{model / CONFIG_FILE}: architectures is {shown(name)}; expected {', '.join(ARCHITECTURES)}"
        )
    if checkpoint.config.get("quantization_config") is not None:
        raise ModelLoadError(f"{model} is quantized; expected plain weights")
    size = checkpoint.config.get("hidden_size")
    if type(size) is not int or size < 1:
        raise ModelLoadError(f"{model / CONFIG_FILE}: hidden_size is {shown(size)}; expected an integer above 0")
    readers = checkpoint.open_tensors()
    for reader in readers:
        if reader.path.suffix != ".safetensors":
            raise ModelLoadError(f"{reader.path} is no safetensors file; expected {SAFETENSORS.single}")
    return checkpoint, readers


def sources_of(by_name: Mapping[str, TensorReader], is_tied: bool) -> dict[str, str]:
    """The tensors of the copy, each with the tensor of the model that it is made from."""
    sources = {name: name for name in by_name}
    if is_tied and EMBEDDING in sources:
        sources[HEAD] = EMBEDDING  # whatever is stored for it
    return sources


def rotate(model: Path, output: Path, seed: int) -> None:
    """Write the rotated copy of ``model``. Raises ``EngineError`` (one line); then nothing is left of it."""
    checkpoint, readers = open_rotatable(model)
    by_name = {name: reader for reader in readers for name in sorted(reader.names())}

    def read(name: str) -> Tensor:
        return by_name[name].read(name)

    sources = sources_of(by_name, bool(checkpoint.config.get("tie_word_embeddings")))
    described = {name: by_name[source].describe(source) for name, source in sources.items()}
    check_tensors(described, checkpoint.config["hidden_size"], model)
    num_bytes = sum(info.num_bytes for info in described.values())
    rotation = Rotation(read, checkpoint.config["hidden_size"], seed)
    with new_folder(output, num_bytes) as folder:
        copy_other_files(model, folder)
        config = {**checkpoint.config, "tie_word_embeddings": False}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files = WeightFiles(folder)
        for name, source in tqdm(sources.items(), "rotating", unit="tensor"):
            files.add(name, rotation.copy_of(name, source))
        files.close()


def check_tensors(described: Mapping[str, TensorInfo], hidden_size: int, model: Path) -> None:
    """Raise ``ModelLoadError`` for a tensor that is missing, unknown, or of a shape or dtype that it cannot be."""
    needed = {EMBEDDING, HEAD, FINAL_NORM, *(norm for name in described if (norm := role_of(name)[1]) is not None)}
    for name in sorted(needed - set(described)):
        raise ModelLoadError(f"{model} holds no {name}")
    for name, info in described.items():
        if info.dtype not in DTYPES:
            raise ModelLoadError(f"{name} is {info.dtype}; expected plain weights: {', '.join(DTYPES)}")
        role, _ = role_of(name)
        num_dims = 1 if role is Role.NORM or name.endswith(".bias") else 2
        size = info.shape[-1:] if role is Role.READS else info.shape[:1]
        if role is not Role.APART and (len(info.shape) != num_dims or size != (hidden_size,)):
            raise ModelLoadError(f"{name} has the shape {list(info.shape)}, but hidden_size is {hidden_size}")


def copy_other_files(model: Path, folder: Path) -> None:
    """The tokenizer, its chat template and the generation settings: all small files but config.json and indexes."""
    for path in sorted(model.iterdir()):
        is_ours = path.name == CONFIG_FILE or path.name.endswith(".index.json")
        if path.suffix in COPIED and not is_ours and not path.name.startswith(".") and path.is_file():
            shutil.copyfile(path, folder / path.name)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder with safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write, which must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="of the rotation (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        rotate(arguments.model, arguments.output, arguments.seed)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
