"""A storm: a third of the requests are bad, a third are cancelled at random moments, the rest must be exact; afterwards
nothing is left of any of them.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import ProductServer
from tests.support.client import GrpcStream, grpc_all

pytestmark = pytest.mark.triton
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
TEXTS = {
    "Count": " 1 2 3 4 5 end",
    "Emoji": "🦙 café ok",
    "User": "",
    "Text": " gamma delta",
    "Stop": " alpha beta STOP tail",
}
BAD: list[dict[str, Any]] = [
    {"max_tokens": 0}, {"max_tokens": -5}, {"temperature": -1.0}, {"top_p": 1.5}, {"top_k": -5}, {"text_input": ""},
    {"text_input": "Count " * 5000}, {"repetition_penalty": 0.0}, {"beam_width": 2}, {"num_return_sequences": 65},
    {"guided_decoding_guide_type": "json"}, {"lora_task_id": 1}, {"min_length": 9, "max_tokens": 3}, {"priority": 101},
    {"messages": "{bad"}, {"deadline_ms": -1}, {"end_id": -7},
    {"return_perf_metrics": True, "return_kv_cache_reuse_stats": False},
]  # fmt: skip
NUM_REQUESTS, NUM_THREADS = 200, 16


class Storm:
    """One storm's requests; each method is one request that checks its own answer and returns its kind."""

    def __init__(self, server: ProductServer, ids: dict[str, int], seed: int) -> None:
        self.server, self.ids, self.rng = server, ids, random.Random(seed)
        self.lock = threading.Lock()

    def draw(self, choices: Any) -> Any:
        with self.lock:
            return self.rng.choice(choices)

    def bad(self) -> str:
        fields = {"text_input": "Count", "max_tokens": 5, **self.draw(BAD)}
        model = self.draw(TEXT_MODELS)
        how = self.draw(("generate", "stream", "grpc"))
        if how == "generate":
            status, body = self.server.generate(model, **fields)
            assert 400 <= status < 500 and body["error"], (fields, status, body)
        elif how == "stream":
            event = next(iter(self.server.events(model, **fields)))
            assert event["error"] and "Traceback" not in event["error"], (fields, event)
        else:
            assert grpc_all(self.server.grpc, model, **fields)[0].error, fields
        return "bad"

    def cancelled(self) -> str:
        model = self.draw((*TEXT_MODELS, "tensorrt_llm"))
        num_pieces = self.draw(range(6))
        # A client that leaves an ensemble is seen by nobody; the deadline ends its request.
        limits = {"deadline_ms": 1500} if model == "ensemble" else {}
        if model != "tensorrt_llm" and self.draw((True, False)):
            events = self.server.events(model, text_input="Long", max_tokens=3000, **limits)
            for _ in range(1 + num_pieces):
                assert "error" not in next(events)
            events.close()
            return "cancelled"
        stream = GrpcStream(self.server.grpc)
        fields: dict[str, Any] = {"text_input": "Long", "max_tokens": 3000, "stream": True, **limits}
        if model == "tensorrt_llm":
            fields = {"input_ids": self.ids["Long"], "input_lengths": 1, "request_output_len": 3000, "streaming": True}
        stream.send(model, str(self.draw(range(10**9))), **fields)
        for _ in range(num_pieces):
            assert stream.next().error is None
        stream.close(cancel=True)
        return "cancelled"

    def good(self) -> str:
        word, model = self.draw(sorted(TEXTS)), self.draw(TEXT_MODELS)
        how = self.draw(("generate", "stream", "grpc", "rows"))
        if how == "generate":
            text = self.server.text(model, text_input=word, max_tokens=16)
        elif how == "stream":
            text = self.server.joined(model, text_input=word, max_tokens=16)
        else:
            num_rows = 3 if how == "rows" else 1
            responses = grpc_all(
                self.server.grpc, model, text_input=np.full((num_rows, 1), word.encode(), np.object_),
                max_tokens=np.full((num_rows, 1), 16, np.int32), stream=np.full((num_rows, 1), how == "grpc"),
                exclude_input_in_output=np.full((num_rows, 1), True),
            )  # fmt: skip
            assert all(r.error is None for r in responses), responses
            text = "".join(r.text for r in responses)
            assert text == TEXTS[word] * num_rows
            return "good"
        assert text == TEXTS[word], (model, how)
        return "good"


@pytest.mark.parametrize("seed", [0])
def test_a_storm_leaves_nothing_behind(slow_server: ProductServer, table_ids: dict[str, int], seed: int) -> None:
    storm = Storm(slow_server, table_ids, seed)
    kinds: list[Callable[[], str]] = [storm.bad, storm.cancelled, storm.good] * (NUM_REQUESTS // 3 + 1)
    order = kinds[:NUM_REQUESTS]
    random.Random(seed).shuffle(order)
    slow_server.wait_for("nv_trt_llm_request_metrics", "active", 0)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        done = Counter(pool.map(lambda call: call(), order))
    assert sum(done.values()) == NUM_REQUESTS and min(done.values()) >= NUM_REQUESTS // 3
    slow_server.wait_for("nv_trt_llm_request_metrics", "active", 0)
    slow_server.wait_for("nv_trt_llm_request_metrics", "waiting", 0)
    slow_server.wait_for("nv_trt_llm_kv_cache_block_metrics", "used", 0)
    assert slow_server.gauge("nv_trt_llm_kv_cache_block_metrics", "free") == slow_server.gauge(
        "nv_trt_llm_kv_cache_block_metrics", "max"
    )
    assert not [line for line in slow_server.metrics() if line.startswith(("nv_", "inflight_")) and " -" in line]
    for model in TEXT_MODELS:
        assert slow_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"
