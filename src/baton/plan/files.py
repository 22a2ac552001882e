"""A plan as files: configuration of `baton serve`, a Kubernetes manifest, a cluster for `baton sim`."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.core.config import BatchLimits, Config, KVConfig, SloConfig, Topology
from baton.core.types import Role
from baton.plan.answer import Answer
from baton.plan.search import Fleet, Group
from baton.plan.verify import BLOCK_TOKENS, batch_requests_max, cluster_spec, kind_name, step_tokens_max

IMAGE = "baton:latest"
PORT = 8000
CONFIG_KEY = "serve.toml"
GPU_RESOURCE, PRODUCT_LABEL = "nvidia.com/gpu", "baton.dev/gpu"
"""What a pod asks of a node: so many GPUs, and the kind by a label that the cluster's owner sets."""


def serve_config(found: Answer) -> Config:
    """The configuration of a server with the plan's workers.

    Batch limits hold for all workers of a server: the largest step that a group asks for, and its most requests. The
    SLO is the whole one that was asked for: the server itself takes off what loading from a tier takes.
    """
    best, slo = found.best, found.question.demand.slo
    groups = best.groups
    kv_tokens = min(group.option.facts.kv_tokens_max for group in groups)
    return Config(
        model=found.search.options[0].cost.model.name,
        topology=Topology(prefill=_count(best, "prefill"), decode=_count(best, "decode"), mixed=_count(best, "mixed")),
        batch=BatchLimits(
            step_tokens_max=max(step_tokens_max(group) for group in groups),
            requests_max=max(batch_requests_max(group) for group in groups),
        ),
        kv=KVConfig(block_tokens=BLOCK_TOKENS, blocks=kv_tokens // BLOCK_TOKENS),
        slo=SloConfig(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) if refuses(found) else SloConfig(),
    )


def refuses(found: Answer) -> bool:
    """Whether requests are to be promised the SLO: those that would miss it are refused then."""
    return found.admissions[0].admission == "slo" if found.admissions else "slo" in found.question.spec.admission


def _count(fleet: Fleet, role: Role) -> int:
    return sum(group.workers for group in fleet.having(role))


def serve_toml(found: Answer) -> str:
    """The same as a file, with what it cannot say in comments: the GPUs of each worker."""
    config = serve_config(found)
    lines = [
        f"# {found.best.name}",
        f"# {found.best.rate_rps:.2f} req/s within the SLO; `baton serve --config FILE`",
        *(
            f"# each {group.role} worker: {group.option.facts.gpus} x {group.option.stock.hardware.name}, "
            f"{group.option.name.partition(' ')[2]}, up to {group.capacity.step_tokens_max} tokens a step"
            for group in found.best.groups
        ),
        *(
            f"# with the tier {tier.name}, {tier.size_bytes:.3g} bytes {'for all hosts' if tier.shared else 'a host'}: "
            "add [[tiers]] with its url (docs/stores.md)"
            for tier in found.question.spec.tiers
            if found.tiers and tier.name == found.tiers[0].tier
        ),
    ]
    sections: dict[str, dict[str, object]] = {
        "topology": msgspec.structs.asdict(config.topology),
        "batch": msgspec.structs.asdict(config.batch),
        "kv": {"block_tokens": config.kv.block_tokens, "blocks": config.kv.blocks},
    }
    if refuses(found):
        sections["slo"] = msgspec.structs.asdict(config.slo)
    lines.append(f"model = {_value(config.model)}")
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return msgspec.json.encode(value).decode()


def cluster_yaml(found: Answer) -> str:
    """The cluster as `baton sim --cluster` takes it."""
    spec = cluster_spec(found.best, same_host=found.search.same_host)
    plain = msgspec.to_builtins(spec)
    keep = ("kinds", "workers", "queue_requests_max")
    return _yaml({key: plain[key] for key in keep})


def kubernetes_yaml(found: Answer) -> str:
    """A manifest: on one node a single pod with all GPUs; otherwise a server, and a Deployment of hosts per group."""
    groups = found.best.groups
    name = f"baton-{found.search.options[0].cost.model.name.replace('.', '-')}"
    head: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {CONFIG_KEY: serve_toml(found)}},
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": [{"port": PORT, "targetPort": PORT}]},
        },
    ]  # fmt: skip
    hardware = {group.option.stock.hardware.name: group.option.stock.hardware for group in groups}
    if len(hardware) == 1 and found.best.gpus <= next(iter(hardware.values())).gpus_per_node:
        serve = _serve(name, gpus=found.best.gpus, product=next(iter(hardware)))
        return "---\n".join(_yaml(document) for document in (*head, _deployment(name, 1, serve)))
    hosts = [_deployment(f"{name}-{_label(group)}", group.workers, _host(name, group)) for group in groups]
    note = (
        "# Several nodes: each worker is a host that joins the server with `baton host --join`. A draft: the server\n"
        "# still needs `--hosts` and a `hosts.port` that its Service has too, the hosts the model's files\n"
        "# (docs/operations.md).\n"
    )
    documents = (*head, _deployment(name, 1, _serve(name, gpus=0, product="")), *hosts)
    return note + "---\n".join(_yaml(document) for document in documents)


def _label(group: Group) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in kind_name(group))


def _deployment(name: str, pods: int, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "replicas": pods,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }  # fmt: skip


def _serve(name: str, *, gpus: int, product: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "baton", "image": IMAGE,
        "command": ["baton", "serve", "--config", f"/etc/baton/{CONFIG_KEY}", "--host", "0.0.0.0"],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": PORT}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/health", "port": PORT}, "initialDelaySeconds": 300},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/baton"}],
    }  # fmt: skip
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
    if gpus:
        container["resources"] = {"limits": {GPU_RESOURCE: gpus}}
        pod["nodeSelector"] = {PRODUCT_LABEL: product}
    return pod


def _host(name: str, group: Group) -> dict[str, Any]:
    return {
        "nodeSelector": {PRODUCT_LABEL: group.option.stock.hardware.name},
        "containers": [
            {
                "name": "baton", "image": IMAGE,
                "command": ["baton", "host", "--join", f"http://{name}:{PORT}", f"--{group.role}", "1"],
                "resources": {"limits": {GPU_RESOURCE: group.option.facts.gpus}},
            }
        ],
    }  # fmt: skip


def group_lines(found: Answer) -> list[tuple[str, ...]]:
    """A row per group for a table: role, workers, GPUs, what each carries, batch, limit."""
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
