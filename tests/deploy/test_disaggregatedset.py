"""The hosts as LeaderWorkerSet's DisaggregatedSet: the pods are those of the base's Deployments."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.deploy import custom_resources
from tests.deploy.cluster_tools import ROOT, ClusterTools
from tests.deploy.test_chart import Objects, of_kind

KUSTOMIZE = ROOT / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def objects(tools: ClusterTools) -> Objects:
    return tools.kustomize(KUSTOMIZE / "disaggregatedset")


def templates(objects: Objects) -> dict[str, dict[str, Any]]:
    """Return the pods of each role."""
    (made,) = of_kind(objects, "DisaggregatedSet")
    return {role["name"]: role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in made["spec"]["roles"]}


def test_every_object_follows_its_schema(objects: Objects, tools: ClusterTools) -> None:
    (made,) = of_kind(objects, "DisaggregatedSet")
    assert custom_resources.problems(made) == []
    assert [text for each in objects if each is not made for text in tools.problems(each)] == []


@pytest.mark.parametrize("change", [{"roles": [{"name": "prefill", "replicas": 2}]}, {"role": []}])
def test_the_schema_of_a_set_refuses_others(objects: Objects, change: dict[str, Any]) -> None:
    made = copy.deepcopy(of_kind(objects, "DisaggregatedSet")[0])
    made["spec"] |= change
    assert custom_resources.problems(made)


def test_the_pods_are_those_of_the_base(objects: Objects, tools: ClusterTools) -> None:
    """So the network policies, disruption budgets and commands of the base hold for them."""
    base = tools.kustomize(KUSTOMIZE / "base")
    pods = {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(base, "Deployment")}
    assert templates(objects) == {role: pods[f"baton-{role}"] for role in ("prefill", "decode")}
    kept = [each for each in base if each["metadata"]["name"] not in ("baton-prefill", "baton-decode")]
    assert all(each in objects for each in kept)
    assert {each["metadata"]["name"] for each in of_kind(objects, "Deployment")} == {"baton"}
    assert len(of_kind(objects, "PodDisruptionBudget")) == 2
