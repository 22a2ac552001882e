"""Convert a planned fleet to a simulated cluster."""

from __future__ import annotations

import re
from typing import Any

from msgspec import structs, to_builtins

from baton.core.config import BatchLimits
from baton.decide.cost.handoff import HandoffLink
from baton.lab.plan.capacity import requests_max
from baton.lab.plan.planned_fleet import PlannedFleet, WorkerGroup
from baton.lab.sim.spec import ClusterSpec, SimKind, SimKV, SimWorkers

BLOCK_TOKENS = 16


def cluster_spec(fleet: PlannedFleet, *, same_host: bool) -> ClusterSpec:
    """Return the cluster of a fleet. Every worker is on its own host, with its own GPUs and arena."""
    return ClusterSpec(
        kinds={kind_name(group): _kind(group, same_host=same_host) for group in fleet.groups},
        workers=tuple(
            SimWorkers(role=group.role, count=group.workers, kind=kind_name(group), host="each")
            for group in fleet.groups
        ),
        queue_requests_max=100_000,
    )


def kind_name(group: WorkerGroup) -> str:
    """Return the name of a group's worker kind, such as `prefill-a100-80g-sxm-tp2`."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{group.role}-{group.option.name.lower()}")


def _kind(group: WorkerGroup, *, same_host: bool) -> SimKind:
    blocks = max(1, group.option.facts.kv_tokens_max // BLOCK_TOKENS)
    return SimKind(
        cost=cost_section(group, same_host=same_host),
        kv=SimKV(blocks=blocks, block_tokens=BLOCK_TOKENS),
        batch=BatchLimits(step_tokens_max=step_tokens_max(group), requests_max=batch_requests_max(group)),
    )


def batch_requests_max(group: WorkerGroup) -> int:
    """Return the batch limit in requests for a group: twice the planned mean plus 64, at most `requests_max`."""
    return min(requests_max(group.option), round(2 * group.capacity.requests) + 64)


def step_tokens_max(group: WorkerGroup) -> int:
    """Return the step token limit for a group's workers. It leaves a token for each request that decodes at once."""
    return max(group.capacity.step_tokens_max, 2 * round(group.capacity.requests) + 8)


def cost_section(group: WorkerGroup, *, same_host: bool) -> dict[str, Any]:
    """Return the `cost` section for a group's workers, in the format that `load_cost` reads."""
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
