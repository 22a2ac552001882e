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

Verdict = Literal["recommended", "dearer", "missed the SLO", "short"]
"""Why a candidate is recommended or not.

`missed the SLO`: in simulation. `short`: it carries only a part of the asked rate. `dearer`: its price with the pool
penalty is higher; without an asked rate, its rate per price is lower.
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
    return "missed the SLO" if missed or search.worth(fleet) > search.worth(best) else "dearer"


def _candidate(search: Search, fleet: PlannedFleet, verdict: Verdict) -> Candidate:
    return Candidate(
        fleet=fleet.name, verdict=verdict, gpus=fleet.gpus, usd_per_hour=fleet.usd_per_hour,
        price=fleet.price(search.objective), penalized_price=search.penalized_price(fleet),
        rate_rps=fleet.rate_rps, capacity_rps=fleet.capacity_rps,
    )  # fmt: skip


def _alternatives(search: Search, verified: Mapping[Shape, VerifiedFleet]) -> Iterable[tuple[PlannedFleet, bool]]:
    """Yield (fleet, missed the SLO in simulation): the best of each shape, also on each kind of GPU alone.

    The fleets of a shape are screened with the derating factor that its simulations found.
    """
    shapes: tuple[Shape, ...] = ("disaggregated", "mixed")
    stocks = sorted({option.stock.name for option in search.options})
    for shape in shapes:
        played = verified.get(shape)
        if played is not None:
            yield played.fleet, not played.holds and played.played is not None
        believed = replace(search, derate=played.derate) if played is not None else search
        for name in stocks if len(stocks) > 1 or played is None else ():
            fleet = believed.fleet(shape, keep=lambda option, name=name: option.stock.name == name)
            if fleet is not None:
                yield fleet, False


def describe_candidate(best: Candidate, other: Candidate, fleet: PlannedFleet, search: Search) -> str:
    """Return one line that compares another fleet with the recommended one."""
    objective = search.objective
    limits = ", ".join(f"{group.role}: {group.capacity.limit}" for group in fleet.groups)
    if search.demand.rate_rps is None:
        value, ratio = other.rate_rps / other.price, best.rate_rps / best.price * other.price / other.rate_rps
        behind = f"{ratio:.2f}x worse" if ratio >= 1 else f"{1 / ratio:.2f}x better before the simulation"
        head = f"{other.rate_rps:.2f} req/s on {gpus_text(other.gpus)}, {value:.3g} {UNIT[objective]}, {behind}"
    else:
        unit, ratio = PRICE_UNIT[objective], other.price / best.price
        head = (
            f"{gpus_text(other.gpus)}, {other.price:.4g} {unit}, {ratio:.2f}x the price of the recommended fleet; "
            f"it carries up to {other.capacity_rps:.2f} req/s"
        )
    return f"{other.fleet}: {head} ({limits}){_remark(best, other, search)}"


def _remark(best: Candidate, other: Candidate, search: Search) -> str:
    if other.verdict == "missed the SLO":
        return "; it missed the SLO in simulation"
    if other.verdict == "short":
        return "; it carries less than the asked rate"
    if other.price < best.price * (1 - 1e-9):
        return f"; more pools count {search.pool_penalty_ratio:.0%} of the price each (--pool-penalty)"
    return ""


class CostPoint(Struct, frozen=True, kw_only=True):
    """Cheapest fleet of one shape that carries a request rate."""

    shape: Shape
    rate_rps: float
    price: float
    """Price in the objective's unit."""
    fleet: str


def cost_points(search: Search, verified: Mapping[Shape, VerifiedFleet]) -> list[CostPoint]:
    """Return the price of the cheapest fleet of each shape, at several multiples of the asked request rate.

    Empty if no rate is asked. A shape's rates are derated as its simulations require. At the asked rate, the result is
    therefore the fleet of that shape that the plan compares.
    """
    asked_rps, found = search.demand.rate_rps, list[CostPoint]()
    shapes: tuple[Shape, ...] = ("disaggregated", "mixed")
    for shape, multiple in product(shapes, RATES if asked_rps is not None else ()):
        rate_rps = multiple * (asked_rps or 0.0)
        derate = verified[shape].derate if shape in verified else search.derate
        fleet = replace(search, derate=derate, demand=replace(search.demand, rate_rps=rate_rps)).fleet(shape)
        if fleet is not None and fleet.rate_rps >= rate_rps * (1 - 1e-3):
            price = fleet.price(search.objective)
            found.append(CostPoint(shape=shape, rate_rps=rate_rps, price=price, fleet=fleet.name))
    return found
