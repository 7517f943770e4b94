"""The memory plan, made from headers alone, against what loading takes; its arithmetic for ranks against numbers worked
out by hand; what ``scripts/plan_memory.py`` prints and refuses.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plan_memory as script
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from backend_engine import LLM, KvCacheConfig
from backend_engine.checkpoint.tensor_reader import TensorReader
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_config import EngineConfig
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.config.resolve import DeviceInfo, resolve
from backend_engine.errors import ConfigError
from backend_engine.executor.memory_report import MemoryUse, report_memory
from backend_engine.kv_cache.cache_plan import Stage, plan_cache
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.logger import get_logger
from backend_engine.model_engine.memory_plan import MemoryPlan
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.model_engine.model_loader import describe_model, load_model, plan_memory
from backend_engine.model_engine.step_memory import estimate_step
from backend_engine.model_engine.weight_memory import weight_bytes
from tests.checkpoints import test_packed_loading as float8
from tests.quantization import test_exported_models as exports
from tests.support import megatron_writer
from tests.support.tiny_gguf import build_tiny, packed_as, write_gguf
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import TINY_MODELS, build_tiny_model

DTYPES = ("float32", "bfloat16")


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called: from then on no reader gives a tensor."""

    def refuse(self: TensorReader, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    def subclasses(parent: type) -> Iterator[type]:
        for child in parent.__subclasses__():
            yield child
            yield from subclasses(child)

    def seal() -> None:
        found = [reader for reader in subclasses(TensorReader) if "read" in vars(reader)]
        assert found, "no reader is known"
        for reader in found:
            monkeypatch.setattr(reader, "read", refuse)

    yield seal


def planned(path: Path, dtype: str = "float32", **options: Any) -> MemoryPlan:
    plan = plan_memory(path, dtype, "cpu", **options)
    assert plan is not None
    return plan


def agree(path: Path, unreadable: Callable[[], None], **options: Any) -> None:
    """Plan and loaded model take the same bytes, in both dtypes; the plan reads nothing."""
    taken = {dtype: weight_bytes(load_model(path, dtype, "cpu", **options).model) for dtype in DTYPES}
    unreadable()
    assert {dtype: planned(path, dtype, **options).num_bytes for dtype in DTYPES} == taken


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_takes_what_is_planned(name: str, unreadable: Callable[[], None], tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    agree(tmp_path, unreadable)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("left", ["nothing", "k_proj"])
def test_packed_weights_take_what_is_planned(
    tied: bool, left: str, unreadable: Callable[[], None], tmp_path: Path
) -> None:
    float8.export(tmp_path, lambda name: left in name, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)  # as AutoGPTQ writes them
    save_file(tensors, tmp_path / "model.safetensors")
    agree(tmp_path, unreadable)


@pytest.mark.parametrize(
    ("pack", "config"),
    [
        pytest.param(exports.pack_float8, exports.FP8_STATIC, id="fp8 with scales of inputs"),
        pytest.param(exports.pack_nvfp4, exports.modelopt("NVFP4"), id="nvfp4"),
        pytest.param(exports.pack_awq, exports.modelopt("W4A16_AWQ"), id="awq with factors"),
    ],
)
def test_packed_exports_take_what_is_planned(
    pack: Any, config: dict[str, Any], unreadable: Callable[[], None], tmp_path: Path
) -> None:
    exports.export(tmp_path, build_tiny_llama(tmp_path), pack, config)
    agree(tmp_path, unreadable)


def test_compressed_keys_that_are_packed_are_planned_as_they_are_kept(
    unreadable: Callable[[], None], tmp_path: Path
) -> None:
    config = {**exports.FP8_BLOCKS, "modules_to_not_convert": ["lm_head", "mlp.gate", "experts"]}
    exports.export(tmp_path, build_tiny_model("deepseek_v3", tmp_path), exports.pack_float8_blocks, config)
    agree(tmp_path, unreadable)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "deepseek_v2"])
@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_takes_what_is_planned(name: str, kind: Type, unreadable: Callable[[], None], tmp_path: Path) -> None:
    build_tiny(name, tmp_path / "hf")
    path = write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", packed_as(kind))
    agree(path, unreadable)


def test_megatron_and_nemo_take_what_is_planned(unreadable: Callable[[], None], tmp_path: Path) -> None:
    model = build_tiny_model("llama", tmp_path / "hf")
    paths = [
        megatron_writer.save_megatron(tmp_path / "megatron", model, 2, 2),
        megatron_writer.pack(tmp_path / "tiny.nemo", megatron_writer.nemo1_files(model)),
    ]
    taken = [weight_bytes(load_model(path, "float32", "cpu").model) for path in paths]
    unreadable()
    assert [planned(path).num_bytes for path in paths] == taken


@pytest.mark.parametrize("tied", [True, False])
def test_models_of_transformers_take_what_is_planned_within_three_percent(
    tied: bool, unreadable: Callable[[], None], tmp_path: Path
) -> None:
    build_tiny_llama(tmp_path, tie_word_embeddings=tied)
    loaded = [load_model(tmp_path, dtype, "cpu", model_backend="transformers").model for dtype in DTYPES]
    unreadable()
    for dtype, model in zip(DTYPES, loaded, strict=True):
        plan = planned(tmp_path, dtype, model_backend="transformers")
        assert plan.num_bytes == pytest.approx(weight_bytes(model), rel=0.03)
        assert plan.cache_specs is None


def resolved(path: Path, kv_dtype: str, device: str = "cpu", **values: Any) -> EngineConfig:
    args = EngineArgs(str(path), device=device, kv_cache_config=KvCacheConfig(dtype=kv_dtype), **values)
    return resolve(args, describe_model(path), DeviceInfo(device == "cuda", 1)).config


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v2", "mamba2", "granite_hybrid"])
def test_the_cache_takes_what_is_planned_in_every_format(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    specs = planned(tmp_path).cache_specs
    assert specs is not None
    for kv_dtype in KV_FORMATS:
        config = resolved(tmp_path, kv_dtype, max_batch_size=2, max_seq_len=100)
        plan = plan_cache(config, [Stage(specs, 0)], 2**30)
        assert plan.num_blocks == 2 * -(-100 // config.tokens_per_block)
        pool = KVPool(specs, plan.num_blocks, config.tokens_per_block, KV_DTYPES[kv_dtype], torch.device("cpu"))
        assert plan.num_bytes == pool.num_bytes
        assert plan.block_bytes == plan.token_bytes * config.tokens_per_block + plan.state_bytes


def test_what_fits_follows_the_engines_rules(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path)
    specs = planned(tmp_path).cache_specs
    assert specs is not None
    config = resolved(tmp_path, "float32", max_batch_size=3, max_seq_len=100)  # blocks of 32 tokens, 16384 bytes each
    assert config.tokens_per_block == 32
    for memory, blocks, fitting in ((4 * 16384 * 100, 12, 100), (4 * 16384 * 9 + 5, 9, 9), (16384, 0, 0)):
        plan = plan_cache(config, [Stage(specs, 10**9)], memory)  # a quarter of the process, whatever the weights
        assert (plan.block_bytes, plan.num_blocks, plan.blocks_that_fit) == (16384, blocks, fitting)
    assert plan.num_requests(9) == 2
    on_gpu = resolved(tmp_path, "float32", "cuda", max_batch_size=3, max_seq_len=100)
    plan = plan_cache(on_gpu, [Stage(specs, 1000), Stage(specs, 10**5)], 10**5 + 16384 * 10)
    assert (plan.num_blocks, plan.blocks_that_fit) == (9, 9), "0.9 of what the fullest device has left"
    assert plan_cache(on_gpu, [Stage(specs, 10**6)], 10**5).num_blocks == 0


# Llama of width 64, 2 layers, 4 heads of 16, 2 of keys and values, inner width 112, 96 tokens; numbers of a layer: q, k
# and v, o, gate and up, down, two norms. 8 frequencies in float32.
RANKS = {
    1: 64 * (64 + 32 + 32) + 64 * 64 + 64 * 224 + 64 * 112 + 128,
    2: 64 * (32 + 16 + 16) + 64 * 32 + 64 * 112 + 64 * 56 + 128,
    4: 64 * (16 + 16 + 16) + 64 * 16 + 64 * 56 + 64 * 28 + 128,  # a head of keys is on two ranks
}


@pytest.mark.parametrize(("tp", "kv_bytes"), [(1, 256), (2, 128), (4, 128)])
def test_ranks_of_a_llama(tp: int, kv_bytes: int, tmp_path: Path) -> None:
    build_tiny_llama(tmp_path)
    plan = planned(tmp_path, "bfloat16", tp=tp)
    table, norm, frequencies = 64 * 96 // tp, 64, 8 * 4
    assert plan.num_bytes == 2 * (2 * RANKS[1] + 2 * 64 * 96 + norm) + frequencies
    assert plan.stage_bytes(1) == [2 * (2 * RANKS[tp] + 2 * table + norm) + frequencies]
    assert plan.stage_bytes(2) == [
        2 * (RANKS[tp] + table) + frequencies,
        2 * (RANKS[tp] + norm + table) + frequencies,
    ]
    assert plan.cache_specs is not None
    assert sum(spec.bytes_per_block(1, 2) for spec in plan.cache_specs) == kv_bytes


def test_a_tied_head_is_on_the_last_stage_too(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=3)
    build_tiny_llama(tmp_path / "untied", num_hidden_layers=3)
    for dtype in DTYPES:
        tied, untied = (planned(tmp_path / name, dtype) for name in ("tied", "untied"))
        assert tied.stage_bytes(2) == untied.stage_bytes(2)
    assert [len(layers) for layers in tied.stages(2)] == [2, 1]
    assert tied.num_bytes == untied.num_bytes - 2 * 64 * 96


def test_ranks_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """Mixtral of width 64, 2 layers, 4 heads of 24, 2 of keys and values, 8 experts of inner width 112."""
    build_tiny_model("mixtral", tmp_path)
    for tp, kv_heads, experts in ((2, 1, 4), (4, 1, 2)):
        attention = 64 * 24 * (4 // tp + 2 * kv_heads) + 64 * 24 * 4 // tp
        layer = (
            2 * (attention + experts * 3 * 64 * 112 + 2 * 64) + 4 * 16 * 64
        )  # the router: float32, on every rank, padded
        assert planned(tmp_path, "bfloat16", tp=tp).stage_bytes(1) == [
            2 * layer + 2 * (2 * 64 * 96 // tp + 64) + 12 * 4
        ]


def test_experts_that_cannot_be_divided_evenly(tmp_path: Path) -> None:
    build_tiny_model("mixtral_windowed", tmp_path)
    experts = [w for w in planned(tmp_path, "bfloat16", tp=2).weights if ".experts." in w.name]
    assert sum(w.rank_bytes for w in experts) * 5 == sum(w.num_bytes for w in experts) * 3


def test_ranks_of_packed_weights(tmp_path: Path) -> None:
    """Codes of one byte and float32 scales of 16 columns, as this export keeps them."""
    float8.export(tmp_path)
    whole, rank = 0, 0
    for weight in planned(tmp_path, "bfloat16", tp=2).weights:
        if "_proj" in weight.name:
            whole, rank = whole + weight.num_bytes, rank + weight.rank_bytes
    numbers = 2 * (RANKS[1] - 128)
    assert (whole, rank) == (numbers + numbers // 16 * 4, (numbers + numbers // 16 * 4) // 2)


def test_recurrent_states_are_divided_by_heads(tmp_path: Path) -> None:
    """8 heads of 16 with states of 12, 2 groups, a convolution over 4 tokens, 2 layers."""
    build_tiny_model("mamba2", tmp_path)
    specs = [planned(tmp_path, tp=tp).cache_specs for tp in (1, 2, 4)]
    states = [sum(spec.bytes_per_block(1, 1) for spec in found or ()) for found in specs]
    # With 4 ranks each of the two groups is on two.
    assert states == [2 * 4 * (3 * (128 // tp + 2 * groups * 12) + 8 // tp * 16 * 12)
                      for tp, groups in ((1, 2), (2, 1), (4, 1))]  # fmt: skip


def test_the_estimate_of_a_step_is_the_stated_formula(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path)
    spec = planned(tmp_path).spec
    assert spec is not None
    step = estimate_step(spec, 96, EngineLimits(3, 10, 200), cached_tokens=500, element_bytes=2)
    assert step.stream == 3 * 10 * 64 * 2
    assert step.mixer == (10 * (3 * 64 + 3 * 32) + 500 * 2 * 32 + 10 * 200) * 2
    assert step.mlp == 10 * 3 * 112 * 2
    assert step.logits == 3 * 96 * 4
    assert step.total == step.stream + step.mixer + step.logits


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Level and text of the lines about memory."""
    logger = get_logger("backend_engine")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    yield lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("memory: ")]
    logger.removeHandler(caplog.handler)


def test_the_engine_logs_at_start_what_was_planned_and_what_was_taken(
    logged: Callable[[], list[tuple[str, str]]], tmp_path: Path
) -> None:
    build_tiny_llama(tmp_path, tie_word_embeddings=True)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_batch_size=4) as llm:
        memory = llm.stats().memory
    weights = planned(tmp_path).num_bytes
    cache = 4 * 256 * 512  # tokens of 2 layers x K and V x 2 heads x 16 float32 numbers
    assert memory.cpu == weights + cache
    one, other = f"{weights / 1e6:.1f} MB", f"{cache / 1e6:.1f} MB"
    assert set(logged()) == {
        ("INFO", f"memory: weights {one} taken, {one} planned; KV cache {other} taken, {other} planned")
    }


def test_more_than_three_percent_apart_is_warned_of(logged: Callable[[], list[tuple[str, str]]]) -> None:
    report_memory(MemoryUse(1000, 1000), MemoryUse(1030, 970))
    report_memory(MemoryUse(), MemoryUse(5, 5))
    assert {level for level, _ in logged()} == {"INFO"}
    report_memory(MemoryUse(1000, 1000), MemoryUse(1031, 1000))
    report_memory(MemoryUse(1000, 1000), MemoryUse(1000, 969))
    warnings = {text for level, text in logged() if level == "WARNING"}
    assert warnings == {
        "memory: the weights took 1031 bytes, 1000 were planned: +3.1 %, more than 3 % apart",
        "memory: the KV cache took 969 bytes, 1000 were planned: -3.1 %, more than 3 % apart",
    }


def test_the_script_prints_a_table_and_one_json_line(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path, tie_word_embeddings=True)
    arguments = ["--device", "cpu", "--device-memory", "4MiB", "--max-batch-size", "2", "--max-num-tokens", "16"]
    command = [sys.executable, "scripts/plan_memory.py", "--model", str(tmp_path), *arguments]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    result = json.loads(lines[-1])
    assert result["weight_bytes"] == planned(tmp_path).num_bytes == result["rank_weight_bytes"][0]
    assert result["device_memory_bytes"] == 4 * 2**20
    rows = {row["dtype"]: row for row in result["kv_cache"]}
    assert rows.keys() == KV_FORMATS.keys()
    assert {name: row["bytes_per_token"] for name, row in rows.items()} == {
        "float32": 512, "bfloat16": 256, "float16": 256, "fp8": 128, "fp8_e5m2": 128, "int8": 128 + 2 * 2 * 2 * 4
    }  # fmt: skip
    assert (rows["float32"]["tokens"], rows["float32"]["requests"]) == (512, 2)
    assert (rows["float32"]["tokens_that_fit"], rows["float32"]["requests_that_fit"]) == (2048, 8)
    assert [row["kv_cache_dtype"] for row in result["step_estimate"]] == list(rows)
    table = next(line for line in lines if line.startswith("float32 (chosen)"))
    assert table.split()[2:4] == ["512", "32"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = script.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = int(str(end.code))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_script_tells_what_ranks_hold_and_that_it_is_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_llama(tmp_path)
    arguments = ["--device", "cuda", "--device-memory", "1GB", "--kv-cache-dtype", "bfloat16", "int8"]
    code, out, err = run(capsys, "--model", tmp_path, "--dtype", "bfloat16", "--tp", 2, "--pp", 2, *arguments)
    assert (code, err) == (0, "")
    assert "--tp 2 --pp 2 is a plan: the engine runs on one device today" in out
    result = json.loads(out.splitlines()[-1])
    assert result["rank_weight_bytes"] == planned(tmp_path, "bfloat16", tp=2).stage_bytes(2)
    assert [row["dtype"] for row in result["kv_cache"]] == ["bfloat16", "int8"]
    assert [row["bytes_per_token"] for row in result["kv_cache"]] == [64, 40]


def test_the_script_says_what_only_loading_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tiny_llama(tmp_path / "plain")
    code, out, _ = run(capsys, "--model", tmp_path / "plain", "--model-backend", "transformers", "--device", "cpu")
    assert code == 0 and "not known before the model is loaded (model_backend transformers)" in out
    assert json.loads(out.splitlines()[-1])["kv_cache"] is None
    float8.export(tmp_path / "packed")
    code, out, err = run(capsys, "--model", tmp_path / "packed", "--model-backend", "transformers")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "decodes packed weights while it loads them" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "tp 3 does not divide the heads of the model; use 1, 2, 4"),
        (["--tp", "0"], "argument --tp: '0' is not allowed; use a whole number of 1 or more"),
        (["--pp", "3"], "pp 3 is more than the model can be divided into; use 1 to 2"),
        (["--pp", "2", "--model-backend", "transformers"], "pp 2 is more than the model can be divided into; use 1"),
        (["--tp", "2", "--model-backend", "transformers"], "tp 2 is not allowed with model_backend transformers, "),
        (["--dtype", "int3"], "dtype 'int3' is not allowed; use auto, float32, bfloat16, float16"),
        (["--kv-cache-dtype", "int8", "fp9"], "kv_cache_dtype 'fp9' is not allowed; use auto, float32, bfloat16, "),
        (["--device", "tpu"], "device 'tpu' is not allowed; use auto, cpu, cuda"),
        (["--device-memory", "lots"], "--device-memory 'lots' is not allowed; use a number of bytes like 16GiB, "),
        (["--device-memory", "0GB"], "--device-memory '0GB' is not allowed; use a number of bytes like 16GiB, "),
        (["--device-memory", "-4GB"], "argument --device-memory: expected one argument"),
        (["--max-batch-size", "x"], "argument --max-batch-size: 'x' is not allowed; use a whole number of 1 or more"),
        (["--max-seq-len", "999"], "max_seq_len 999 is more than the checkpoint's max_position_embeddings 256"),
        (["--max-num-tokens", "8"], "max_num_tokens 8 must not be less than max_batch_size 32"),
        (["--free-gpu-memory-fraction", "1.5"], "argument --free-gpu-memory-fraction: '1.5' is not allowed; use a "),
        (["--model-backend", "zip"], "model_backend 'zip' is not allowed; use auto, native, transformers"),
        (["--gpus", "2"], "unrecognized arguments: --gpus 2"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_llama(tmp_path)
    code, out, err = run(capsys, "--model", tmp_path, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"plan_memory: {message}") and err.count("\n") == 1


def test_a_folder_that_would_not_load_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    code, out, err = run(capsys, "--model", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1) and "does not hold tensor model.norm.weight" in err
    with pytest.raises(ConfigError, match="tp 3 does not divide"):
        build_tiny_llama(tmp_path)
        plan_memory(tmp_path, "float32", "cpu", tp=3)
