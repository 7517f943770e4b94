"""Quantization configs with every key of a wrong value, and packed tensors that are not what they say."""

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.quantization.formats import name_expression
from backend_engine.quantization.formats.bitsandbytes import NF4
from backend_engine.quantization.formats.module_patterns import ModulePatterns
from backend_engine.quantization.formats.name_expression import MAX_CHARS, NameExpression
from backend_engine.quantization.read_config import read_quantization
from backend_engine.quantization.weight_format import StoredTensors
from tests.support.hostile import load_or_refuse
from tests.support.tiny_llama import TINY, build_tiny_llama

pytestmark = pytest.mark.timeout(120)
Tensors = dict[str, torch.Tensor]
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True, "dynamic": False,
           "actorder": None, "block_structure": None, "observer": "minmax", "scale_dtype": None}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"],
            "ignored_layers": [], "fmt": "e4m3", "scale_fmt": "float"},
    "fbgemm_fp8": {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "gptq": {"bits": 4, "group_size": 16, "desc_act": True, "sym": True, "checkpoint_format": "gptq",
             "dynamic": {"-:x": {}, "+:y": {"bits": 8}}, "lm_head": False, "pack_dtype": "int32"},
    "awq": {"bits": 4, "group_size": 16, "zero_point": True, "version": "gemm", "backend": "autoawq"},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
                     "bnb_4bit_compute_dtype": "float32"},
    "modelopt": {"quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"], "exclude_modules": [],
                 "kv_cache_quant_algo": "FP8", "kv_cache_scheme": None, "quantization": None, "quantized_layers": None},
    "mxfp4": {"modules_to_not_convert": ["lm_head"]},
    "compressed-tensors": {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
                           "kv_cache_scheme": None, "sparsity_config": None, "transform_config": {}, "config_groups":
                           {"group_0": {"targets": ["Linear"], "format": None, "weights": WEIGHTS,
                                        "input_activations": None, "output_activations": None}}},
}  # fmt: skip
ENDLESS = ["(a+)+$", "(a|a)*$", "(.*)*$", "((a*)*)*b", "(?:a?){30}a{30}", ".*.*.*.*.*.*.*.*.*x", "(?=(a+)+$)(a+)+$",
           "(?!.*(a|a)*$).*b"]  # fmt: skip
NEVER = [
    "(",
    "[",
    "(a)\\1",
    "a{99999999999}",
    "(" * 500,
    "(?:a{500}){500}",
    "a" * (MAX_CHARS + 1),
    "(?P<a>.)(?(a)b|c)*",
]
VALUES: list[Any] = [
    None, 0, 1, -1, -16, 2**31, 10**30, 10**400, 1.5, float("nan"), float("inf"), True, False, "", "4", "x" * 5000,
    "a\nb",
    "\ud800", [], [0, 0], [-1, 16], [16, 16, 16], [10**30, 1], [1.5, True], [["a"]], ["*a" * 40], {}, {"a": 1},
    {"a": {"b": []}}, {"bits": "4"}, {"a\nb": {}}, json.loads("[" * 150 + "]" * 150),
    *(["re:" + text] for text in ENDLESS),
    *(["re:" + text] for text in NEVER), *({"-:" + text: {}} for text in ENDLESS),
    *({"+:" + text: {}} for text in NEVER),
]  # fmt: skip


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype)


def leaves(method: str, rows: int, columns: int) -> Tensors:
    """A weight as the method stores it, of random codes."""
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [rows, columns]}).encode()
    made: dict[str, Tensors] = {
        "fp8": {".weight_scale_inv": torch.rand(rows // 16, columns // 16)},
        "fbgemm_fp8": {".weight_scale": torch.rand(rows, 1)},
        "gptq": {".qweight": integers(columns // 8, rows), ".qzeros": integers(columns // 16, rows // 8),
                 ".scales": torch.rand(columns // 16, rows).half(), ".g_idx": torch.arange(columns).int() // 16},
        "awq": {".qweight": integers(columns, rows // 8), ".qzeros": integers(columns // 16, rows // 8),
                ".scales": torch.rand(columns // 16, rows).half()},
        "bitsandbytes": {".weight": integers(rows * columns // 2, 1, dtype=torch.uint8),
                         ".weight.absmax": torch.rand(rows * columns // 64), ".weight.quant_map": torch.tensor(NF4),
                         ".weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state),
                                                                                   dtype=torch.uint8)},
        "modelopt": {".weight": integers(rows, columns // 2, dtype=torch.uint8), ".weight_scale_2": torch.tensor(0.1),
                     ".weight_scale": torch.rand(rows, columns // 16).to(torch.float8_e4m3fn)},
        "compressed-tensors": {".weight_packed": integers(rows, columns // 8), ".weight_scale":
                               torch.rand(rows, columns // 16), ".weight_shape": torch.tensor([rows, columns])},
    }  # fmt: skip
    return (
        {".weight": torch.randn(rows, columns).to(torch.float8_e4m3fn), **made[method]}
        if "fp8" in method
        else made[method]
    )


METHODS = [method for method in CONFIGS if method != "mxfp4"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    """A tiny Llama by method."""
    folder = tmp_path_factory.mktemp("plain")
    build_tiny_llama(folder)
    found = {}
    for method in METHODS:
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            module, plain = name.removesuffix(".weight"), tensors.pop(name)
            tensors.update({module + ending: leaf for ending, leaf in leaves(method, *plain.shape).items()})
        found[method] = tensors
    return found


def write(folder: Path, method: str, tensors: Tensors) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        **TINY,
        "quantization_config": {"quant_method": method, **CONFIGS[method]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_damaged_here_is_whole(method: str, exported: dict[str, Tensors], tmp_path: Path) -> None:
    write(tmp_path, method, exported[method])
    assert load_or_refuse(tmp_path) is None


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something may be put in place of what is there."""
    if at:
        yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def put(config: Mapping[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(dict(config))
    inner: Any = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return changed


@pytest.mark.parametrize("method", CONFIGS)
def test_every_key_of_every_wrong_value(method: str) -> None:
    """Read, and asked for the modules that a Llama has, and for one that patterns take long for."""
    stored = StoredTensors({}, "here")
    num_refused = 0
    for at in places(CONFIGS[method]):
        for value in VALUES:
            config = {"quantization_config": {"quant_method": method, **put(CONFIGS[method], at, value)}}
            try:
                quantization = read_quantization(config, stored)
                for module in ("model.layers.0.mlp.up_proj", "a" * 200 + "b", "lm_head"):
                    quantization.format_of(module)
            except ModelLoadError as error:
                num_refused += 1
                assert str(error).isprintable() and len(str(error)) < 2000, error
    assert num_refused > 20


@pytest.mark.parametrize("text", ENDLESS)
def test_expressions_that_take_for_ever_are_matched(text: str) -> None:
    expression = NameExpression(text)
    assert expression.match("a" * 60) == (text != "((a*)*)*b" and not text.endswith(("x", "b")))
    assert expression.match("a" * 60 + "c") == (text in ("(.*)*$", "(?:a?){30}a{30}"))


def test_states_match_what_python_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_expression, "_MAX_WAYS", 0)
    picker = random.Random(0)
    num_matched = num_compared = 0
    for _ in range(400):
        text = "".join(
            picker.choice(PIECES) + picker.choice(("", "", "*", "?", "+", "*?", "{2}"))
            for _ in range(picker.choice((1, 2, 3)))
        )
        try:
            expression, reference = NameExpression(text), re.compile(text)
        except ValueError:
            continue
        for _ in range(10):
            name = "".join(picker.choices("ab.1A", k=picker.randrange(8)))
            assert expression.match(name) == (reference.match(name) is not None), (text, name)
            num_matched += expression.match(name)
            num_compared += 1
    assert 300 < num_matched < num_compared - 300


@pytest.mark.parametrize("text", NEVER)
def test_expressions_that_cannot_be_matched_are_refused(text: str) -> None:
    with pytest.raises(ModelLoadError, match="ignore is "):
        ModulePatterns.read(HfConfig({"ignore": ["re:" + text]}), "ignore")


PIECES = ("a", "b", ".", "[ab]", "[^a]", "\\.", "\\d", "\\w", "(a|b.)", "(?:ab|a)", "(a*)", "^", "$", "(?i:A)",
          "a{1,2}", "(ab){0,2}", "(?!a)", "(?=.*b)", "(?<!a)", "(?<=ab)", "(?!.*a$)", "(?!a|.b)")  # fmt: skip
CHANGES = ("absent", "dtype", "shape", "nan", "inf", "negative", "large", "zero", "beside", "state")
DTYPES = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)  # fmt: skip
BESIDE = (".bias", ".weight", ".weight_g_idx", ".weight_zero_point", ".input_scale", ".pre_quant_scale", ".SCB",
          ".k_scale", ".scales", ".weight_scale_inv")  # fmt: skip
STATES = (b"{}", b"[" * 5000, b"\xff", b'{"quant_type": "nf4", "shape": [64, 64], "blocksize": 1e400}', b"1" * 70000)


def damage(tensors: Tensors, change: str, picker: random.Random) -> None:
    """Change one tensor of a packed weight."""
    name = picker.choice([name for name in tensors if "_proj" in name])
    tensor = tensors[name]
    if change == "absent":
        del tensors[name]
    elif change == "dtype":
        tensors[name] = tensor.to(torch.float32).to(picker.choice(DTYPES))
    elif change == "shape":
        tensors[name] = picker.choice(
            (tensor.flatten(), tensor.flatten()[:0], tensor.unsqueeze(0), tensor.flatten()[0])
        )
    elif change in ("nan", "inf", "negative", "large", "zero"):
        value = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0, "large": 100.0, "zero": 0.0}[change]
        numbers = tensor.to(torch.float32).flatten()
        numbers[picker.randrange(len(numbers)) :] = value
        floats = numbers if tensor.is_floating_point() else numbers.nan_to_num(0, 0)
        tensors[name] = floats.to(tensor.dtype).view(tensor.shape)
    elif change == "beside":
        others = (
            torch.zeros(8),
            torch.zeros(64).to(torch.float8_e4m3fn),
            torch.tensor(float("nan")),
            torch.full((64,), -1),
        )
        tensors[name.partition("_proj")[0] + "_proj" + picker.choice(BESIDE)] = picker.choice(others)
    else:
        for state in [state for state in tensors if "quant_state" in state][:1]:
            tensors[state] = torch.frombuffer(bytearray(picker.choice(STATES)), dtype=torch.uint8)


@pytest.mark.parametrize("method", METHODS)
def test_packed_tensors_that_are_not_what_they_say(method: str, exported: dict[str, Tensors], tmp_path: Path) -> None:
    picker = random.Random(method)
    num_refused = 0
    for change in CHANGES * 2:
        tensors = dict(exported[method])
        damage(tensors, change, picker)
        write(tmp_path, method, tensors)
        num_refused += load_or_refuse(tmp_path) is not None
    assert num_refused > 4
