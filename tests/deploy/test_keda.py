"""The chart with KEDA: each group has a ScaledObject, and Baton's scaler answers at its address."""

from __future__ import annotations

import pytest

from baton.cli.main import build_parser
from baton.integrations.keda.scaler import role_of, workers_per_pod
from tests.deploy import custom_resources
from tests.deploy.cluster_tools import ClusterTools
from tests.deploy.test_chart import Objects, command_line, of_kind

KEDA = ("worker.autoscaling.enabled=true", "worker.autoscaling.keda=true", "worker.autoscaling.minReplicas=0")


@pytest.fixture(scope="module", params=[(), ("tls.secret=baton-tls",), ("networkPolicy.enabled=false",)])
def objects(request: pytest.FixtureRequest, tools: ClusterTools) -> Objects:
    return tools.template(*KEDA, *request.param)


def test_every_object_follows_the_schema_of_kubernetes(objects: Objects, tools: ClusterTools) -> None:
    assert [text for each in objects if each["kind"] != "ScaledObject" for text in tools.problems(each)] == []
    assert [text for each in of_kind(objects, "ScaledObject") for text in custom_resources.problems(each)] == []


def test_each_group_is_scaled_by_its_role(objects: Objects) -> None:
    """The scaler takes the metadata, and the addresses lead to its pod."""
    deployments = {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(objects, "Deployment")}
    scaled = of_kind(objects, "ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == {"baton-prefill", "baton-decode"}
    for each in scaled:
        (trigger,) = each["spec"]["triggers"]
        labels = deployments[each["spec"]["scaleTargetRef"]["name"]]["metadata"]["labels"]
        metadata = dict(trigger["metadata"])
        assert metadata.pop("scalerAddress").startswith("baton-keda.")
        assert role_of(metadata) == labels["baton.dev/role"]
        assert workers_per_pod(metadata) == 1
        assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
        assert each["spec"]["minReplicaCount"] == 0
    (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "baton-keda")
    assert service["spec"]["selector"].items() <= deployments["baton-keda"]["metadata"]["labels"].items()
    assert service["spec"]["ports"] == [{"name": "grpc", "port": 6000, "targetPort": "grpc"}]
    assert of_kind(objects, "HorizontalPodAutoscaler") == []


def test_baton_takes_the_command_lines(objects: Objects) -> None:
    containers = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in of_kind(objects, "Deployment")
    }
    args = build_parser().parse_args(command_line(containers["baton-keda"]))
    assert args.url.endswith("://baton-hosts:8000")
    assert (args.host, args.insecure) == ("0.0.0.0", True)
    assert [port["containerPort"] for port in containers["baton-keda"]["ports"]] == [args.port]
    assert {each["name"] for each in containers["baton-keda"]["env"]} - {"SSL_CERT_FILE"} == {
        "BATON_ADMIN_KEY", "BATON_API_KEY",
    }  # fmt: skip
    server = build_parser().parse_args(command_line(containers["baton"]))
    assert (server.launcher, server.hosts) == ("external", 2), "one host of each group starts the server"


def test_only_keda_reaches_the_scaler(objects: Objects) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "NetworkPolicy")}
    if policies:
        (rule,) = policies["baton-keda"]["ingress"]
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]
        assert any("keda" in str(rule.get("from", "")) for rule in policies["baton"]["ingress"])


def test_an_autoscaler_of_kubernetes_needs_a_replica(tools: ClusterTools) -> None:
    done = tools.refused(KEDA[0], KEDA[2])
    assert done.returncode != 0
    assert "needs autoscaling.keda" in done.stderr
