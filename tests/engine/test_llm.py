"""``LLM`` from Python: results, streaming, sampling, ends, limits and refusals, on the table model."""

import asyncio
import dataclasses
import math
import threading
import time

import numpy as np
import pytest

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.admission import Submission
from backend_engine.core.outputs import RequestOutput
from backend_engine.errors import ConfigError, InvalidRequestError, OutOfCapacityError, ShutdownError, StepFailedError
from tests.support.waiting import eventually

COUNT = " 1 2 3 4 5 end"


@pytest.fixture(scope="module")
def llm(table_model_dir: str):
    with LLM(table_model_dir, max_seq_len=512) as ready:
        yield ready


def test_a_result_has_all_its_parts(llm: LLM) -> None:
    result = llm.generate("Count", SamplingParams(max_tokens=16, logprobs=0))
    output = result.outputs[0]
    assert (result.prompt, len(result.prompt_token_ids), result.finished) == ("Count", 1, True)
    assert (output.text, len(output.token_ids), output.finish_reason, output.stop_reason) == (COUNT, 6, "stop", None)
    assert output.logprobs is not None and len(output.logprobs) == 6
    assert output.cumulative_logprob == pytest.approx(0.0, abs=1e-3)


def test_a_list_of_prompts_keeps_its_order_and_may_have_parameters_each(llm: LLM) -> None:
    prompts = ["Count", "Text", "Emoji"] * 5
    texts = [result.outputs[0].text for result in llm.generate(prompts, SamplingParams(max_tokens=16))]
    assert texts == [COUNT, " gamma delta", "🦙 café ok"] * 5
    lengths = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    assert [r.outputs[0].text for r in llm.generate(["Count"] * 3, lengths)] == [" 1", " 1 2", " 1 2 3"]
    with pytest.raises(InvalidRequestError, match="2 sampling_params were given for 3 prompts"):
        llm.generate(["Count"] * 3, lengths[:2])
    assert llm.generate([], SamplingParams()) == []


def test_token_ids_may_be_a_list_or_an_array(llm: LLM, table_ids: dict[str, int]) -> None:
    for ids in ([table_ids["Count"]], np.array([table_ids["Count"]])):
        assert llm.generate(ids, SamplingParams(max_tokens=16)).outputs[0].text == COUNT


def test_streaming_is_cumulative_with_deltas(llm: LLM) -> None:
    steps = list(llm.generate_async("Emoji", SamplingParams(max_tokens=16)))
    assert "".join(step.outputs[0].text_diff for step in steps) == steps[-1].outputs[0].text == "🦙 café ok"
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]


def test_streaming_in_asyncio(llm: LLM) -> None:
    async def follow(prompt: str) -> str:
        return "".join([step.outputs[0].text_diff async for step in llm.generate_async(prompt, SamplingParams())])

    async def both() -> list[str]:
        return await asyncio.gather(follow("Count"), follow("Text"), follow("Emoji"))

    assert asyncio.run(asyncio.wait_for(both(), 60)) == [COUNT, " gamma delta", "🦙 café ok"]


def test_chat_uses_the_models_template(llm: LLM) -> None:
    assert llm.chat([{"role": "user", "content": "anything"}]).outputs[0].text == " yes"


def test_stop_words_and_reasons(llm: LLM) -> None:
    out = llm.generate("Stop", SamplingParams(stop=["STOP"])).outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason, len(out.token_ids)) == (" alpha beta ", "stop", "STOP", 4)
    out = llm.generate("Stop", SamplingParams(stop="STOP", include_stop_str_in_output=True)).outputs[0]
    assert out.text == " alpha beta STOP"
    assert llm.generate("Stop", SamplingParams(stop=["beta", "STOP"])).outputs[0].stop_reason == "beta"


def test_end_ids(llm: LLM, table_ids: dict[str, int]) -> None:
    assert llm.generate("Count", SamplingParams(end_id=table_ids[" 4"])).outputs[0].text == " 1 2 3"
    assert llm.generate("Count", SamplingParams(stop_token_ids=[table_ids[" 3"]])).outputs[0].text == " 1 2"
    assert len(llm.generate("Count", SamplingParams(max_tokens=20, end_id=-1)).outputs[0].token_ids) == 20
    assert len(llm.generate("Count", SamplingParams(max_tokens=20, end_id=1_048_576)).outputs[0].token_ids) == 20


def test_several_sequences_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=15, temperature=1.0, n=4, seed=11)
    first = [output.text for output in llm.generate("Pick", params).outputs]
    assert first == [output.text for output in llm.generate("Pick", params).outputs] and len(set(first)) > 1
    alone = llm.generate("Pick", SamplingParams(max_tokens=15, temperature=1.0, seed=11)).outputs[0].text
    assert first[0] == alone
    unseeded = SamplingParams(max_tokens=15, temperature=1.0)
    assert len({llm.generate("Pick", unseeded).outputs[0].text for _ in range(10)}) >= 2


def test_log_probabilities(llm: LLM, table_ids: dict[str, int]) -> None:
    entry = llm.generate("Pick", SamplingParams(max_tokens=1, logprobs=3)).outputs[0].logprobs[0]
    assert entry.logprob == pytest.approx(math.log(0.5), abs=1e-4) and entry.rank == 1
    assert [token for token, _ in entry.top] == [table_ids[w] for w in (" red", " green", " blue")]
    blocked = SamplingParams(max_tokens=1, logprobs=0, bad=["London", "one"])
    assert all(e.logprob >= -100 for e in llm.generate("Bad", blocked).outputs[0].logprobs)


def test_a_text_cut_by_the_limits_ends_with_length(llm: LLM) -> None:
    out = llm.generate("Long", SamplingParams(max_tokens=10_000)).outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (511, "length")


REFUSED = [
    ("", SamplingParams(), "empty"),
    ([[]], SamplingParams(), "empty"),
    ([1] * 600, SamplingParams(), r"\(600\).*512"),
    ([10**6], SamplingParams(), "token id 1000000"),
    ([-1], SamplingParams(), "token id -1"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), REFUSED)
def test_bad_prompts_are_refused_and_nothing_breaks(
    llm: LLM, prompt: object, params: SamplingParams, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, params)
    assert llm.generate("Count", SamplingParams(max_tokens=3)).outputs[0].text == " 1 2 3"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("temperature", -1.0), ("temperature", math.nan), ("top_p", 1.5),
        ("top_k", -5), ("min_p", 2.0), ("repetition_penalty", 0.0), ("presence_penalty", math.inf), ("seed", -1),
        ("seed", 2**64), ("n", 0), ("logprobs", -1), ("end_id", -2), ("min_tokens", 33), ("stop", [3]),
        ("bad_token_ids", [[]]), ("stop_token_ids", [-4]),
    ],
)  # fmt: skip
def test_sampling_params_name_what_is_wrong(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


def test_cancelling_ends_a_request_and_frees_its_blocks(table_model_dir: str) -> None:
    with LLM(table_model_dir, debug_step_delay_ms=5) as llm:
        handle = llm.generate_async("Long", SamplingParams(max_tokens=4000))
        next(iter(handle))
        handle.abort()
        result = handle.result(30)
        assert result.outputs[0].finish_reason == "cancelled" and len(result.outputs[0].token_ids) < 4000
        assert llm.stats().kv_used_blocks == 0 and llm.stats().num_active == 0


def test_shutdown_ends_what_runs_and_refuses_what_comes(table_model_dir: str) -> None:
    llm = LLM(table_model_dir, debug_step_delay_ms=5)
    handle = llm.generate_async("Long", SamplingParams(max_tokens=4000))
    next(iter(handle))
    llm.shutdown()
    assert handle.result(30).outputs[0].finish_reason == "cancelled"
    with pytest.raises(ShutdownError):
        llm.generate("Count")
    llm.shutdown()


def test_a_failed_step_is_raised_to_its_own_caller(table_model_dir: str, table_ids: dict[str, int]) -> None:
    with LLM(table_model_dir, debug_fail_on_tokens=((table_ids["Text"], table_ids[" gam"]),)) as llm:
        with pytest.raises(StepFailedError, match="injected fault"):
            llm.generate("Text")
        assert llm.generate("Count").outputs[0].text == COUNT


def test_prompts_larger_than_the_cache_are_refused_and_long_answers_end(random_model_dir: str) -> None:
    kv_cache = KvCacheConfig(tokens_per_block=16, max_tokens=128)
    with LLM(random_model_dir, kv_cache_config=kv_cache) as llm:
        with pytest.raises(InvalidRequestError, match=r"150 tokens needs 10 .* 8 blocks \(128 tokens\)"):
            llm.generate([7] * 150)
        out = llm.generate([7] * 100, SamplingParams(max_tokens=100, ignore_eos=True)).outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (29, "length")


def test_without_chunks_a_prompt_over_the_budget_is_refused(random_model_dir: str) -> None:
    scheduler = SchedulerConfig(max_batch_size=4, max_num_tokens=32, enable_chunked_context=False)
    with (
        LLM(random_model_dir, scheduler_config=scheduler) as llm,
        pytest.raises(InvalidRequestError, match=r"\(40\).*\(32\)"),
    ):
        llm.generate([7] * 40)


def test_a_full_queue_refuses_at_once(table_model_dir: str) -> None:
    scheduler = SchedulerConfig(max_batch_size=1, max_num_tokens=8, max_queue_size=2)
    with LLM(table_model_dir, scheduler_config=scheduler, debug_step_delay_ms=20) as llm:
        handles = []
        with pytest.raises(OutOfCapacityError, match="Maximum queue size of 2"):
            for _ in range(50):
                handles.append(llm.generate_async("Count", SamplingParams(max_tokens=16)))
        assert {handle.result(60).outputs[0].text for handle in handles} == {COUNT}


def test_queue_timeouts_and_deadlines(table_model_dir: str) -> None:
    finals: list[RequestOutput] = []
    done = threading.Semaphore(0)

    def sink(output: RequestOutput) -> None:
        if output.finished:
            finals.append(output)
            done.release()

    scheduler = SchedulerConfig(max_batch_size=1, max_num_tokens=8)
    with LLM(table_model_dir, scheduler_config=scheduler, debug_step_delay_ms=10) as llm:
        ids = llm.tokenizer.encode("Long")
        running = llm.submit(Submission(ids, SamplingParams(max_tokens=4000), sink, deadline_s=1.0))
        time.sleep(0.1)
        llm.submit(Submission(ids, SamplingParams(), sink, queue_timeout_s=0.2))
        assert done.acquire(timeout=30) and done.acquire(timeout=30)
    assert "in the queue" in str(finals[0].error)
    assert finals[1].request_id == running and finals[1].finish_reason == "timeout" and finals[1].error is None


def test_without_a_tokenizer_ids_work_and_text_is_refused(table_model_dir: str, table_ids: dict[str, int]) -> None:
    with LLM(table_model_dir, skip_tokenizer_init=True) as llm:
        out = llm.generate([table_ids["Count"]]).outputs[0]
        assert len(out.token_ids) == 6 and out.text == ""
        for call in (lambda: llm.generate("Count"), lambda: llm.generate([1], SamplingParams(stop="x"))):
            with pytest.raises(InvalidRequestError, match="tokenizer"):
                call()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "float8"}, "dtype 'float8'.*float32"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"max_batch_sise": 3}, "max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size 0"),
        ({"max_batch_size": 64, "max_num_tokens": 32}, "max_num_tokens 32"),
        ({"max_seq_len": 10**6}, "max_position_embeddings"),
        ({"attention_backend": "magic"}, "attention backend 'magic'.*torch"),
        ({"scheduler_config": SchedulerConfig(capacity_policy="greedy")}, "capacity_policy 'greedy'"),
        ({"scheduler_config": SchedulerConfig(waiting_queue_policy="lifo")}, "waiting_queue_policy 'lifo'"),
        ({"kv_cache_config": KvCacheConfig(tokens_per_block=0)}, "tokens_per_block 0"),
    ],
)
def test_settings_that_are_not_allowed_are_named(table_model_dir: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(table_model_dir, **kwargs)


def test_bfloat16_and_float16_run(table_model_dir: str) -> None:
    for dtype in ("bfloat16", "float16"):
        with LLM(table_model_dir, dtype=dtype) as llm:
            assert llm.generate("Count").outputs[0].text == COUNT


def test_a_group_is_queued_as_a_whole_or_not_at_all(table_model_dir: str) -> None:
    outputs: list[RequestOutput] = []
    scheduler = SchedulerConfig(max_batch_size=1, max_num_tokens=8, max_queue_size=3)
    with LLM(table_model_dir, scheduler_config=scheduler, debug_step_delay_ms=20) as llm:
        ids = llm.tokenizer.encode("Count")
        one = Submission(ids, SamplingParams(max_tokens=3), outputs.append)
        with pytest.raises(OutOfCapacityError, match="Maximum queue size of 3"):
            llm.submit_all([one] * 4)
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.submit_all([one, dataclasses.replace(one, prompt_token_ids=[])])
        assert not outputs and llm.stats().num_active == 0
        request_ids = llm.submit_all([one] * 3)
        assert eventually(lambda: sum(output.finished for output in outputs) == 3, 30)
    assert {output.request_id for output in outputs} == set(request_ids)
