"""NeMo's archives and folders: the tensors and the configuration of the model that was written, and what is refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
import yaml

from backend_engine.checkpoint.nemo_checkpoint import looks_like_nemo, open_nemo, tokenizer_files
from backend_engine.errors import ModelLoadError
from tests.checkpoints.test_megatron import KINDS, build, check
from tests.support import megatron_writer as writer

NEMO1 = [kind for kind in KINDS if kind not in ("qwen2", "qwen3", "mixtral")]


@pytest.fixture(scope="module", params=NEMO1)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.mark.parametrize(("tp", "pp", "prefix"), [(1, 1, "model."), (2, 1, "model.module."), (2, 2, "model.")])
def test_an_archive(model: Any, tp: int, pp: int, prefix: str, tmp_path: Path) -> None:
    path = writer.pack(tmp_path / "tiny.nemo", writer.nemo1_files(model, tp, pp, prefix))
    assert looks_like_nemo(path)
    check(open_nemo(path), model)
    assert tokenizer_files(path) == {"tokenizer.model": b"sp"}


def test_a_compressed_archive(model: Any, tmp_path: Path) -> None:
    path = writer.pack(tmp_path / "tiny.nemo", writer.nemo1_files(model), "w:gz")
    check(open_nemo(path), model)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.nemo"]


def test_an_archive_that_was_unpacked(model: Any, tmp_path: Path) -> None:
    for name, data in writer.nemo1_files(model, 2, 2).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert looks_like_nemo(tmp_path)
    check(open_nemo(tmp_path), model)


def distributed_archive(model: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "written"
    state = writer.stacked(writer.core_state(model), writer.sizes(model).layers)
    writer.save_distributed(folder, {"model." + name: tensor for name, tensor in state.items()})
    members = {f"model_weights/{file.name}": file.read_bytes() for file in folder.iterdir()}
    config = yaml.safe_dump(writer.nemo1_config(model)).encode()
    return writer.pack(tmp_path / "tiny.nemo", {"model_config.yaml": config, **members})


def test_a_distributed_checkpoint_in_an_archive(model: Any, tmp_path: Path) -> None:
    check(open_nemo(distributed_archive(model, tmp_path)), model)


def test_gate_and_up_of_their_own(tmp_path: Path) -> None:
    model = build("llama")
    files = writer.nemo1_files(model, activation="swiglu")
    state = {}
    for name, tensor in writer.early(writer.core_state(model))["language_model"]["transformer"].items():
        name = "model.language_model.encoder." + name
        if "dense_h_to_4h" in name:
            state[name], state[name.replace("4h.weight", "4h_2.weight")] = (t.clone() for t in tensor.chunk(2))
        else:
            state[name] = tensor
    state["model.language_model.embedding.word_embeddings.weight"] = model.model.embed_tokens.weight
    state["model.language_model.output_layer.weight"] = model.lm_head.weight
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    torch.save(state, tmp_path / "model_weights.ckpt")
    check(open_nemo(tmp_path), model)


@pytest.mark.parametrize(("is_stacked", "halves"), [(True, False), (False, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_nemo_2(kind: str, is_stacked: bool, halves: bool, tmp_path: Path) -> None:
    model = build(kind)
    is_gated = writer.sizes(model).is_gated and kind != "mixtral"
    folder = writer.save_nemo2(tmp_path, model, is_stacked, halves and is_gated, bias_activation_fusion=kind == "gpt2")
    assert looks_like_nemo(folder)
    check(open_nemo(folder), model)
    assert tokenizer_files(folder) == {"tokenizer.json": b"{}"}


def test_pieces_of_several_ranks(tmp_path: Path) -> None:
    """The file of pieces that a checkpoint of two ranks has: entries of .metadata for parts of one tensor."""
    model = build("llama_mha")
    folder = writer.save_nemo2(tmp_path, model)
    path = folder / "weights" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    name = "module.decoder.layers.mlp.linear_fc2.weight"
    whole = writer.stacked(writer.core_state(model), 4)[name.removeprefix("module.")]
    chunks, data = [], b""
    for start in (0, 24):
        for layer in range(4):
            buffer = folder / "piece"
            torch.save(whole[layer : layer + 1, :, start : start + 24].clone(), buffer)
            offset = torch.Size([layer, 0, start])
            chunk = distributed.metadata.ChunkStorageMetadata(offset, torch.Size([1, 32, 24]))
            chunks.append(chunk)
            index = distributed.metadata.MetadataIndex(name, offset, len(chunks) - 1)
            place = distributed.filesystem._StorageInfo("__1_0.distcp", len(data), buffer.stat().st_size)
            metadata.storage_data[index] = place
            data += buffer.read_bytes()
    metadata.state_dict_metadata[name].chunks = chunks
    (folder / "weights" / "__1_0.distcp").write_bytes(data)
    path.write_bytes(pickle.dumps(metadata))
    check(open_nemo(folder), model)
    metadata.state_dict_metadata[name].chunks = chunks[:-1]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelLoadError, match=r"linear_fc2.weight, shape \[4, 32, 48\], is stored with 5376 elements"):
        open_nemo(folder)
    metadata.state_dict_metadata[name].chunks = [*chunks, chunks[0]]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelLoadError, match="two pieces for the elements"):
        open_nemo(folder)


def change(folder: Path, **fields: Any) -> None:
    """Give the place of every piece these values."""
    path = folder / "weights" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        for name, value in fields.items():
            object.__setattr__(place, name, value)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relative_path": "../__0_0.distcp"}, "expected a file beside it"),
        ({"relative_path": "/etc/passwd"}, "expected a file beside it"),
        ({"relative_path": "__9_0.distcp"}, "__9_0.distcp does not exist"),
        ({"length": 1 << 40}, "beyond the end of the file"),
        ({"offset": -1}, "two counts"),
        ({"transform_descriptors": ("zstd",)}, "is stored through"),
    ],
)
def test_places_that_metadata_may_not_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = writer.save_nemo2(tmp_path, build("llama"))
    change(folder, **fields)
    with pytest.raises(ModelLoadError) as caught:
        open_nemo(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


class Command:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


def test_metadata_that_would_run_something(tmp_path: Path) -> None:
    folder = writer.save_nemo2(tmp_path, build("llama"))
    (folder / "weights" / ".metadata").write_bytes(pickle.dumps(Command()))
    with pytest.raises(ModelLoadError, match=r"\.metadata holds an object of type builtins.eval, which is not loaded"):
        open_nemo(folder)


def test_other_backends_are_named(tmp_path: Path) -> None:
    folder = writer.save_nemo2(tmp_path, build("llama"))
    (folder / "weights" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ModelLoadError, match="sharded_backend is 'zarr'; expected 'torch_dist'"):
        open_nemo(folder)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"activation": "geglu"}, "activation is 'geglu'"),
        ({"normalization": "groupnorm"}, "normalization is 'groupnorm'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"transformer_block_type": "post_ln"}, "transformer_block_type is 'post_ln'"),
        ({"target": "nemo.MegatronT5Model"}, "target is 'nemo.MegatronT5Model'"),
        ({"name": "megatron_falcon_gpt"}, "name is 'megatron_falcon_gpt'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"window_size": [4096, 0]}, "window_size is [4096, 0]"),
    ],
)
def test_what_a_configuration_may_not_say(others: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = writer.pack(tmp_path / "tiny.nemo", writer.nemo1_files(build("llama"), **others))
    with pytest.raises(ModelLoadError) as caught:
        open_nemo(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"_target_": "nemo.collections.llm.gpt.model.gemma.GemmaConfig2B"}, "GemmaConfig2B"),
        ({"_target_": "nemo.collections.llm.gpt.model.llama.Llama4Config"}, "Llama4Config"),
        ({"activation_func": {"_target_": "torch.nn.functional.mish"}}, "mish"),
        ({"rotary_base": None}, "rotary_base is missing"),
        ({"num_layers": 3}, "is [4, 64, 32]; expected 3 layers first"),
    ],
)
def test_what_a_model_yaml_may_not_say(others: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = writer.save_nemo2(tmp_path, build("llama"), **others)
    with pytest.raises(ModelLoadError) as caught:
        open_nemo(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_scaling_of_llama_3_1(tmp_path: Path) -> None:
    values = {"scale_factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 4096}
    config = open_nemo(writer.save_nemo2(tmp_path, build("llama"), **values)).config
    assert config["rope_parameters"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"!!python/object/apply:os.system ['true']", "is not valid YAML"),
        (b"- 1\n- 2", "holds a list"),
        (b"a: [", "is not valid YAML"),
        (b"\xff\xfe\xff", "is not valid YAML"),
    ],
)
def test_yaml_that_is_no_configuration(text: bytes, message: str, tmp_path: Path) -> None:
    files = {**writer.nemo1_files(build("llama")), "model_config.yaml": text}
    with pytest.raises(ModelLoadError, match=message):
        open_nemo(writer.pack(tmp_path / "tiny.nemo", files))


def test_archives_that_lack_something(tmp_path: Path) -> None:
    files = writer.nemo1_files(build("llama"), 2)
    del files["mp_rank_00/model_weights.ckpt"]
    with pytest.raises(ModelLoadError, match="no file of tensor-parallel rank 0 in pipeline stage 0"):
        open_nemo(writer.pack(tmp_path / "a.nemo", files))
    del files["mp_rank_01/model_weights.ckpt"]
    with pytest.raises(ModelLoadError, match=r"has no model_weights.ckpt"):
        open_nemo(writer.pack(tmp_path / "b.nemo", files))
    del files["model_config.yaml"]
    with pytest.raises(ModelLoadError, match=r"neither model_config.yaml nor context/model.yaml"):
        open_nemo(writer.pack(tmp_path / "c.nemo", files))
