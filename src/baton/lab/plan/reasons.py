"""Explain the recommended fleet: its limits, its balance, and the alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from baton.core.types import StepShape, prefill_pairs
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.search import Objective, PlannedFleet, Search, Shape, WorkerGroup
from baton.lab.plan.verify import VerifiedFleet

CUTS_MAX = 3
"""Number of alternative cuts named per role. The remaining ones are counted."""
NETWORK_RATIO = 0.98
"""The network is the limit if the fleet carries less than this share of its scarcer side."""
LOW_RATIO = 0.3
"""If compute and bandwidth utilization are both below this, overhead dominates the step."""
UNIT: Mapping[Objective, str] = {
    "cheapest": "req/s per USD/h", "goodput-per-dollar": "req/s per USD/h", "goodput-per-watt": "req/s per W",
    "goodput-per-gpu": "req/s per GPU",
}  # fmt: skip


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
        return f"the network is scarcer than both sides: it carries the KV of {fleet.rate_rps:.2f} req/s; {sides}"
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


def comparison(best: PlannedFleet, other: PlannedFleet, objective: Objective) -> str:
    """Return one line that compares another fleet with the best one, by the objective."""
    ratio = best.value(objective) / max(1e-12, other.value(objective))
    limits = ", ".join(f"{group.role}: {group.capacity.limit}" for group in other.groups)
    behind = f"{ratio:.2f}x behind" if ratio >= 1 else f"{1 / ratio:.2f}x ahead on paper"
    value = f"{other.value(objective):.3g} {UNIT[objective]}"
    return f"{other.name}: {other.rate_rps:.2f} req/s on {other.gpus} GPUs, {value}, {behind} ({limits})"


def not_recommended(search: Search, best: PlannedFleet, verified: Mapping[Shape, VerifiedFleet]) -> list[str]:
    """Return lines about the alternatives: the other shape, each GPU kind alone, and other cuts of each role.

    Each line says why the alternative is behind, or that no such fleet meets the SLO.
    """
    found: list[str] = []
    names = {best.name}
    for fleet, played in _alternatives(search, best, verified):
        if fleet.name not in names:
            names.add(fleet.name)
            found.append(comparison(best, fleet, search.objective) + played)
    shapes: dict[Shape, str] = {"disaggregated": "separate prefill and decode workers", "mixed": "mixed workers"}
    found += [
        f"{name}: no fleet of them meets the SLO with this hardware"
        for shape, name in shapes.items()
        if search.fleet(shape) is None
    ]
    return found + _cuts(search, best)


def _alternatives(
    search: Search, best: PlannedFleet, verified: Mapping[Shape, VerifiedFleet]
) -> Iterable[tuple[PlannedFleet, str]]:
    """Yield the other fleets, each with a note if it did not hold in simulation."""
    for each in verified.values():
        missed = each.played is not None or each.fleet.value(search.objective) > best.value(search.objective)
        not_held = "; it missed the SLO in simulation" if missed else "; so it was not simulated"
        yield each.fleet, "" if each.holds else not_held
    stocks = {option.stock.hardware.name for option in search.options}
    for name in sorted(stocks) if len(stocks) > 1 else ():
        fleet = search.fleet("best", keep=lambda option, name=name: option.stock.hardware.name == name)
        if fleet is not None:
            yield fleet, ""


def _cuts(search: Search, best: PlannedFleet) -> list[str]:
    """Return lines about other cuts of each role on the same hardware, with their loss of capacity per price."""
    found: list[str] = []
    for group in best.groups:
        own = group.capacity.rate_rps / max(1e-12, search.price(group.option))
        behind: list[tuple[float, str]] = []
        for option in search.options:
            if option.stock is not group.option.stock or option.name == group.option.name:
                continue
            capacity = search.capacity(group.role, option, group.workers)
            less = 1 - capacity.rate_rps / max(1e-12, search.price(option)) / own
            behind.append((less, f"{group.role} on {option.name}: {_less(less)} ({capacity.limit})"))
        shown = sorted(each for each in behind if each[0] > 0.02)
        found += [words for _, words in shown[:CUTS_MAX]]
        if len(shown) > CUTS_MAX:
            found.append(
                f"{group.role}: {len(shown) - CUTS_MAX} other cuts, {shown[CUTS_MAX][0]:.0%} to {shown[-1][0]:.0%} less"
            )
    return found


def _less(ratio: float) -> str:
    return "cannot meet the SLO" if ratio >= 1 else f"{ratio:.0%} less for its price"
