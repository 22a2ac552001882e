"""Follow a fleet over time: the next purchases while the load grows, and the workers that each hour of a day needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import Struct

from baton.lab.plan.planned_fleet import PRICE_UNIT, PlannedFleet, gpus_text
from baton.lab.plan.search import Search

MONTHS = 24
"""Months for which purchases are planned."""


class LoadStep(Struct, frozen=True, kw_only=True):
    """The cheapest fleet of the recommended kinds of workers at one time."""

    at: int
    """Months from now, or hour of the day."""
    rate_rps: float
    fleet: str
    gpus: int
    price: float
    """Price in the objective's unit."""


def growth_steps(search: Search, best: PlannedFleet, growth_ratio: float) -> list[LoadStep]:
    """Return the first fleet of each size for a load that grows by this ratio a month. Empty without growth.

    The last step is the largest one that the stock of GPUs allows.
    """
    rate_rps, found = search.demand.rate_rps or 0.0, list[LoadStep]()
    for month in range(MONTHS + 1) if growth_ratio > 0 else ():
        step = _step(search, best, month, rate_rps * (1 + growth_ratio) ** month)
        if step is None:
            break
        if not found or step.fleet != found[-1].fleet:
            found.append(step)
    return found


def day_steps(search: Search, best: PlannedFleet, rates_rps: Sequence[float]) -> list[LoadStep]:
    """Return the cheapest fleet for each hour of the day, whose rates are given."""
    steps = [_step(search, best, hour, rate_rps) for hour, rate_rps in enumerate(rates_rps)]
    return [step for step in steps if step is not None]


def _step(search: Search, best: PlannedFleet, at: int, rate_rps: float) -> LoadStep | None:
    """Return the cheapest fleet of the workers of `best` for a rate. None: the stock is too small."""
    kinds = {group.option.name for group in best.groups}
    asked = replace(search, demand=replace(search.demand, rate_rps=rate_rps))
    shape = "disaggregated" if best.having("prefill") else "mixed"
    fleet = asked.fleet(shape, keep=lambda option: option.name in kinds)
    if fleet is None or fleet.rate_rps < rate_rps * (1 - 1e-3):
        return None
    price = fleet.price(search.objective)
    return LoadStep(at=at, rate_rps=rate_rps, fleet=fleet.name, gpus=fleet.gpus, price=price)


def describe_growth(search: Search, steps: Sequence[LoadStep], growth_ratio: float) -> list[str]:
    """Return one sentence about the next purchase. Empty without growth."""
    if not steps:
        return []
    head = f"at {growth_ratio:.0%} more requests a month this fleet suffices for"
    if len(steps) == 1:
        return [f"{head} all {MONTHS} months, or until the GPUs of the question are used up"]
    now, then, *later = steps
    when = "1 month" if then.at == 1 else f"{then.at} months"
    more = f"; purchases within {MONTHS} months: {1 + len(later)}" if later else ""
    return [
        f"{head} {when}; the next purchase is {gpus_text(then.gpus - now.gpus)} for "
        f"{then.price - now.price:,.4g} {PRICE_UNIT[search.objective]}, which gives {then.fleet}{more}"
    ]


def describe_day(search: Search, steps: Sequence[LoadStep]) -> list[str]:
    """Return one sentence about the range of sizes over the day. Empty if no rates of the day are given."""
    if not steps:
        return []
    least, most = (choose(steps, key=lambda step: step.price) for choose in (min, max))
    mean, unit = sum(step.price for step in steps) / len(steps), PRICE_UNIT[search.objective]
    return [
        f"over the day {least.gpus} to {gpus_text(most.gpus)} suffice: least at {least.at:02d}:00 ({least.fleet}), "
        f"most at {most.at:02d}:00; with scaling the mean price is {mean:,.4g} {unit} instead of {most.price:,.4g}"
    ]
