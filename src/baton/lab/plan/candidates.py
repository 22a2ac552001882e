"""List the fleets that a plan compared: the recommended one, and why each other one is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Literal

from msgspec import Struct

from baton.lab.plan.planned_fleet import PRICE_UNIT, UNIT, PlannedFleet, gpus_text
from baton.lab.plan.search import Search, Shape
from baton.lab.plan.verify import VerifiedFleet

Verdict = Literal["recommended", "dearer", "missed the SLO", "short", "not simulated"]
"""Why a candidate is recommended or not.

`missed the SLO`: the best fleet of its shape missed it in simulation. `short`: it carries only a part of the asked
rate. `dearer`: its price with the pool penalty is higher; without an asked rate, its rate for that price is lower.
`not simulated`: it is better by the screening, but `finalists` left its shape out.
"""


RATES = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Request rates of the cost curve, as multiples of the asked one."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A fleet that the plan compared."""

    fleet: str
    verdict: Verdict
    gpus: int
    usd_per_hour: float
    price: float
    """Price in the objective's unit."""
    penalized_price: float
    """Price raised by the penalty for extra pools, which ranks fleets that carry the asked rate."""
    rate_rps: float
    """Planned rate: the asked one if the fleet carries it."""
    capacity_rps: float
    """Largest rate within the SLO, by the screening."""


def list_candidates(
    search: Search, best: PlannedFleet, verified: Mapping[Shape, VerifiedFleet]
) -> list[tuple[Candidate, PlannedFleet]]:
    """Return every compared fleet, the recommended one first and the others by worth."""
    found = {best.name: (_candidate(search, best, "recommended"), best)}
    for fleet, missed in _alternatives(search, verified):
        if fleet.name not in found:
            found[fleet.name] = (_candidate(search, fleet, _verdict(search, best, fleet, missed=missed)), fleet)
    return sorted(
        found.values(),
        key=lambda each: (each[0].verdict == "recommended", search.worth(each[1])),
        reverse=True,
    )


def _verdict(search: Search, best: PlannedFleet, fleet: PlannedFleet, *, missed: bool) -> Verdict:
    asked_rps = min(best.rate_rps, search.demand.rate_rps or 0.0)
    if fleet.rate_rps < asked_rps * (1 - 1e-3):
        return "short"
    if missed:
        return "missed the SLO"
    return "not simulated" if search.worth(fleet) > search.worth(best) else "dearer"


def _candidate(search: Search, fleet: PlannedFleet, verdict: Verdict) -> Candidate:
    return Candidate(
        fleet=fleet.name, verdict=verdict, gpus=fleet.gpus, usd_per_hour=fleet.usd_per_hour,
        price=fleet.price(search.objective), penalized_price=search.penalized_price(fleet),
        rate_rps=fleet.rate_rps, capacity_rps=fleet.capacity_rps,
    )  # fmt: skip


def _alternatives(search: Search, verified: Mapping[Shape, VerifiedFleet]) -> Iterable[tuple[PlannedFleet, bool]]:
    """Yield (fleet, its shape missed the SLO in simulation): the best of each shape, also on each kind of GPU alone.

    The fleets of a shape are screened with the derating factor that its simulations found.
    """
    shapes: tuple[Shape, ...] = ("disaggregated", "mixed")
    stocks = sorted({option.stock.name for option in search.options})
    for shape in shapes:
        played = verified.get(shape)
        missed = played is not None and not played.holds and played.played is not None
        if played is not None:
            yield played.fleet, missed
        believed = replace(search, derate=played.derate) if played is not None else search
        for name in stocks if len(stocks) > 1 or played is None else ():
            fleet = believed.fleet(shape, keep=lambda option, name=name: option.stock.name == name)
            if fleet is not None:
                yield fleet, missed


def describe_candidate(best: Candidate, other: Candidate, fleet: PlannedFleet, search: Search) -> str:
    """Return one line that compares another fleet with the recommended one."""
    objective = search.objective
    limits = ", ".join(f"{group.role}: {group.capacity.limit}" for group in fleet.groups)
    if search.demand.rate_rps is None:
        value, ratio = other.rate_rps / other.price, best.rate_rps / best.price * other.price / other.rate_rps
        behind = f"{ratio:.2f}x worse" if ratio >= 1 else f"{1 / ratio:.2f}x better"
        head = f"{other.rate_rps:.2f} req/s on {gpus_text(other.gpus)}, {value:.3g} {UNIT[objective]}, {behind}"
    else:
        unit, ratio = PRICE_UNIT[objective], other.price / best.price
        head = (
            f"{gpus_text(other.gpus)}, {other.price:.4g} {unit}, {ratio:.2f}x the price of the recommended fleet; "
            f"it carries up to {other.capacity_rps:.2f} req/s"
        )
    is_cheaper = best.price * other.rate_rps > other.price * best.rate_rps * (1 + 1e-9)
    return f"{other.fleet}: {head} ({limits}){_remark(other, search, is_cheaper=is_cheaper)}"


def _remark(other: Candidate, search: Search, *, is_cheaper: bool) -> str:
    match other.verdict:
        case "missed the SLO":
            return "; this shape missed the SLO in simulation"
        case "not simulated":
            return "; it was not simulated: give more --finalists"
        case "short":
            return "; it carries less than the asked rate"
        case _ if is_cheaper:
            return f"; every extra pool counts as {search.pool_penalty_ratio:.0%} of the price (--pool-penalty)"
        case _:
            return ""


class CostPoint(Struct, frozen=True, kw_only=True):
    """Cheapest fleet of one shape that carries a request rate."""

    shape: Shape
    rate_rps: float
    price: float
    """Price in the objective's unit."""
    fleet: str


def cost_points(search: Search, best: PlannedFleet, verified: Mapping[Shape, VerifiedFleet]) -> list[CostPoint]:
    """Return the price of the cheapest fleet of each shape, at several multiples of the recommended fleet's rate.

    A shape's rates are derated as its simulations require. At the asked rate, the result is therefore the fleet of that
    shape that the plan compares. At other rates, fleets have one pool per role.
    """
    found: list[CostPoint] = []
    shapes: tuple[Shape, ...] = ("disaggregated", "mixed")
    for shape, multiple in product(shapes, RATES):
        rate_rps = multiple * (search.demand.rate_rps or best.rate_rps)
        derate = verified[shape].derate if shape in verified else search.derate
        extra = search.extra_pools_max if rate_rps == search.demand.rate_rps else 0
        demand = replace(search.demand, rate_rps=rate_rps)
        fleet = replace(search, derate=derate, demand=demand, extra_pools_max=extra).fleet(shape)
        if fleet is not None and fleet.rate_rps >= rate_rps * (1 - 1e-3):
            price = fleet.price(search.objective)
            found.append(CostPoint(shape=shape, rate_rps=rate_rps, price=price, fleet=fleet.name))
    return found
