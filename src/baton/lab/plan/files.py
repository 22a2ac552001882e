"""Write a plan as files: values for the Helm chart, and a cluster for `baton sim`."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import msgspec

from baton.lab.plan.cluster import cluster_spec, kind_name
from baton.lab.plan.planned_fleet import WorkerGroup
from baton.lab.plan.recommend import Recommendation
from baton.lab.plan.serving import host_flags, is_alone, serve_toml, served_model

NOTE = """# helm install baton deploy/helm/baton --values THIS_FILE (docs/integrations/kubernetes.md)
# The image needs PyTorch for CUDA. Memory and cores of the pods are not planned: set the resources of `worker`.
"""
FOLDER_NOTE = "# The model is a folder: set model.claim to a volume that has it.\n"
CHART_GROUPS = ("prefill", "decode")
"""Groups of the chart's own values."""
GPU_RESOURCE, PRODUCT_LABEL = "nvidia.com/gpu", "baton.dev/gpu"
"""Resource and node label of a GPU pod. The cluster's administrator sets the label to the GPU's name."""


def cluster_yaml(found: Recommendation) -> str:
    """Return the fleet as a file for `baton sim --cluster`."""
    spec = cluster_spec(found.best, same_host=found.search.same_host)
    plain = msgspec.to_builtins(spec)
    keep = ("kinds", "workers", "queue_requests_max")
    return _yaml({key: plain[key] for key in keep})


def helm_values(found: Recommendation) -> str:
    """Return values for the Helm chart: a group of hosts per group of the fleet, or one worker in the server's pod."""
    fleet, model = found.best, served_model(found.question.spec.llm)
    folder = Path(model).is_absolute() or found.question.spec.llm.endswith(".json")
    unplanned = {"memory": None}  # takes away the chart's own
    values: dict[str, Any] = {
        "model": {"name": f"/models/{Path(model).name}" if folder else model},
        "groups": dict.fromkeys(CHART_GROUPS),
    }
    if is_alone(fleet):
        (group,) = fleet.groups
        values["server"] = {
            "workers": {group.role: 1}, "args": ["--device=cuda"], "nodeSelector": _node(group),
            "resources": {"requests": unplanned, "limits": unplanned | _gpus(group)},
        }  # fmt: skip
    else:
        values["worker"] = {"resources": {"requests": unplanned, "limits": unplanned}}
        for place, group in enumerate(fleet.groups):
            name = group.role if len(fleet.having(group.role)) == 1 else f"{group.role}-{place}"
            values["groups"][name] = {
                "role": group.role, "replicas": group.workers, "args": host_flags(group),
                "resources": {"limits": _gpus(group)}, "nodeSelector": _node(group),
            }  # fmt: skip
    config = "config: |\n" + indent(serve_toml(found), "  ")  # a YAML library would fold its lines
    return NOTE + (FOLDER_NOTE if folder else "") + _yaml(values) + config


def _gpus(group: WorkerGroup) -> dict[str, int]:
    return {GPU_RESOURCE: group.option.facts.gpus}


def _node(group: WorkerGroup) -> dict[str, str]:
    return {PRODUCT_LABEL: group.option.stock.hardware.name}


def group_lines(found: Recommendation) -> list[tuple[str, ...]]:
    """Return one table row per group: role, workers, option, GPUs, rate, requests, step tokens, limit, kind name."""
    return [
        (
            group.role, str(group.workers), group.option.name, str(group.workers * group.option.facts.gpus),
            f"{group.capacity.rate_rps:.2f}", f"{group.capacity.requests:.0f}", str(group.capacity.step_tokens_max),
            group.capacity.limit, kind_name(group),
        )
        for group in found.best.groups
    ]  # fmt: skip


def _yaml(value: dict[str, Any]) -> str:
    return msgspec.yaml.encode(value).decode()
