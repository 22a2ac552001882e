"""Baton as the runtime of a KServe LLMInferenceService: KServe's schema and Baton's command line hold for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from baton.cli.main import build_parser
from tests.deploy import custom_resources
from tests.deploy.cluster_tools import ROOT, ClusterTools
from tests.deploy.test_chart import command_line, of_kind


@pytest.fixture(scope="module")
def service(tools: ClusterTools) -> dict[str, Any]:
    (made,) = of_kind(tools.kustomize(ROOT / "deploy" / "kubernetes" / "kserve"), "LLMInferenceService")
    return made


def test_the_service_follows_its_schema(service: dict[str, Any], tools: ClusterTools) -> None:
    assert custom_resources.problems(service) == []
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "baton"}, "spec": service["spec"]["template"]}
    assert tools.problems(pod) == []


@pytest.mark.parametrize("change", [{"model": {"name": "m"}}, {"replica": 2}, {"router": {"scheduler": {"pools": {}}}}])
def test_the_schema_of_a_service_refuses_others(service: dict[str, Any], change: dict[str, Any]) -> None:
    made = copy.deepcopy(service)
    made["spec"] |= change
    assert custom_resources.problems(made)


def test_baton_takes_the_command_line(service: dict[str, Any]) -> None:
    (container,) = service["spec"]["template"]["containers"]
    args = build_parser().parse_args(command_line(container))
    assert container["name"] == "main"
    assert (args.models, args.served_name, args.insecure) == (["/mnt/models"], [service["spec"]["model"]["name"]], True)
    assert {args.tls_cert.rpartition("/")[0], args.tls_key.rpartition("/")[0]} == {"/var/run/kserve/tls"}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {(probe["port"], probe["scheme"]) for probe in probes} == {(args.port, "HTTPS")}
