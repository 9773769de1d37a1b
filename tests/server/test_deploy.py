"""The dashboard and the docs name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from paceline.config import EngineConfig
from paceline.engine.virtual.build import build_virtual
from paceline.server.engine_queries import EngineQueries
from paceline.server.metrics import ServerCounters, render
from paceline.server.queries import GetMetrics

ROOT = Path(__file__).parents[2]


def metric_names() -> set[str]:
    engine = build_virtual(EngineConfig(executor="virtual"), {"num_pages": 64})
    try:
        families = EngineQueries(engine).execute(GetMetrics()).result()
    finally:
        engine.close()
    text = render([*families, *ServerCounters().families("front-end-0")], engine_up=True).decode()
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {name, f"{name}_bucket"} if kind == "histogram" else {name}
    return found


def test_the_dashboard_uses_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    payload = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"paceline_\w+", target["expr"])
    }
    assert len(payload) > 20 and payload <= metric_names()


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    for name in metric_names():
        plain = name.removeprefix("paceline_").removesuffix("_bucket")
        assert plain in text, f"docs/serving.md does not document {name}"
