"""Megatron-LM's folders: the tensors and the configuration of the model that was written, and what is refused."""

import argparse
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from backend_engine.checkpoint import megatron_files
from backend_engine.checkpoint.megatron_checkpoint import looks_like_megatron, open_megatron
from backend_engine.errors import ModelLoadError
from tests.support import megatron_writer as writer
from tests.support.tiny_models import COMMON, scramble

SMALL: dict[str, Any] = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 90, "num_hidden_layers": 4}
GPT2: dict[str, Any] = {
    "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 160, "vocab_size": 90, "activation_function": "gelu_new",
}  # fmt: skip
NEOX: dict[str, Any] = {**SMALL, "use_parallel_residual": False, "rotary_pct": 0.5}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama_mha": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 4}),
    "llama_tied": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 4, "head_dim": 6, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {**SMALL, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", {**SMALL, "num_key_value_heads": 4, "head_dim": 12}),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_key_value_heads": 4, "num_local_experts": 3}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX),
}
SPLITS = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (1, 2, 2)]


def build(kind: str) -> Any:
    name, values = KINDS[kind]
    model_class = getattr(transformers, name)
    known = model_class.config_class().to_dict()
    torch.manual_seed(3)
    extra = ("rotary_pct", "tie_word_embeddings", "head_dim")
    model = model_class(model_class.config_class(**{k: v for k, v in values.items() if k in known or k in extra}))
    scramble(model)
    return model.eval()


def expected(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights, those of experts by the names of earlier releases of transformers."""
    result = {}
    for name, tensor in model.state_dict().items():
        if ".mlp.experts." in name:
            for e, expert in enumerate(tensor):
                where = f"{name.partition('.mlp.')[0]}.block_sparse_moe.experts.{e}."
                if "gate_up" in name:
                    result[where + "w1.weight"], result[where + "w3.weight"] = expert.chunk(2)
                else:
                    result[where + "w2.weight"] = expert
        else:
            result[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = tensor
    return result


def check(checkpoint: Any, model: Any) -> None:
    """The tensors are the model's, bit by bit, and so is the configuration."""
    (reader,) = checkpoint.open_tensors()
    wanted = expected(model)
    if model.config.tie_word_embeddings:
        wanted = {name: wanted[name] for name in wanted if name in reader.names() or "lm_head" not in name}
    assert set(reader.names()) == set(wanted)
    for name, tensor in wanted.items():
        found = reader.read(name)
        assert reader.describe(name).shape == tuple(tensor.shape), name
        assert torch.equal(found, tensor), name
        reader.release(found)
        assert torch.equal(reader.read(name), tensor), name
    config = type(model.config)(**checkpoint.config)
    ignored = {"architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version",
               "n_inner", "_name_or_path"}  # fmt: skip
    found_config, wanted_config = config.to_dict(), model.config.to_dict()
    assert checkpoint.config["architectures"] == [type(model).__name__]
    if "intermediate_size" in checkpoint.config and "n_inner" in wanted_config:
        ignored.add("intermediate_size")
    for key, value in wanted_config.items():
        if key not in ignored and not key.startswith("_") and value is not None:
            assert found_config.get(key) == value, key


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.mark.parametrize(("tp", "pp", "chunks"), SPLITS)
def test_ranks_and_stages_are_put_together(model: Any, tp: int, pp: int, chunks: int, tmp_path: Path) -> None:
    folder = writer.save_megatron(tmp_path, model, tp, pp, chunks)
    assert looks_like_megatron(folder)
    check(open_megatron(folder), model)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_the_spelling_before_megatron_core(model: Any, tp: int, pp: int, tmp_path: Path) -> None:
    if hasattr(model.config, "num_local_experts") or model.config.model_type == "qwen3":
        return
    check(open_megatron(writer.save_megatron(tmp_path, model, tp, pp, style=writer.early)), model)


def old_order(version: float, head_dim: int) -> Any:
    def style(state: dict[str, Any]) -> dict[str, Any]:
        turned = {}
        for name, tensor in state.items():
            if "linear_qkv" in name:
                rest = tensor.shape[1:]
                heads = tensor.reshape(-1, 3, head_dim, *rest)
                order = heads.transpose(0, 1) if version == 0 else heads.transpose(1, 2)
                tensor = order.reshape(-1, *rest).clone()
            turned[name] = tensor
        return writer.early(turned)

    return style


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["gpt2", "llama_mha"])
def test_orders_of_earlier_versions(kind: str, version: float, tmp_path: Path) -> None:
    model = build(kind)
    head_dim = writer.sizes(model).head_dim
    style = old_order(version, head_dim) if version < 2 else writer.early
    root = {"checkpoint_version": version}
    check(open_megatron(writer.save_megatron(tmp_path, model, 2, 1, style=style, **root)), model)


def test_a_distributed_checkpoint(model: Any, tmp_path: Path) -> None:
    iteration = tmp_path / "iter_0000042"
    of = writer.sizes(model)
    state = writer.stacked(writer.core_state(model), of.layers)
    writer.save_distributed(iteration, {**state, "optimizer.state.exp_avg": torch.ones(2), "rng_state": {"a": 1}})
    torch.save({"args": writer.arguments(model, 8, 4, expert_model_parallel_size=2)}, iteration / "common.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("42\n")
    check(open_megatron(tmp_path), model)


def test_unknown_vocabulary_keeps_the_padding(tmp_path: Path) -> None:
    model = build("llama_mha")
    args = writer.arguments(model, 1, 1, vocab_size=None)
    checkpoint = open_megatron(writer.save_megatron(tmp_path, model, args=args))
    (reader,) = checkpoint.open_tensors()
    assert checkpoint.config["vocab_size"] == 96
    assert torch.equal(reader.read("lm_head.weight")[:90], model.lm_head.weight)


@pytest.mark.parametrize("kind", ["llama_mha", "gpt2"])
def test_norms_stored_as_distance_from_one(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    args = writer.arguments(model, 1, 1, apply_layernorm_1p=True)

    def style(state: dict[str, Any]) -> dict[str, Any]:
        return writer.fused({k: (v - 1).half() if k.endswith("norm.weight") else v for k, v in state.items()})

    (reader,) = open_megatron(writer.save_megatron(tmp_path, model, style=style, args=args)).open_tensors()
    for name, tensor in model.state_dict().items():
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            assert torch.equal(reader.read(name), (tensor - 1).half().float() + 1), name
            assert reader.describe(name).dtype == "F32"


def test_llama3_and_linear_scaling(tmp_path: Path) -> None:
    model = build("llama")
    scaled = writer.arguments(model, 1, 1, use_rope_scaling=True, rope_scaling_factor=16.0)
    config = open_megatron(writer.save_megatron(tmp_path / "a", model, args=scaled)).config
    assert config["rope_parameters"] == {
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 10000.0,
    }  # fmt: skip
    stretched = writer.arguments(model, 1, 1, rotary_seq_len_interpolation_factor=4)
    config = open_megatron(writer.save_megatron(tmp_path / "b", model, args=stretched)).config
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


REFUSED = [
    ({"window_size": (127, 0)}, "window_size is (127, 0)"),
    ({"rotary_interleaved": True}, "rotary_interleaved is True"),
    ({"multi_latent_attention": True}, "multi_latent_attention is True"),
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
    ({"normalization": "L2Norm"}, "normalization is 'L2Norm'"),
    ({"num_query_groups": 3, "group_query_attention": True}, "num_query_groups is 3"),
    ({"rotary_percent": 0.25}, "0.25 of a head"),
    ({"swiglu": False}, "plain gelu"),
    ({"hidden_size": "32"}, "hidden_size is '32'"),
    ({"vocab_size": 4000}, "vocab_size is 4000"),
    ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size is 2, but there are folders for 1"),
    ({"kv_channels": 5}, "expected 80, for 8 heads of 5 in 4 groups"),
    ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size is 8"),
    ({"softmax_type": "learnable"}, "softmax_type is 'learnable'"),
]


@pytest.mark.parametrize(("others", "message"), REFUSED)
def test_what_the_arguments_may_not_say(others: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build("llama")
    args = argparse.Namespace(**{**vars(writer.arguments(model, 1, 1)), **others})
    folder = writer.save_megatron(tmp_path, model, args=args)
    with pytest.raises(ModelLoadError) as caught:
        open_megatron(folder).open_tensors()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_missing_or_at_odds(tmp_path: Path) -> None:
    model = build("llama")
    folder = writer.save_megatron(tmp_path, model, 2, 2)
    path = folder / "iter_0000042" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    content["model"][name] = content["model"][name].half()
    torch.save(content, path)
    with pytest.raises(ModelLoadError, match=r"linear_fc2.weight is \[32, 24\] F32 in one rank and \[32, 24\] F16"):
        open_megatron(folder)
    del content["model"][name]
    torch.save(content, path)
    with pytest.raises(ModelLoadError, match=r"linear_fc2.weight is in 1 of 2 ranks"):
        open_megatron(folder)
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"mp_rank_01_001 has no model_optim_rng.pt"):
        open_megatron(folder)
    path.parent.rmdir()
    with pytest.raises(ModelLoadError, match="tensor-parallel rank 1 in pipeline stage 1"):
        open_megatron(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(ModelLoadError, match="expected the number of an iteration"):
        open_megatron(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ModelLoadError, match="iter_0000007 does not exist"):
        open_megatron(folder)


def test_versions_that_are_not_known(tmp_path: Path) -> None:
    folder = writer.save_megatron(tmp_path, build("llama"), checkpoint_version=4.0)
    with pytest.raises(ModelLoadError, match=r"checkpoint_version is 4.0"):
        open_megatron(folder)


class Optimizer(enum.Enum):
    ADAM = 1


def test_classes_that_are_not_listed_are_named(tmp_path: Path) -> None:
    args = writer.arguments(build("llama"), 1, 1, optimizer=Optimizer.ADAM)
    folder = writer.save_megatron(tmp_path, build("llama"), args=args)
    with pytest.raises(ModelLoadError, match=r"model_optim_rng.pt holds an object of type .*Optimizer, which is not"):
        open_megatron(folder)


def test_dicts_within_dicts_end_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_files, "MAX_TENSORS", 2000)
    inner: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(7):
        inner = {str(i): inner for i in range(60)}
    folder = writer.save_megatron(tmp_path, build("llama"), style=lambda state: inner)
    with pytest.raises(ModelLoadError, match="holds more than 2000 tensors"):
        open_megatron(folder)


def test_other_folders_do_not_look_like_megatron(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not looks_like_megatron(tmp_path)
    assert not looks_like_megatron(tmp_path / "config.json")
