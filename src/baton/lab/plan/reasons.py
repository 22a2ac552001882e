"""Explain the recommended fleet: its limits, its balance, and the alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.core.types import StepShape, prefill_pairs
from baton.lab.plan.candidates import Candidate, describe_candidate
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.planned_fleet import PlannedFleet, WorkerGroup
from baton.lab.plan.search import Search, Shape

LAYOUTS_NAMED_MAX = 3
"""Number of alternative parallel layouts that are named per role. The output states how many more there are."""
NETWORK_RATIO = 0.98
"""The network is the limit if the fleet carries less than this share of its scarcer side."""
LOW_RATIO = 0.3
"""If compute and bandwidth utilization are both below this, overhead dominates the step."""


def reasons(fleet: PlannedFleet, demand: WorkloadDemand) -> list[str]:
    """Return one sentence per group about its limit, and one about the balance of prefill and decode."""
    found = [_bound(group, demand) for group in fleet.groups]
    if fleet.having("prefill") and fleet.having("decode"):
        found.append(_balance(fleet, demand))
    return found


def _balance(fleet: PlannedFleet, demand: WorkloadDemand) -> str:
    """Return a sentence that names the scarcer side.

    It names the network if the fleet carries less than both sides and less than the wanted rate.
    """
    first, second = (sum(group.rate_rps for group in fleet.having(role)) for role in ("prefill", "decode"))
    sides = f"prefill workers carry {first:.2f} req/s together, decode workers {second:.2f}"
    if fleet.rate_rps < NETWORK_RATIO * min(first, second, demand.rate_rps or math.inf):
        return f"the network is scarcer than both sides: it carries the KV of {fleet.capacity_rps:.2f} req/s; {sides}"
    scarce, ratio = ("prefill", second / first) if first < second else ("decode", first / second)
    return f"{scarce} is the scarcer side: {sides} ({ratio:.2f}x)"


def _bound(group: WorkerGroup, demand: WorkloadDemand) -> str:
    cost, capacity = group.option.cost, group.capacity
    if group.role == "prefill":
        tokens = round(demand.input_tokens * (1 - demand.cached_ratio))
        cached = round(demand.input_tokens) - tokens
        shape = StepShape(prefill_tokens=tokens, prefill_chunks=1, prefill_pairs=prefill_pairs(tokens, cached))
        what = f"a prompt of {tokens} tokens takes {cost.step_s(shape) * 1e3:.0f} ms"
    else:
        requests = max(1, round(capacity.requests))
        shape = StepShape(decode_requests=requests, context_tokens=round(requests * demand.context_tokens))
        what = f"a step of {requests} requests takes {cost.step_s(shape) * 1e3:.1f} ms"
    compute, memory = cost.peak_ratios(shape)
    bound = "memory bandwidth" if memory > compute else "arithmetic"
    if max(compute, memory) < LOW_RATIO:
        bound = "overhead and exchange between GPUs" if cost.parallel.gpus > 1 else "overhead"
    return (
        f"{group.role} on {group.option.name} is bound by {bound}: {what}, which uses {compute:.0%} of the peak FLOP/s "
        f"and {memory:.0%} of the peak memory bandwidth; its limit is {capacity.limit}, at "
        f"{capacity.rate_rps:.2f} req/s a worker"
    )


def not_recommended(search: Search, candidates: Sequence[tuple[Candidate, PlannedFleet]]) -> list[str]:
    """Return lines about the alternatives: other fleets, the best first, and other parallel layouts of each role.

    Each line says why the alternative is worse, or that it does not meet the SLO.
    """
    (best, best_fleet), *others = candidates
    found = [describe_candidate(best, other, fleet, search) for other, fleet in others]
    shapes: dict[Shape, str] = {"disaggregated": "separate prefill and decode workers", "mixed": "mixed workers"}
    found += [
        f"{name}: no fleet of them meets the SLO with this hardware"
        for shape, name in shapes.items()
        if search.fleet(shape) is None
    ]
    return found + _other_layouts(search, best_fleet)


def _other_layouts(search: Search, best: PlannedFleet) -> list[str]:
    """Return lines about other parallel layouts of each role on the same GPUs, with their loss of capacity."""
    found: list[str] = []
    used = {(group.role, group.option.name) for group in best.groups}
    for group in best.groups:
        own = group.capacity.rate_rps / max(1e-12, group.option.price(search.objective))
        behind: list[tuple[float, str]] = []
        for option in search.options:
            if option.stock is not group.option.stock or (group.role, option.name) in used:
                continue
            capacity = search.capacity(group.role, option, group.workers)
            less = 1 - capacity.rate_rps / max(1e-12, option.price(search.objective)) / own
            behind.append((less, f"{group.role} on {option.name}: {_less(less)} ({capacity.limit})"))
        shown = sorted(each for each in behind if each[0] > 0.02)
        found += [words for _, words in shown[:LAYOUTS_NAMED_MAX]]
        rest = [less for less, _ in shown[LAYOUTS_NAMED_MAX:]]
        if rest:
            found.append(f"{group.role}: {len(rest)} other layouts carry {rest[0]:.0%} to {rest[-1]:.0%} less")
    return found


def _less(ratio: float) -> str:
    return "cannot meet the SLO" if ratio >= 1 else f"{ratio:.0%} less for its price"
