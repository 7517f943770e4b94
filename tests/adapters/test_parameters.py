"""Model parameters: read, refused together, and the same in table, templates and documentation."""

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import write_contract

from backend_engine import envs
from backend_engine.errors import ConfigError
from backend_engine.triton_io import parameters
from backend_engine.triton_io.parameter_table import PARAMETERS, SHAPE, Status, parameters_of
from backend_engine.triton_io.tensor_table import BLS, ENGINE, MODELS, POSTPROCESSING, PREPROCESSING

ROOT = Path(__file__).parents[2]


def config(count: int = 1, **values: str) -> dict[str, Any]:
    return {
        "parameters": {key: {"string_value": value} for key, value in values.items()},
        "instance_group": [{"count": count, "kind": "KIND_CPU"}],
    }


def engine(**values: str) -> parameters.EngineParameters:
    return parameters.read_engine(config(gpt_model_path="/m", **values))


def problems(read: Any, model_config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(model_config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unfilled_template_is_all_defaults() -> None:
    unset = {p.key: f"${{{p.placeholder}}}" for p in parameters_of(ENGINE)} | {"max_seq_len": "", "dtype": "  "}
    unset.pop("gpt_model_path")
    assert engine(**unset) == engine()
    settings = engine()
    kv_cache, scheduler = settings.llm_arguments["kv_cache_config"], settings.llm_arguments["scheduler_config"]
    assert (kv_cache.enable_block_reuse, kv_cache.max_tokens, kv_cache.free_gpu_memory_fraction) == (True, None, 0.9)
    assert (scheduler.capacity_policy, scheduler.enable_chunked_context) == ("guaranteed_no_evict", True)
    assert settings.defaults.deadline_ms == 600_000 and settings.defaults.queue_timeout_ms is None
    assert settings.defaults.include_stop_words_in_output and not settings.defaults.exclude_input_in_output
    assert settings.tokenizer_dir is None and not settings.reject_unknown_parameters
    bls = parameters.read_bls(config())
    assert (bls.engine_model, bls.accumulate_tokens, bls.max_concurrency) == ("tensorrt_llm", False, 128)


def test_values_arrive() -> None:
    settings = engine(
        tokenizer_dir="/t", max_batch_size="4", max_num_tokens="64", max_seq_len="256", tokens_per_block="16",
        max_tokens_in_paged_kv_cache="384", kv_cache_free_gpu_mem_fraction="0.5", enable_kv_cache_reuse="False",
        batch_scheduler_policy="MAX_UTILIZATION", waiting_queue_policy="shortest_first", max_queue_size="6",
        enable_chunked_context="no", chunk_unit_size="8", gpt_model_type="inflight_batching", dtype="float32",
        device="cpu", attention_backend="torch", num_threads="2", default_deadline_ms="0",
        default_queue_timeout_ms="500", exclude_input_in_output="TRUE", include_stop_words_in_output="0",
        debug_step_delay_ms="1.5", debug_fail_on_tokens="1,2,3;4,5", max_words="3", max_word_bytes="9",
        cancellation_check_period_ms="7", stats_check_period_ms="8", reject_unknown_parameters="yes",
        context_cost_tokens="900",
    )  # fmt: skip
    arguments = settings.llm_arguments
    assert (arguments["max_batch_size"], arguments["max_num_tokens"], arguments["max_seq_len"]) == (4, 64, 256)
    kv_cache, scheduler = arguments["kv_cache_config"], arguments["scheduler_config"]
    assert (kv_cache.tokens_per_block, kv_cache.max_tokens, kv_cache.enable_block_reuse) == (16, 384, False)
    assert (scheduler.capacity_policy, scheduler.waiting_queue_policy) == ("max_utilization", "shortest_first")
    assert (scheduler.max_queue_size, scheduler.enable_chunked_context, scheduler.chunk_unit_size) == (6, False, 8)
    assert (scheduler.context_cost_tokens, engine().llm_arguments["scheduler_config"].context_cost_tokens) == (
        900,
        None,
    )
    assert (arguments["dtype"], arguments["device"], arguments["num_threads"]) == ("float32", "cpu", 2)
    assert (arguments["debug_step_delay_ms"], arguments["debug_fail_on_tokens"]) == (1.5, ((1, 2, 3), (4, 5)))
    assert (settings.defaults.deadline_ms, settings.defaults.queue_timeout_ms) == (None, 500)
    assert settings.defaults.exclude_input_in_output and not settings.defaults.include_stop_words_in_output
    assert settings.defaults.word_limits == (3, 9) and settings.reject_unknown_parameters
    assert (settings.cancellation_check_period_ms, settings.stats_check_period_ms) == (7, 8)


def test_plugins_and_what_they_bring_arrive() -> None:
    arguments = engine(plugins=" none, my.module ,/opt/mine.py", operators="mine").llm_arguments
    assert (arguments["plugins"], arguments["operators"]) == (("none", "my.module", "/opt/mine.py"), "mine")
    assert (engine().llm_arguments["plugins"], engine().llm_arguments["operators"]) == ((), "auto")


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_each_scheduler_policy_arrives(policy: str) -> None:
    assert engine(batch_scheduler_policy=policy).llm_arguments["scheduler_config"].capacity_policy == policy


@pytest.mark.parametrize("word", ["true", "True", "1", "t", "Y", "yes", "false", "FALSE", "0", "f", "n", "No"])
def test_each_word_for_a_boolean_counts(word: str) -> None:
    settings = parameters.read_preprocessing(config(tokenizer_dir="/t", add_special_tokens=word))
    assert settings.add_special_tokens == (word.lower()[0] in "t1y")


def test_all_problems_are_named_at_once() -> None:
    text = problems(
        parameters.read_engine,
        config(
            decoding_mode="medusa", sink_token_length="4", max_attention_window_size="8,0",
            batch_scheduler_policy="static", enable_kv_cache_reuse="perhaps", max_seq_len="1",
            context_cost_tokens="-1", max_num_tokens="many", kv_cache_free_gpu_mem_fraction="1.5",
            max_num_token="5", debug_fail_on_tokens="a",
        ),
    )  # fmt: skip
    for part in (
        "tensorrt_llm: ", "gpt_model_path (engine_dir) is not set",
        "batch_scheduler_policy 'static'", "guaranteed_no_evict, max_utilization, static_batch",
        "decoding_mode 'medusa' is not built yet: Speculative modes", "sink_token_length '4' is not built yet",
        "max_attention_window_size '8,0'", "numbers separated by commas, each a whole number of 1 or more",
        "enable_kv_cache_reuse 'perhaps'", "true or false", "max_seq_len '1'",
        "2 or more", "context_cost_tokens '-1'", "0 or more", "max_num_tokens 'many'",
        "kv_cache_free_gpu_mem_fraction '1.5'", "from 0 to 1",
        "'max_num_token'; did you mean 'max_num_tokens'?", "debug_fail_on_tokens 'a'",
    ):  # fmt: skip
        assert part in text, (part, text)


def test_a_missing_tokenizer_folder_is_named() -> None:
    assert "tokenizer_dir is not set" in problems(parameters.read_preprocessing, config())
    assert "tokenizer_dir is not set" in problems(parameters.read_postprocessing, config())


def test_several_postprocessing_instances_are_refused_where_they_would_reorder_a_stream() -> None:
    for decoupled in ("true", "${decoupled_mode}"):
        text = problems(parameters.read_postprocessing, config(4, tokenizer_dir="/t", decoupled_mode=decoupled))
        assert "postprocessing_instance_count 4" in text and "out of order" in text
    parameters.read_postprocessing(config(4, tokenizer_dir="/t", decoupled_mode="False"))
    parameters.read_postprocessing(config(1, tokenizer_dir="/t", decoupled_mode="true"))


def test_what_does_not_count_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = logging.getLogger("backend_engine.triton_io.parameter_reader")
    for level in ("info", "warning"):
        monkeypatch.setattr(log, level, lambda text, *values: lines.append(text % values))
    engine(guided_decoding_backend="xgrammar", multi_block_mode="true", EXECUTION_ENV="x", decoding_mode="top_k")
    unknown, without_effect = lines
    assert unknown == "tensorrt_llm: unknown parameter 'EXECUTION_ENV' is ignored"
    assert "guided_decoding_backend=xgrammar: No guided decoding yet" in without_effect
    assert "multi_block_mode=true: A choice" in without_effect


def test_v1_is_static_batching_and_windows_are_a_list() -> None:
    arguments = engine(gpt_model_type="V1", max_attention_window_size="8, 16", step_timeout_ms="1500").llm_arguments
    assert arguments["scheduler_config"].capacity_policy == "static_batch"
    assert arguments["kv_cache_config"].max_attention_window == (8, 16)
    assert arguments["step_timeout_s"] == 1.5


def test_the_type_of_logits_is_that_of_the_output() -> None:
    logits = {"name": "generation_logits", "data_type": "TYPE_FP16"}
    assert (
        parameters.read_engine(config(gpt_model_path="/m") | {"output": [logits]}).defaults.logits_dtype == "TYPE_FP16"
    )
    assert engine().defaults.logits_dtype == "TYPE_FP32"


def test_the_table_names_each_parameter_of_a_model_once() -> None:
    for model in MODELS:
        keys = Counter(p.key for p in parameters_of(model))
        assert not [key for key, count in keys.items() if count > 1]
    assert all(p.status is not Status.BUILT or p.help for p in PARAMETERS)


@pytest.mark.parametrize("model", list(MODELS))
def test_templates_hold_exactly_the_parameters_of_the_table(model: str) -> None:
    text = (ROOT / "templates" / model / "config.pbtxt").read_text()
    found = dict(re.findall(r'parameters: \{\s*key: "(\w+)"\s*value: \{\s*string_value: "\$\{(\w+)\}"', text))
    assert found == {p.key: p.placeholder for p in parameters_of(model) if p.placeholder}
    fields = set(re.findall(r"\$\{(\w+)\}", text)) - set(found.values())
    shape = {p.placeholder for p in PARAMETERS if p.key == SHAPE and model in p.models}
    assert fields == shape - set(found.values())


def test_templates_and_pages_are_what_the_tables_say() -> None:
    for path, text in write_contract.contents().items():
        assert path.read_text() == text, f"{path.name} differs from the tables: run scripts/write_contract.py"
    page = write_contract.parameters_page()
    assert all(f"`{v.name}`" in page and v.help in page for v in envs.TABLE)
    assert all(p.help in page for p in PARAMETERS)
    tensors = write_contract.tensors_page()
    assert all(row.doc in tensors for table in MODELS.values() for row in (*table.inputs, *table.outputs))


@pytest.mark.parametrize(
    "read", [parameters.read_engine, parameters.read_preprocessing, parameters.read_postprocessing, parameters.read_bls]
)
def test_no_reader_asks_for_a_parameter_that_its_model_has_not(read: Any) -> None:
    read(config(gpt_model_path="/m", tokenizer_dir="/t"))
    assert {ENGINE, PREPROCESSING, POSTPROCESSING, BLS} < set(MODELS)
