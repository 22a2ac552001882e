"""The chart renders the fleets that `baton plan` recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cli import key_flags, serve
from baton.cli.main import build_parser
from baton.lab.plan.files import helm_values
from baton.lab.plan.recommend import Recommendation, recommend
from baton.lab.plan.spec import read_plan_input
from tests.deploy.cluster_tools import ClusterTools

QUESTION: dict[str, Any] = {
    "llm": "llama3.1-8b", "objective": "goodput-per-gpu", "finalists": 0, "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 1500, "output_tokens": 250},
}  # fmt: skip
FLEETS = {
    "disaggregated": {"shape": "disaggregated", "tp": [2], "hardware": [{"name": "H100-80G-SXM", "gpus": 8}]},
    "one worker": {"shape": "mixed", "tp": [1], "hardware": [{"name": "H100-80G-SXM", "gpus": 1}]},
}


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_recommended_fleet_is_rendered_as_planned(
    tools: ClusterTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: str
) -> None:
    found = recommend(read_plan_input({**QUESTION, **FLEETS[fleet]}, tmp_path))
    file = tmp_path / "values.yaml"
    file.write_text(helm_values(found))
    objects = tools.template(values=file)
    assert [text for each in objects for text in tools.problems(each)] == []
    deployments = [each for each in objects if each["kind"] == "Deployment"]
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in deployments]
    gpus = sum(
        each["spec"]["replicas"] * container["resources"]["limits"].get("nvidia.com/gpu", 0)
        for each, container in zip(deployments, containers, strict=True)
    )
    assert gpus == found.best.gpus
    alone = sum(group.workers for group in found.best.groups) == 1
    assert len(deployments) == (1 if alone else 1 + len(found.best.groups))
    _check_server(found, objects, tmp_path, monkeypatch)
    for container in containers[1:]:
        assert "memory" not in container["resources"]["limits"], "the chart's own limit is too small for such a model"


def _check_server(
    found: Recommendation, objects: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start from the rendered command line, as far as the server's configuration."""
    (config,) = (each["data"] for each in objects if each["kind"] == "ConfigMap")
    (folder / "serve.toml").write_text(config["serve.toml"])
    (server,) = (
        each["spec"]["template"]["spec"]["containers"][0]
        for each in objects
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "baton"
    )
    monkeypatch.setenv(key_flags.API_KEY, "from-the-secret")
    words = [word.replace("/etc/baton/config", str(folder)) for word in ["serve", *server["args"]]]
    made = serve.configuration(build_parser().parse_args(words))
    workers = sum(group.workers for group in found.best.groups)
    own = made.topology.prefill + made.topology.decode + made.topology.mixed
    assert made.hosts.expected + own == workers
    assert made.slo.ttft_s == QUESTION["slo"]["ttft_s"]
    assert made.device == ("cuda" if own else "auto")
