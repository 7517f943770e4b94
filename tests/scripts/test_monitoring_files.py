"""examples/monitoring and its services in docker-compose.yml: they parse, fit each other, and read metrics we have."""

import re
from typing import Any

import yaml

from backend_engine.triton_io import metric_table
from tests.support.monitoring import DASHBOARD, FOLDER, ROOT, RULES, expressions, metric_names, panels

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PROMETHEUS, GRAFANA = COMPOSE["services"]["prometheus"], COMPOSE["services"]["grafana"]
# What Triton Server itself has for each model (its documentation), and Prometheus for each target.
BASE = {
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_exec_count",
    "nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us", "nv_inference_pending_request_count",
    "up",
}  # fmt: skip


def known_names() -> set[str]:
    names = {family.name for family in metric_table.families(is_static_batching=False)}
    names |= {h.name + suffix for h in metric_table.HISTOGRAMS for suffix in ("_bucket", "_sum", "_count")}
    return names | {rule["record"] for rule in RULES if "record" in rule} | BASE


def test_panels_and_rules_read_metrics_that_exist() -> None:
    assert metric_names('sum by (le) (rate(a_b{x="or y"}[5m])) / clamp_min(c:d, 1) or absent(up)') == {
        "a_b",
        "c:d",
        "up",
    }
    for expression in expressions():
        names = metric_names(expression)
        assert names and names <= known_names(), expression


def test_label_values_in_panels_and_rules_exist() -> None:
    known = {
        (family.name, family.label, sample.category)
        for family in metric_table.families(is_static_batching=False)
        for sample in family.samples
    }
    found = [
        match
        for expression in expressions()
        for match in re.findall(r'(\w+)\{(\w+)="(\w+)"\}', expression)
        if match[0] != "up"
    ]
    assert len(found) > 5 and set(found) <= known


def test_the_dashboard_shows_what_it_promises_and_panels_do_not_overlap() -> None:
    text = " ".join(expressions())
    for name in (
        "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics", "inflight_generated_tokens_total",
        "inflight_time_to_first_token_seconds", "inflight_inter_token_latency_seconds",
        "inflight_request_queue_time_seconds", "inflight_preempted_requests_total", "inflight_reused_blocks_total",
        "nv_inference_request_failure", "nv_inference_queue_duration_us", "triton:queue_compute:ratio",
    ):  # fmt: skip
        assert name in text
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells and max(x for x, _ in mine) < 24, panel["title"]
        cells |= mine
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_both_services_are_pinned_and_optional() -> None:
    for service in (PROMETHEUS, GRAFANA):
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]
        assert service["profiles"] == ["monitoring"]


def test_what_the_services_mount_is_here_and_where_the_configuration_looks() -> None:
    mounts = {}
    for service in (PROMETHEUS, GRAFANA):
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists() and mode == ["ro"], volume
                mounts[target] = ROOT / source
            else:
                assert source in COMPOSE["volumes"]
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert all(path in mounts for path in prometheus["rule_files"])
    assert f"--config.file={next(t for t, s in mounts.items() if s.name == 'prometheus.yml')}" in PROMETHEUS["command"]
    (job,) = prometheus["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert discovery["names"] == [name for name in COMPOSE["services"] if name.startswith("inflight")]
    assert discovery["port"] == 8002 and job["job_name"] == "inflight"
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    for panel in panels():
        assert all(target["datasource"]["uid"] == source["uid"] for target in panel["targets"])
    (provider,) = yaml.safe_load((FOLDER / "grafana/provisioning/dashboards/inflight.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    assert (mounts[folder] / "inflight.json").is_file()
    assert GRAFANA["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/inflight.json"
    assert "/etc/grafana/provisioning" in mounts


def test_nobody_can_log_in_to_grafana_with_its_default_password() -> None:
    environment = GRAFANA["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true" and environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_alerts_say_something() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len(alerts) >= 4
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)
