"""The kustomize base and its components give the objects of the Helm chart."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import custom_resources
from tests.deploy.cluster_tools import ROOT, ClusterTools

KUSTOMIZE = ROOT / "deploy" / "kubernetes"
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
CHECKSUM = "checksum/config"
HASHED = re.compile(r"baton-config-[0-9a-z]{10}\b")
COMPONENTS = {
    "autoscaling": ("worker.autoscaling.enabled=true",),
    "engine-pods": ("enginePods=app=vllm", "groups.prefill=null", "groups.decode=null"),
    "gpu": ("worker.args={--device=cuda}", r"worker.resources.limits.nvidia\.com/gpu=1"),
    "keda": ("worker.autoscaling.enabled=true", "worker.autoscaling.keda=true"),
    "models": ("model.claim=baton-models",),
    "monitoring": ("serviceMonitor.enabled=true",),
    "node-kv": ("nodeKv.enabled=true",),
    "tls": ("tls.secret=baton-tls",),
}
ALL = tuple(sorted(COMPONENTS))
SCALERS = ("autoscaling", "keda")
"""Each of them alone sets the replicas."""
FOR_HOSTS = tuple(name for name in ALL if name != "engine-pods")
"""Components that go together: `engine-pods` removes the hosts."""
SCALER_OF_HELM, SCALER = "baton-keda.llm:6000", "baton-keda.default:6000"
"""The chart knows its namespace. An overlay names it in a patch."""


def comparable(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the objects by kind and name, without what each of both tools adds."""
    text = json.dumps(objects).replace(SCALER_OF_HELM, SCALER)
    found = json.loads(HASHED.sub("baton-config", text))
    for each in found:
        metadata = each["metadata"]
        for named in (metadata, *each.get("subjects", ())):
            named.pop("namespace", None)  # that of the release, or of an overlay
        for label in OF_HELM:
            metadata["labels"].pop(label, None)
        template = each.get("spec", {}).get("template", {}).get("metadata", {})
        template.get("annotations", {}).pop(CHECKSUM, None)
        if template.get("annotations") == {}:
            del template["annotations"]
        if each["kind"] == "ConfigMap":
            each["data"] = {name: text.strip() for name, text in each["data"].items()}
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}


def overlay(folder: Path, *components: str) -> Path:
    """Write an overlay of the base with these components, and return its folder."""
    base = os.path.relpath(KUSTOMIZE, folder)  # kustomize refuses absolute paths
    lines = [f"resources: [{base}/base]", "components:"]
    lines += [f"  - {base}/components/{name}" for name in components]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return folder


def test_the_base_is_the_chart_with_its_defaults(tools: ClusterTools) -> None:
    assert comparable(tools.kustomize(KUSTOMIZE / "base")) == comparable(tools.template())


def test_each_component_is_compared() -> None:
    assert tuple(sorted(each.name for each in (KUSTOMIZE / "components").iterdir())) == ALL


@pytest.mark.parametrize("name", ALL)
def test_a_component_is_the_chart_with_its_values(tools: ClusterTools, tmp_path: Path, name: str) -> None:
    found = tools.kustomize(overlay(tmp_path, name))
    assert comparable(found) == comparable(tools.template(*COMPONENTS[name]))


@pytest.mark.parametrize("left_out", SCALERS)
def test_all_components_are_the_chart_with_all_values(tools: ClusterTools, tmp_path: Path, left_out: str) -> None:
    """So the scaler and Prometheus reach a server with TLS, as the hosts do."""
    names = [name for name in FOR_HOSTS if name not in (left_out, "gpu")]
    values = [value for name in names for value in COMPONENTS[name]]
    found, wanted = comparable(tools.kustomize(overlay(tmp_path, *names))), comparable(tools.template(*values))
    for objects in (found, wanted):  # components add flags in another order
        objects["Deployment baton"]["spec"]["template"]["spec"]["containers"][0]["args"].sort()
    assert found == wanted


@pytest.mark.parametrize("left_out", SCALERS)
def test_all_components_go_together(tools: ClusterTools, tmp_path: Path, left_out: str) -> None:
    found = tools.kustomize(overlay(tmp_path, *(name for name in FOR_HOSTS if name != left_out)))
    known = [each for each in found if each["kind"] != "ServiceMonitor" and not custom_resources.is_known(each)]
    assert [text for each in known for text in tools.problems(each)] == []
    assert [text for each in found if custom_resources.is_known(each) for text in custom_resources.problems(each)] == []
