"""The endpoint picker on Kubernetes: its objects follow their schemas, and Baton takes its command line."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from baton.cli.main import build_parser
from tests.deploy import custom_resources
from tests.deploy.cluster_tools import ROOT, ClusterTools
from tests.deploy.test_chart import Objects, command_line, of_kind


@pytest.fixture(scope="module")
def objects(tools: ClusterTools) -> Objects:
    return tools.kustomize(ROOT / "deploy" / "kubernetes" / "gateway")


def test_every_object_follows_its_schema(objects: Objects, tools: ClusterTools) -> None:
    (pool,) = of_kind(objects, "InferencePool")
    assert custom_resources.problems(pool) == []
    assert [text for each in objects if each is not pool for text in tools.problems(each)] == []


@pytest.mark.parametrize(
    "change", [{"selector": {}}, {"targetPorts": []}, {"targetPort": 8000}, {"endpointPickerRef": {}}]
)
def test_the_schema_of_a_pool_refuses_others(objects: Objects, change: dict[str, Any]) -> None:
    pool = copy.deepcopy(of_kind(objects, "InferencePool")[0])
    pool["spec"] |= change
    assert custom_resources.problems(pool)


def test_the_pool_names_the_picker_which_follows_the_pool(objects: Objects) -> None:
    (pool,), (service,), (deployment,) = (of_kind(objects, kind) for kind in ("InferencePool", "Service", "Deployment"))
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    assert [reference["port"]["number"]] == [port["port"] for port in service["spec"]["ports"]]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    args = build_parser().parse_args(command_line(container))
    assert args.pool.partition("/")[2] == pool["metadata"]["name"]
    assert (args.host, args.insecure) == ("0.0.0.0", True)
    assert [port["containerPort"] for port in container["ports"]] == [args.port]
    assert {container[name]["grpc"]["port"] for name in ("livenessProbe", "readinessProbe")} == {args.port}


def test_the_picker_may_read_what_it_asks_for(objects: Objects) -> None:
    (role,), (binding,) = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
    allowed = {(rule["apiGroups"][0], rule["resources"][0]): rule["verbs"] for rule in role["rules"]}
    assert allowed == {("inference.networking.k8s.io", "inferencepools"): ["get"], ("", "pods"): ["list"]}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
