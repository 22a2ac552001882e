"""The verdict of a plan in plain words: what to buy, what it costs, its headroom, and why not the next best fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton.lab.plan.candidates import Candidate, describe_candidate
from baton.lab.plan.planned_fleet import PRICE_UNIT, UNIT, PlannedFleet, WorkerGroup, gpus_text
from baton.lab.plan.play import FleetResults
from baton.lab.plan.search import Search
from baton.lab.plan.verify import HEADROOM


def verdict_lines(
    search: Search,
    best: PlannedFleet,
    played: FleetResults | None,
    candidates: Sequence[tuple[Candidate, PlannedFleet]],
) -> list[str]:
    """Return the verdict: the purchase, the rate and its headroom, the simulation, and the next best fleet."""
    return [
        _purchase(best, search),
        _headroom(search, best),
        *_simulated(search, played),
        *_next_best(search, candidates),
    ]


def _purchase(best: PlannedFleet, search: Search) -> str:
    gpus: Counter[str] = Counter()
    for group in best.groups:
        gpus[group.option.stock.name] += group.workers * group.option.facts.gpus
    what = " and ".join(f"{count} x {name}" for name, count in gpus.items())
    unit = PRICE_UNIT[search.objective]
    price = f"{best.usd_per_hour:,.2f} USD/h" if best.usd_per_hour else f"{best.price(search.objective):,.4g} {unit}"
    shape = "disaggregate" if best.having("prefill") else "do not disaggregate"
    return f"{shape}: use {what} ({price}): {' and '.join(map(_group_text, best.groups))}"


def _group_text(group: WorkerGroup) -> str:
    workers = f"{group.workers} {group.role} worker{'s' if group.workers != 1 else ''}"
    spare = f", {group.spare_workers} of them spare" if group.spare_workers else ""
    return f"{workers} of {group.option.name} ({gpus_text(group.option.facts.gpus)} each{spare})"


def _headroom(search: Search, best: PlannedFleet) -> str:
    """Return what the fleet carries, and what is left above the asked rate."""
    asked_rps, demand = search.demand.rate_rps, search.demand
    slo = f"TTFT {demand.slo.ttft_s:g} s and TPOT {demand.slo.tpot_s:g} s for {demand.attainment_ratio:.0%} of requests"
    if asked_rps is None:
        value = f"{best.value(search.objective):.4g} {UNIT[search.objective]}"
        return f"it carries up to {best.rate_rps:.2f} req/s within {slo}: {value}"
    if best.rate_rps < asked_rps * (1 - 1e-3):
        return (
            f"too few GPUs: it carries {best.rate_rps:.2f} of {asked_rps:g} req/s within {slo}; about "
            f"{asked_rps / best.rate_rps:.1f} times as many GPUs are needed"
        )
    spares = [f"{group.spare_workers} of {group.workers} {group.role}" for group in best.groups if group.spare_workers]
    after = f" after the loss of {' and '.join(spares)} workers" if spares else ""
    return (
        f"it carries the asked {asked_rps:g} req/s within {slo}{after}; its headroom is {best.spare_ratio:.0%}, up to "
        f"{best.capacity_rps:.2f} req/s by the screening"
    )


def _simulated(search: Search, played: FleetResults | None) -> list[str]:
    if played is None:
        return []
    wanted = search.demand.attainment_ratio
    missed = "" if played.attainment_ratio >= wanted else f", less than {wanted:.0%}: do not rely on this fleet"
    return [
        f"in simulation at {HEADROOM:g} times the rate, {played.attainment_ratio:.1%} of {played.results.requests} "
        f"requests met the SLO{missed}"
    ]


def _next_best(search: Search, candidates: Sequence[tuple[Candidate, PlannedFleet]]) -> list[str]:
    """Return why the next best fleet is not recommended. Empty if there is no other fleet."""
    (best, _), *others = candidates
    ranked = [each for each in others if each[0].verdict == "dearer"] or others
    return [f"the next best is {describe_candidate(best, *ranked[0], search)}"] if ranked else []
