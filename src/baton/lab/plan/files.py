"""Write a plan as files: a Kubernetes manifest, and a cluster for `baton sim`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from baton.lab.plan.cluster import cluster_spec, kind_name
from baton.lab.plan.planned_fleet import WorkerGroup
from baton.lab.plan.recommend import Recommendation
from baton.lab.plan.serving import HOSTS_PORT, HTTP_PORT, host_command, is_alone, serve_toml

IMAGE = "baton:latest"
NOTE = """# The image is yours: Baton with PyTorch for CUDA. Every pod needs the model's files (docs/serving.md): by
# its hub name they are downloaded, a folder has to be mounted at the same path everywhere.
# Clients and hosts send the key of the secret:
#   kubectl create secret generic baton-keys --from-literal=api-key=$(openssl rand -base64 32)
"""
KEY_ENV = {
    "name": "BATON_API_KEY", "valueFrom": {"secretKeyRef": {"name": "baton-keys", "key": "api-key"}},
}  # fmt: skip
NAME_MAX = 40
"""Length limit of a manifest's name. With a role and a number appended, it stays a valid DNS label."""
CONFIG_KEY = "serve.toml"
GPU_RESOURCE, PRODUCT_LABEL = "nvidia.com/gpu", "baton.dev/gpu"
"""Resource and node label of a GPU pod. The cluster's administrator sets the label to the GPU's name."""


def cluster_yaml(found: Recommendation) -> str:
    """Return the fleet as a file for `baton sim --cluster`."""
    spec = cluster_spec(found.best, same_host=found.search.same_host)
    plain = msgspec.to_builtins(spec)
    keep = ("kinds", "workers", "queue_requests_max")
    return _yaml({key: plain[key] for key in keep})


def kubernetes_yaml(found: Recommendation) -> str:
    """Return the manifest: one server, plus a Deployment of hosts per group unless the server runs the only worker."""
    groups = found.best.groups
    name = _dns(f"baton-{found.search.options[0].cost.model.name}")
    head: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {CONFIG_KEY: serve_toml(found)}},
        _service(name, name, [HTTP_PORT]),
    ]
    if is_alone(found.best):
        documents = [*head, _deployment(name, 1, _serve(name, found))]
    else:
        join = f"{name}-join"
        joining = _service(join, name, [HTTP_PORT, HOSTS_PORT])
        joining["spec"]["publishNotReadyAddresses"] = True  # hosts join before the server is ready
        hosts = [
            _deployment(f"{name}-{group.role}-{place}", group.workers, _host(join, group))
            for place, group in enumerate(groups)
        ]
        documents = [*head, joining, _deployment(name, 1, _serve(name, found)), *hosts]
    return NOTE + "---\n".join(_yaml(document) for document in documents)


def _dns(name: str) -> str:
    """Return the name in the characters that Kubernetes allows: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:NAME_MAX].strip("-")


def _service(name: str, app: str, ports: list[int]) -> dict[str, Any]:
    listed = [{"name": f"port-{port}", "port": port, "targetPort": port} for port in ports]
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": listed},
    }  # fmt: skip


def _deployment(name: str, pods: int, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "replicas": pods,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }  # fmt: skip


def _serve(name: str, found: Recommendation) -> dict[str, Any]:
    """Return the server's pod spec. It requests GPUs if the server runs the plan's only worker."""
    alone = is_alone(found.best)
    services = [name] if alone else [name, f"{name}-join"]
    names = [part for service in services for part in ("--allowed-host", service)]
    ports = [HTTP_PORT] if alone else [HTTP_PORT, HOSTS_PORT]
    container: dict[str, Any] = {
        "name": "baton", "image": IMAGE,
        "command": ["baton", "serve", "--config", f"/etc/baton/{CONFIG_KEY}", "--host", "0.0.0.0", *names],
        "env": [KEY_ENV],
        "ports": [{"containerPort": port} for port in ports],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": HTTP_PORT}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/health", "port": HTTP_PORT}, "initialDelaySeconds": 300},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/baton"}],
    }  # fmt: skip
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
    return _on_gpus(pod, found.best.groups[0]) if alone else pod


def _host(join: str, group: WorkerGroup) -> dict[str, Any]:
    command = host_command(group, url=f"http://{join}:{HTTP_PORT}")
    container = {"name": "baton", "image": IMAGE, "command": command, "env": [KEY_ENV]}
    return _on_gpus({"containers": [container]}, group)


def _on_gpus(pod: dict[str, Any], group: WorkerGroup) -> dict[str, Any]:
    """Return the pod spec with the GPUs and node selector of one worker added."""
    pod["containers"][0]["resources"] = {"limits": {GPU_RESOURCE: group.option.facts.gpus}}
    pod["nodeSelector"] = {PRODUCT_LABEL: group.option.stock.hardware.name}
    return pod


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
