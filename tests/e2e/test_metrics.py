"""The metrics page and the statistics log line of a real server, read as dashboards and tools read them."""

import json
import re
import time
import urllib.request
from datetime import UTC, datetime

import pytest

from backend_engine.triton_io import metric_table
from backend_engine.triton_io.stats_log import TIMESTAMP_FORMAT
from tests.e2e.conftest import ProductServer
from tests.support.client import at_once
from tests.support.monitoring import RULES, expressions, metric_names
from tests.support.waiting import eventually

pytestmark = pytest.mark.triton
LABELS = 'model="tensorrt_llm"', 'version="1"'
LENGTHS = {
    "nv_llm_input_token_len": "total_input_tokens",
    "nv_llm_output_token_len": "total_output_tokens",
}


def page(server: ProductServer) -> str:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert isinstance(text, str)
    return text


def samples(server: ProductServer) -> dict[str, float]:
    """Every sample of the page by its name and labels as printed."""
    lines = [line for line in page(server).splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def of_family(server: ProductServer, family: str) -> dict[str, float]:
    """A family's samples by the value of its own label (empty if it has none)."""
    found = {}
    for name, value in samples(server).items():
        if name.startswith(family + "{"):
            own = [label for label in name[len(family) + 1 : -1].split(",") if label not in LABELS]
            found[own[0].split('"')[1] if own else ""] = value
    return found


def idle(server: ProductServer) -> None:
    """Wait until nothing runs and the page says so: two looks, more than two refreshes apart, see the same."""

    def is_still() -> bool:
        before = engine_samples(server)
        time.sleep(0.25)
        active = before['nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"}']
        return active == 0 and engine_samples(server) == before

    assert eventually(is_still)


def engine_samples(server: ProductServer) -> dict[str, float]:
    """Those samples that the engine model makes."""
    return {name: value for name, value in samples(server).items() if name.startswith(("nv_trt", "nv_llm", "inflight"))}


def length_line(family: str, suffix: str, bound: str = "") -> str:
    """The exact text that tools match, up to the value."""
    le = f',le="{bound}"' if bound else ""
    return f'{family}_{suffix}{{model="tensorrt_llm",response_metric_type="{LENGTHS[family]}",version="1"{le}}}'


def test_every_family_has_its_help_type_and_labels_in_order(table_server: ProductServer) -> None:
    text = page(table_server)
    for family in metric_table.families(is_static_batching=False):
        assert f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n" in text, family.name
        lines = re.findall(rf"^{family.name}\{{(.*)\}} ", text, flags=re.MULTILINE)
        expected = [
            ",".join(sorted([*LABELS, f'{family.label}="{sample.category}"'] if family.label else LABELS))
            for sample in family.samples
        ]
        assert sorted(lines) == sorted(expected)
    for histogram in metric_table.HISTOGRAMS:
        if histogram.is_native:
            assert f"# HELP {histogram.name} {histogram.help}\n# TYPE {histogram.name} histogram\n" in text
    assert "nv_trt_llm_v1_metrics" not in text


def test_token_counts_are_observed_once_a_request(table_server: ProductServer) -> None:
    idle(table_server)
    before = samples(table_server)
    asked = [("Count", 3), ("Count", 6), ("Long" * 12, 20), ("Long" * 60, 55)]
    at_once(
        [lambda p=prompt, n=n: table_server.text("ensemble", text_input=p, max_tokens=n) for prompt, n in asked]
    )  # fmt: skip
    count = length_line("nv_llm_input_token_len", "count")
    assert eventually(lambda: samples(table_server)[count] == before[count] + 4)
    after = samples(table_server)

    def growth(family: str) -> dict[str, float]:
        lines = {"sum": length_line(family, "sum"), "count": length_line(family, "count")}
        lines |= {b: length_line(family, "bucket", b) for b in ("10", "50", "100", "500", "1000", "+Inf")}
        return {key: after[line] - before[line] for key, line in lines.items()}

    assert growth("nv_llm_input_token_len") == {
        "sum": 1 + 1 + 12 + 60, "count": 4, "10": 2, "50": 3, "100": 4, "500": 4, "1000": 4, "+Inf": 4,
    }  # fmt: skip
    assert growth("nv_llm_output_token_len") == {
        "sum": 3 + 6 + 20 + 55, "count": 4, "10": 2, "50": 3, "100": 4, "500": 4, "1000": 4, "+Inf": 4,
    }  # fmt: skip


def test_our_counters_and_latencies_move_with_the_requests(table_server: ProductServer) -> None:
    idle(table_server)
    before = samples(table_server)
    table_server.text("ensemble", text_input="Emoji", max_tokens=30)
    table_server.joined("tensorrt_llm_bls", text_input="Long", max_tokens=12)
    plain = f"{{{','.join(LABELS)}}}"
    finished = "inflight_request_latency_seconds_count" + plain
    assert eventually(lambda: samples(table_server)[finished] == before[finished] + 2)
    idle(table_server)
    after = samples(table_server)

    def growth(name: str) -> float:
        return after[name] - before[name]

    generated = growth("inflight_generated_tokens_total" + plain)
    assert growth("inflight_prompt_tokens_total" + plain) == 2
    for reason, num in (("stop", 1), ("length", 1), ("error", 0), ("cancelled", 0), ("timeout", 0)):
        name = f'inflight_finished_requests_total{{finish_reason="{reason}",{",".join(LABELS)}}}'
        assert growth(name) == num, reason
    for name in ("time_to_first_token", "request_queue_time", "request_latency"):
        bucket = f'inflight_{name}_seconds_bucket{{{",".join(LABELS)},le="+Inf"}}'
        assert growth(f"inflight_{name}_seconds_count{plain}") == growth(bucket) == 2
        assert 0 < growth(f"inflight_{name}_seconds_sum{plain}") < 60
    gaps = growth("inflight_inter_token_latency_seconds_count" + plain)
    bucket = f'inflight_inter_token_latency_seconds_bucket{{le="+Inf",{",".join(LABELS)}}}'
    assert gaps == growth(bucket) == generated - 2
    assert after["inflight_engine_healthy" + plain] == 1


def test_levels_while_requests_run(slow_server: ProductServer) -> None:
    """At 10 ms a step, three streams of 200 tokens run for two seconds."""
    seen: list[tuple[dict[str, float], dict[str, float], dict[str, float]]] = []

    def look() -> bool:
        requests = of_family(slow_server, "nv_trt_llm_request_metrics")
        blocks = of_family(slow_server, "nv_trt_llm_kv_cache_block_metrics")
        batcher = of_family(slow_server, "nv_trt_llm_inflight_batcher_metrics")
        seen.append((requests, blocks, batcher))
        return requests["active"] == 3 and batcher["generation_requests"] == 3 and blocks["used"] > 0

    idle(slow_server)
    stamp = of_family(slow_server, "nv_trt_llm_general_metrics")["timestamp"]
    streams = [lambda: slow_server.joined("tensorrt_llm_bls", text_input="Long", max_tokens=200)] * 3
    *texts, has_seen = at_once([*streams, lambda: eventually(look)])
    assert has_seen and set(texts) == {" zig zag" * 100}, seen[-1]
    for requests, blocks, _ in seen:
        assert blocks["max"] > 0 and requests["max"] > 0
    idle(slow_server)
    end = of_family(slow_server, "nv_trt_llm_general_metrics")
    assert end["timestamp"] > stamp and end["timestamp"] == int(end["timestamp"])
    requests = of_family(slow_server, "nv_trt_llm_request_metrics")
    assert (requests["waiting"], requests["scheduled"], requests["context"]) == (0, 0, 0)
    blocks = of_family(slow_server, "nv_trt_llm_kv_cache_block_metrics")
    assert (blocks["used"], blocks["fraction"], blocks["free"]) == (0, 0, blocks["max"])
    memory = of_family(slow_server, "nv_trt_llm_runtime_memory_metrics")
    assert memory["cpu"] > blocks["max"] * blocks["tokens_per"] and memory["gpu"] == memory["pinned"] == 0


def last_log_line(server: ProductServer) -> dict[str, object]:
    lines = [line for line in server.log().splitlines() if "Active Request Count" in line]
    assert lines, "no statistics in the log"
    text = lines[-1][lines[-1].index("{") : lines[-1].rindex("}") + 1].replace("\\", "")
    line = json.loads(text)
    assert isinstance(line, dict)
    return line


def test_the_last_log_line_tells_what_the_page_shows(table_server: ProductServer) -> None:
    assert "Active Request Count" not in table_server.log(), "logged at verbose level only"
    status, _ = table_server.post("/v2/logging", {"log_verbose_level": 1})
    assert status == 200
    try:
        for n in (1, 2):
            table_server.text("ensemble", text_input="Count", max_tokens=n)
        idle(table_server)
    finally:
        table_server.post("/v2/logging", {"log_verbose_level": 0})
    step = of_family(table_server, "nv_trt_llm_general_metrics")["iteration_counter"]
    assert eventually(lambda: last_log_line(table_server)["Iteration Counter"] == step)
    line = last_log_line(table_server)
    shown = {name: text for name, _, text in (row.rpartition(" ") for row in table_server.metrics())}
    ours = {name: text for name, text in shown.items() if name.startswith("nv_trt_llm")}
    assert len(line) == len(ours) == 22
    for family in metric_table.logged_families(is_static_batching=False):
        for sample in family.samples:
            labels = ",".join(sorted([*LABELS, f'{family.label}="{sample.category}"']))
            text, told = ours[f"{family.name}{{{labels}}}"], line[sample.log_key]
            if sample.category == metric_table.TIMESTAMP:
                at = datetime.strptime(str(told), TIMESTAMP_FORMAT).replace(tzinfo=UTC)
                assert abs(at.timestamp() - int(text) / 1e6) < 1
            else:
                assert int(str(told)) == int(text), sample.log_key


def test_dashboard_and_rules_ask_for_metrics_that_are_there(table_server: ProductServer) -> None:
    there = {re.split(r"[{ ]", line)[0] for line in table_server.metrics()} | {"up"}
    there |= {rule["record"] for rule in RULES if "record" in rule}
    for expression in expressions():
        assert metric_names(expression) <= there, expression
