"""What examples/monitoring asks Prometheus for: the expressions of the dashboard and the rules, and their metrics."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "dashboards" / "inflight.json").read_text())
RULES = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]  # fmt: skip


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in RULES]


def metric_names(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]|\bby \([^)]*\)|\{[^}]*\}', " ", expression)
    words = set(re.findall(r"[a-zA-Z_:][\w:]*(?!\w*\s*\()", bare))
    return {word for word in words if not re.search(rf"\b{word}\s*\(", bare)} - {"or", "and", "by"}
