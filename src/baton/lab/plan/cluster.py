"""A fleet as a cluster that the simulator plays: every worker with its own GPUs, prices, arena and batch limits."""

from __future__ import annotations

import re
from typing import Any

from msgspec import structs, to_builtins

from baton.core.config import BatchLimits
from baton.decide.cost.handoff import HandoffLink
from baton.lab.plan.capacity import requests_max
from baton.lab.plan.search import PlannedFleet, WorkerGroup
from baton.lab.sim.spec import ClusterSpec, SimKind, SimKV, SimWorkers

BLOCK_TOKENS = 16


def cluster_spec(fleet: PlannedFleet, *, same_host: bool) -> ClusterSpec:
    """The fleet as a cluster file: every worker has its own GPUs, and so an arena of its own."""
    return ClusterSpec(
        kinds={kind_name(group): _kind(group, same_host=same_host) for group in fleet.groups},
        workers=tuple(
            SimWorkers(role=group.role, count=group.workers, kind=kind_name(group), host="each")
            for group in fleet.groups
        ),
        queue_requests_max=100_000,
    )


def kind_name(group: WorkerGroup) -> str:
    """Of the workers of a group, such as `prefill-a100-80g-sxm-tp2`."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{group.role}-{group.option.name.lower()}")


def _kind(group: WorkerGroup, *, same_host: bool) -> SimKind:
    blocks = max(1, group.option.facts.kv_tokens_max // BLOCK_TOKENS)
    return SimKind(
        cost=cost_section(group, same_host=same_host),
        kv=SimKV(blocks=blocks, block_tokens=BLOCK_TOKENS),
        batch=BatchLimits(step_tokens_max=step_tokens_max(group), requests_max=batch_requests_max(group)),
    )


def batch_requests_max(group: WorkerGroup) -> int:
    """Requests at once that the plan lets a worker of the group have: twice the mean, and room for a few."""
    return min(requests_max(group.option), round(2 * group.capacity.requests) + 64)


def step_tokens_max(group: WorkerGroup) -> int:
    """What the plan asks of the batcher: at least a token for every request that may decode at once."""
    return max(group.capacity.step_tokens_max, 2 * round(group.capacity.requests) + 8)


def cost_section(group: WorkerGroup, *, same_host: bool) -> dict[str, Any]:
    """The worker as `load_cost` takes it."""
    cost = group.option.cost
    gpus, hardware = cost.parallel.gpus, cost.hardware
    wire = cost.wire
    if same_host:
        wire = HandoffLink(bytes_per_s=hardware.intra_node_bytes_per_s * gpus)
    section: dict[str, Any] = {
        "model": "roofline", "llm": structs.asdict(cost.model), "hardware": group.option.stock.section,
        "engine": to_builtins(cost.engine), "weights": cost.precision.weights, "kv": cost.precision.kv,
        **structs.asdict(cost.parallel),
    }  # fmt: skip
    if wire is not None:
        section["wire"] = structs.asdict(wire)
    return section
