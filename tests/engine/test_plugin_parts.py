"""What plugins bring, at work in the engine: the worked example, and parts that show that they are used."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend_engine import LLM, KvCacheConfig, SamplingParams
from backend_engine.errors import ConfigError, InvalidRequestError, ModelLoadError, StepFailedError
from backend_engine.plugins import discovery
from backend_engine.plugins.catalog import PLUGIN_TARGETS
from tests.support.tiny_llama import build_tiny_llama

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin" / "inflight_example_plugin"
COUNT = " 1 2 3 4 5 end"
SMALL = {"max_seq_len": 128, "kv_cache_config": KvCacheConfig(max_tokens=1024)}


@pytest.fixture(autouse=True, scope="module")
def own_registries() -> Iterator[None]:
    """What is registered here is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in PLUGIN_TARGETS:
            patch.setattr(registry, "_entries", dict(registry._entries))
            patch.setattr(registry, "_owners", dict(registry._owners))
        patch.setattr(discovery, "PLUGINS", discovery.PluginLoader(PLUGIN_TARGETS))
        yield


@pytest.fixture(scope="module")
def parts_plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plugin in a file, whose parts can be seen in what the model says."""
    path = tmp_path_factory.mktemp("plugin") / "visible_parts.py"
    path.write_text(
        "from backend_engine.decoder.custom_processors import CustomLogitsProcessor\n"
        "from backend_engine.ops.torch_ops import TorchOps\n"
        "class UpsideDown(TorchOps):\n"
        "    def rms_norm(self, x, weight, eps):\n"
        "        return -super().rms_norm(x, weight, eps)\n"
        "    def append_kv(self, *arguments):\n"
        "        UpsideDown.num_appended += 1\n"
        "        super().append_kv(*arguments)\n"
        "    num_appended = 0\n"
        "class FailsAtTheThird(CustomLogitsProcessor):\n"
        "    def __init__(self, arguments, vocab_size):\n"
        "        self.at = arguments['at']\n"
        "    def apply(self, logits, prompt, output):\n"
        "        if len(output) == self.at:\n"
        "            raise RuntimeError('three is enough')\n"
        "def register(plugin):\n"
        "    plugin.operators('upside_down', UpsideDown)\n"
        "    plugin.logits_processor('fails', FailsAtTheThird)\n"
    )
    return str(path)


@pytest.fixture(scope="module")
def llm(table_model_dir: Path, parts_plugin: str) -> Iterator[LLM]:
    with LLM(str(table_model_dir), plugins=("none", str(EXAMPLE), parts_plugin), **SMALL) as ready:
        yield ready


def text(llm: LLM, prompt: str, **params: Any) -> str:
    return llm.generate(prompt, SamplingParams(**{"max_tokens": 16, **params})).outputs[0].text


def test_a_request_asks_for_a_processor_by_name(llm: LLM, table_ids: dict[str, int]) -> None:
    allowed = {"allow_ids": {"ids": [table_ids[" green"], table_ids[" blue"]]}}
    assert text(llm, "Pick", max_tokens=1) == " red"
    assert text(llm, "Pick", max_tokens=1, logits_processors=allowed) == " green"
    assert text(llm, "Pick", max_tokens=1, logits_processors=allowed, bad=["green"]) == " blue"
    result = llm.generate("Pick", SamplingParams(max_tokens=1, n=3, temperature=1.0, logits_processors=allowed))
    assert {output.text for output in result.outputs} <= {" green", " blue"}


def test_requests_with_and_without_a_processor_share_a_batch_and_nothing_else(
    llm: LLM, table_ids: dict[str, int]
) -> None:
    kinds = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True, logits_processors=processors)
        for seed in range(6)
        for processors in ({}, {"allow_ids": {"ids": [table_ids[" red"], table_ids["Pick"], table_ids[" blue"]]}})
    ]
    together = [r.outputs[0].token_ids for r in llm.generate(["Pick"] * len(kinds), kinds)]
    assert together == [llm.generate("Pick", kind).outputs[0].token_ids for kind in kinds]
    assert any(table_ids[" green"] in ids for ids in together[::2])
    assert not any(table_ids[" green"] in ids for ids in together[1::2])


def test_a_processor_that_fails_ends_its_own_request_alone(llm: LLM) -> None:
    failing = SamplingParams(max_tokens=16, logits_processors={"fails": {"at": 3}})
    for _ in range(12):  # more often than steps may fail in a row
        handles = [llm.generate_async("Count", params) for params in (SamplingParams(max_tokens=16), failing)]
        assert handles[0].result().outputs[0].text == COUNT
        with pytest.raises(StepFailedError, match=r"'fails' of plugin .*: it failed: RuntimeError: three is enough"):
            handles[1].result()


@pytest.mark.parametrize(
    ("processors", "told"),
    [
        ({"alow_ids": {}}, r"logits_processors: 'alow_ids' is not known; known: allow_ids, fails"),
        ({"allow_ids": {}}, r"'allow_ids' of plugin .*: it refuses the request: ValueError: ids None must be a list"),
        ({"allow_ids": {"ids": [10**6]}}, r"ids \[1000000\] must be a list of token ids from 0 to"),
        ({"allow_ids": {"ids": [1], "x": 2}}, r"unknown argument 'x'"),
        ({"fails": {}}, r"'fails' of plugin .*: it refuses the request: KeyError: 'at'"),
    ],
)
def test_what_a_processor_cannot_use_is_refused_by_name(llm: LLM, processors: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        llm.generate("Count", SamplingParams(logits_processors=processors))
    assert "\n" not in str(caught.value) and "/processors.py" not in str(caught.value)


@pytest.mark.parametrize("value", [["allow_ids"], {"allow_ids": [1]}, {5: {}}, "allow_ids"])
def test_processors_are_given_as_arguments_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logits_processors must"):
        SamplingParams(logits_processors=value)


def test_operators_of_a_plugin_are_what_the_layers_compute_with(table_model_dir: Path, parts_plugin: str) -> None:
    plugins = ("none", str(EXAMPLE), parts_plugin)
    with LLM(str(table_model_dir), plugins=plugins, operators="float32_norm", **SMALL) as llm:
        assert text(llm, "Count") == COUNT
    chosen = PLUGIN_TARGETS.operators.get("upside_down")
    with LLM(str(table_model_dir), plugins=plugins, operators="upside_down", **SMALL) as llm:
        assert text(llm, "Count", max_tokens=4) != " 1 2 3 4"
    chosen.num_appended = 0
    with LLM(
        str(table_model_dir), plugins=plugins, operators="upside_down", model_backend="transformers", **SMALL
    ) as llm:
        assert text(llm, "Count") == COUNT and chosen.num_appended > 0  # its norms are transformers' own
    with pytest.raises(
        ConfigError, match="operators 'float32' is not allowed; use float32_norm, native, torch, upside_down"
    ):
        LLM(str(table_model_dir), plugins=plugins, operators="float32")


def test_an_attention_backend_of_a_plugin_is_taken_when_it_is_named(
    table_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery.load_plugins(["none", str(EXAMPLE)])
    backend = PLUGIN_TARGETS.attention_backends.get("checked_torch")
    layers: set[int] = set()
    forward = backend.forward

    @functools.wraps(forward)
    def note(self: Any, q: Tensor, k: Tensor, v: Tensor, spec: Any, *more: Any) -> Tensor:
        layers.add(spec.layer_idx)
        return forward(self, q, k, v, spec, *more)

    monkeypatch.setattr(backend, "forward", note)
    with LLM(str(table_model_dir), **SMALL) as llm:
        assert text(llm, "Count") == COUNT and layers == set()
    with LLM(str(table_model_dir), attention_backend="checked_torch", **SMALL) as llm:
        assert text(llm, "Count") == COUNT and layers == {0, 1}


def change_config(source: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_family_of_a_plugin_serves_its_architecture(table_model_dir: Path, tmp_path: Path) -> None:
    capped = change_config(
        table_model_dir, tmp_path / "capped", architectures=["CappedLlamaForCausalLM"], logit_cap=20.0
    )
    with LLM(str(capped), plugins=("none", str(EXAMPLE)), **SMALL) as llm:
        result = llm.generate("Count", SamplingParams(max_tokens=16, return_generation_logits=True)).outputs[0]
        assert result.text == COUNT and float(abs(result.generation_logits).max()) < 20.0
    missing = change_config(table_model_dir, tmp_path / "missing", architectures=["CappedLlamaForCausalLM"])
    with pytest.raises(ModelLoadError, match="logit_cap"):
        LLM(str(missing), plugins=("none", str(EXAMPLE)))


def test_a_quantization_method_of_a_plugin_reads_its_checkpoints(tmp_path: Path) -> None:
    build_tiny_llama(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    packed, plain = {}, {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = plain[name] = weight
            continue
        step = weight.abs().amax(1) / 127
        codes = (weight / step[:, None]).round().to(torch.int8)
        packed |= {f"{name}_int8": codes, f"{name}_step": step}
        plain[name] = codes.float() * step[:, None]
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    section = {"quant_method": "rowwise_int8"}
    folder = change_config(tmp_path / "plain", tmp_path / "packed", quantization_config=section)
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    answers = []
    for model in (tmp_path / "plain", folder):
        with LLM(str(model), plugins=("none", str(EXAMPLE)), skip_tokenizer_init=True, **SMALL) as llm:
            params = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False)
            answers.append(llm.generate([[5, 6, 7], [40, 3]], params))
    assert [r.outputs[0].token_ids for r in answers[0]] == [r.outputs[0].token_ids for r in answers[1]]
    strange = change_config(
        tmp_path / "packed", tmp_path / "strange", quantization_config={**section, "granularity": "tensor"}
    )
    with pytest.raises(ModelLoadError, match=r"granularity.*row"):
        LLM(str(strange), plugins=("none", str(EXAMPLE)), skip_tokenizer_init=True)


def test_nothing_in_a_models_folder_is_run(table_model_dir: Path, tmp_path: Path) -> None:
    folder = change_config(table_model_dir, tmp_path / "model", plugins=["./trap_plugin.py", "trap_plugin"])
    (folder / "trap_plugin.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\ndef register(plugin): pass\n")
    with LLM(str(folder), **SMALL) as llm:
        assert text(llm, "Count") == COUNT
    assert not (tmp_path / "sprung").exists()


def test_a_faulty_plugin_fails_the_start_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "family_of_nothing.py").write_text("def register(plugin): plugin.architecture('A', 'builtins:print')\n")
    with pytest.raises(
        ConfigError, match=r"plugin .*family_of_nothing\.py: architecture 'A' is the function print; it"
    ):
        LLM(str(tmp_path / "no_such_model"), plugins=[str(tmp_path / "family_of_nothing.py")], skip_tokenizer_init=True)
