"""The dashboard for Grafana and the alert rules ask for metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from baton.decide.metrics.catalog import METRICS, Histogram

DEPLOY = Path(__file__).parents[2] / "deploy"
EXPOSED = {
    metric.name + suffix
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if isinstance(metric, Histogram) else ("",))
}


def expressions(name: str) -> list[str]:
    text = (DEPLOY / name).read_text()
    if name.endswith(".json"):
        return [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    return re.findall(r"^ +expr: (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["grafana/baton.json", "prometheus/alerts.yml"])
def test_every_metric_that_is_asked_for_exists(name: str) -> None:
    found = expressions(name)
    assert len(found) > 10
    for expression in found:
        asked = re.findall(r"baton_\w+", expression)
        assert asked or expression.startswith("up"), expression
        assert set(asked) <= EXPOSED, expression


def test_every_panel_chooses_its_server() -> None:
    assert all('{instance=~"$instance"' in expression for expression in expressions("grafana/baton.json"))
