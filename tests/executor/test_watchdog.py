"""The watchdog: a step that never returns ends nobody's wait but its own, and what comes back late is not heard."""

import json
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.outputs import RequestOutput
from backend_engine.core.request import FinishReason, LlmRequest, StopConditions
from backend_engine.errors import ConfigError, ShutdownError, StepFailedError
from backend_engine.executor import py_executor
from backend_engine.executor.fault_injection import InjectedFaults
from backend_engine.executor.outbox import Outbox
from backend_engine.executor.rooms import Rooms
from backend_engine.executor.watchdog import Watchdog, automatic_step_timeout_s
from backend_engine.llm import LLM
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.token_work import num_weights
from tests.executor.test_py_executor import Collector, Harness
from tests.support.fake_rooms import continuation
from tests.support.waiting import eventually

STEP_TIMEOUT_S = 0.3
PROMPT = [5, 6, 7]


class Everything(Collector):
    """A sink that takes whatever comes, also after the final output."""

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finished:
            self.done.set()


class Hang:
    """Hangs the forward of the step in which a request has ``num_tokens`` tokens, until ``release`` is set."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.is_hanging = threading.Event()
        self.release = threading.Event()

    def __call__(self, output: object) -> None:
        if any(row.request.num_tokens == self.num_tokens for row in output.rows):  # type: ignore[attr-defined]
            self.is_hanging.set()
            assert self.release.wait(60)


def executor_of(harness: Harness, **rooms: object) -> py_executor.PyExecutor:
    all_rooms = Rooms(harness.scheduler, harness.kv_cache, harness.model, harness.decoder, **rooms)
    return py_executor.PyExecutor(all_rooms, max_batch_size=1, step_timeout_s=STEP_TIMEOUT_S)


def start_hanging(harness: Harness, hang: Hang) -> None:
    harness.model.before_forward = hang
    harness.executor = executor_of(harness)
    harness.executor.start()


@pytest.fixture
def harness() -> Harness:
    return Harness(max_batch_size=1)


def test_a_hanging_step_ends_all_requests_and_refuses_new_ones(harness: Harness) -> None:
    hang = Hang(len(PROMPT) + 2)
    start_hanging(harness, hang)
    _, running = harness.submit(PROMPT, max_tokens=20)
    assert hang.is_hanging.wait(10)
    _, waiting = harness.submit([1, 2])
    for sink in (running, waiting):
        assert sink.done.wait(10)
        assert sink.final.finish_reason is FinishReason.ERROR
        assert "the engine is stuck: a step has run for more than 0.3 s" in str(sink.final.error)
    assert running.token_ids == continuation(PROMPT, 2)
    assert isinstance(running.final.error, StepFailedError) and isinstance(waiting.final.error, ShutdownError)
    assert running.final.usage == (3, 0, 2)
    with pytest.raises(ShutdownError, match="the engine is stuck"):
        harness.submit([1, 2])
    stats = harness.executor.stats()
    assert not harness.executor.is_healthy and not stats.is_healthy
    assert (stats.num_active, stats.failure) == (0, "the engine is stuck: a step has run for more than 0.3 s")
    hang.release.set()


def test_a_step_that_comes_back_after_all_sends_nothing_more(harness: Harness) -> None:
    hang = Hang(len(PROMPT) + 2)
    start_hanging(harness, hang)
    sink = Everything()
    harness.executor.enqueue([_request(sink, 1)])
    assert sink.done.wait(10)
    outputs = list(sink.outputs)
    hang.release.set()
    harness.executor.thread.join(10)
    assert not harness.executor.thread.is_alive()
    assert sink.outputs == outputs and len(outputs) == 3


def test_shutdown_does_not_wait_for_a_hanging_step(harness: Harness) -> None:
    hang = Hang(len(PROMPT) + 1)
    start_hanging(harness, hang)
    _, sink = harness.submit(PROMPT)
    assert hang.is_hanging.wait(10)
    harness.executor.shutdown()
    assert harness.executor.thread.is_alive()
    assert sink.done.is_set() and sink.final.finish_reason is FinishReason.ERROR
    hang.release.set()


def test_shutdown_gives_up_on_a_step_that_the_watchdog_still_trusts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_executor, "JOIN_TIMEOUT_S", 0.3)
    hang = Hang(len(PROMPT) + 1)
    harness.model.before_forward = hang
    harness.executor.start()
    _, sink = harness.submit(PROMPT)
    assert hang.is_hanging.wait(10)
    harness.executor.shutdown()
    assert sink.done.is_set() and "did not stop within 0.3 s" in str(sink.final.error)
    hang.release.set()


def test_a_healthy_engine_is_left_alone_however_long_it_idles(harness: Harness) -> None:
    start_hanging(harness, Hang(-1))
    time.sleep(3 * STEP_TIMEOUT_S)
    _, sink = harness.submit(PROMPT, max_tokens=5)
    assert sink.done.wait(10)
    assert sink.final.finish_reason is FinishReason.LENGTH and harness.executor.is_healthy
    harness.executor.shutdown()
    assert not harness.executor.thread.is_alive()
    assert harness.executor.stats().failure == ""


def test_many_short_steps_are_not_added_up(harness: Harness) -> None:
    faults = InjectedFaults(STEP_TIMEOUT_S / 10, ())
    harness.executor = executor_of(harness, faults=faults)
    harness.executor.start()
    _, sink = harness.submit(PROMPT, max_tokens=30)
    assert sink.done.wait(20)
    assert sink.final.finish_reason is FinishReason.LENGTH
    harness.executor.shutdown()


def test_three_failed_steps_are_the_same_event(harness: Harness) -> None:
    """Whoever is still waiting when the engine gives up gets an error, not an end that looks like its own wish."""

    def fail(output: object) -> None:
        raise StepFailedError("the device is lost")

    harness.model.before_forward = fail
    sinks = [harness.submit([1, 2])[1] for _ in range(4)]
    harness.executor.start()
    for sink in sinks:
        assert sink.done.wait(10)
    assert [str(sink.final.error) for sink in sinks[:3]] == ["the step of this request failed: the device is lost"] * 3
    last = sinks[3].final
    assert last.finish_reason is FinishReason.ERROR and isinstance(last.error, ShutdownError)
    assert str(last.error) == "the engine has stopped after 3 failed steps in a row; see the log"
    assert harness.executor.stats().failure == str(last.error)


def test_a_bug_outside_the_steps_border_is_the_same_event(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.scheduler, "schedule", lambda kv: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    _, sink = harness.submit(PROMPT)
    harness.executor.start()
    assert sink.done.wait(10)
    assert str(sink.final.error) == "the engine has stopped after an internal failure; see the log"


def test_the_hang_hook_hangs_the_step_of_its_tokens_alone(harness: Harness) -> None:
    hang_on = (*PROMPT, *continuation(PROMPT, 1))
    faults = InjectedFaults(0, (), (hang_on,), hang_s=0.5)
    harness.executor = executor_of(harness, faults=faults)
    _, sink = harness.submit(PROMPT, max_tokens=3)
    harness.executor.step()
    started = time.monotonic()
    harness.executor.step()
    assert time.monotonic() - started >= 0.5
    harness.run()
    assert sink.token_ids == continuation(PROMPT, 3)


def test_a_process_that_was_stopped_and_goes_on_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks of the watchdog an hour passes: the step is the same, and it is well."""

    class Executor:
        step_began: float | None = 1.0
        thread = threading.current_thread()
        is_stopping = False
        verdicts: list[str] = []  # noqa: RUF012 - one test

        def declare_dead(self, reason: str) -> None:
            self.verdicts.append(reason)

    executor = Executor()
    times = iter([0.0, 1.0, 1.2, 3601.2, 3601.4, 3601.6])
    looks: list[float] = []

    def wait(timeout: float) -> bool:
        looks.append(timeout)
        return len(looks) > 5

    monkeypatch.setattr("backend_engine.executor.watchdog.time.monotonic", lambda: next(times))
    watchdog = Watchdog(executor, 2.0)
    watchdog._stopping.wait = wait  # type: ignore[method-assign]
    watchdog._run()
    assert len(looks) == 6 and executor.verdicts == []


def _request(sink: object, request_id: int) -> LlmRequest:
    return LlmRequest(request_id, PROMPT, SamplingParams(), StopConditions(4), sink)  # type: ignore[arg-type]


def test_a_sink_that_blocks_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend_engine.executor.outbox.BLOCKED_SINK_S", 0.2)
    outbox = Outbox()
    release, entered = threading.Event(), threading.Event()

    def block(output: RequestOutput) -> None:
        entered.set()
        release.wait(60)

    blocked, other, sink = _request(block, 1), Everything(), Everything()
    waiting, later = _request(other, 2), _request(sink, 3)
    outbox.admit([blocked, waiting, later])
    outputs = [(request, RequestOutput(request.request_id, [7], True)) for request in (blocked, waiting)]
    sender = threading.Thread(target=outbox.send, args=(outputs,), daemon=True)
    sender.start()
    assert entered.wait(10)
    outbox.close_with("dead")
    assert str(other.final.error) == str(sink.final.error) == "dead"
    release.set()
    sender.join(10)
    assert len(other.outputs) == len(sink.outputs) == 1 and len(outbox) == 0


def test_a_request_that_arrives_at_a_closed_outbox_is_answered_at_once() -> None:
    outbox, sink = Outbox(), Collector()
    outbox.close_with("dead")
    outbox.close_with("another reason")
    outbox.admit([_request(sink, 1)])
    assert str(sink.final.error) == "dead" and len(outbox) == 0


def test_the_watchdog_ends_with_the_engine(harness: Harness) -> None:
    start_hanging(harness, Hang(-1))
    assert any(thread.name == "watchdog" for thread in threading.enumerate())
    harness.executor.shutdown()
    assert eventually(lambda: not any(thread.name == "watchdog" for thread in threading.enumerate()))


def test_the_automatic_timeout_grows_with_the_work_of_a_step() -> None:
    assert automatic_step_timeout_s(2 * 134.5e6, 512, "cpu") == pytest.approx(10 + 6.886, abs=0.01)
    assert automatic_step_timeout_s(2 * 8e9, 8192, "cuda") == pytest.approx(10 + 65.5, abs=0.1)


def test_an_llm_whose_step_hangs_says_so_and_shuts_down(table_model_dir: Path, table_ids: dict[str, int]) -> None:
    hang_on = ((table_ids["Count"], table_ids[" 1"]),)
    with LLM(str(table_model_dir), step_timeout_s=0.5, debug_hang_on_tokens=hang_on) as llm:
        assert llm.generate("Text").outputs[0].text == " gamma delta"
        with pytest.raises(StepFailedError, match=r"the engine is stuck: a step has run for more than 0.5 s"):
            llm.generate("Count")
        with pytest.raises(ShutdownError, match="the engine is stuck"):
            llm.generate("Text")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_step_timeout_out_of_range_is_refused(table_model_dir: Path, value: float) -> None:
    with pytest.raises(ConfigError, match=r"step_timeout_s .* is out of range"):
        LLM(str(table_model_dir), step_timeout_s=value)


def test_the_work_of_a_token_counts_every_weight_once(random_model_dir: Path) -> None:
    """Packed layers keep their weights out of torch's sight; they count all the same."""
    loaded = load_model(str(random_model_dir), "float32", "cpu")
    tensors = [load_file(path) for path in random_model_dir.glob("*.safetensors")]
    stored = sum(tensor.size for file in tensors for tensor in file.values())
    config = json.loads((random_model_dir / "config.json").read_text())
    tied = config["vocab_size"] * config["hidden_size"] if config["tie_word_embeddings"] else 0
    assert num_weights(loaded.model) == stored + tied
