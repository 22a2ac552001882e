"""Explain an SLO that no fleet meets: the size of the miss, and the nearest SLO that a fleet meets."""

from __future__ import annotations

import math
from dataclasses import replace

from msgspec import structs

from baton.lab.plan.capacity import STEP_TOKENS, prompt_s
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.frontier import fastest_tpot_s
from baton.lab.plan.options import WorkerOption
from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.search import Search

LOOSENING_FACTOR = 1.25
"""Factor by which a round loosens the targets, starting from the fastest option's times."""
ROUNDS_MAX = 24
BISECTION_STEPS = 7
"""Bisection steps between a target that fails and one that works, so that the suggestion is nearly the tightest."""


def explain_impossible(search: Search) -> list[str]:
    """Return lines that name the target that cannot be met, the fastest option's time, and targets that work."""
    demand = search.demand
    tokens = demand.input_quantile(demand.attainment_ratio)
    ttft_s, fastest = min((_alone_s(option, demand, tokens), option.name) for option in search.options)
    tpot_s = fastest_tpot_s(search)
    found: list[str] = []
    if ttft_s > demand.slo.ttft_s:
        found.append(
            f"no hardware meets a TTFT of {demand.slo.ttft_s:g} s: the fastest option, {fastest}, takes {ttft_s:.3g} s "
            f"for a prompt of {tokens} tokens ({demand.attainment_ratio:.0%} are at most as long), with an empty queue"
        )
    if tpot_s > demand.slo.tpot_s:
        found.append(
            f"no hardware meets a TPOT of {demand.slo.tpot_s:g} s: the fastest step of one request takes {tpot_s:.3g} s"
        )
    if not found:
        found.append(
            f"no fleet meets TTFT {demand.slo.ttft_s:g} s and TPOT {demand.slo.tpot_s:g} s for "
            f"{demand.attainment_ratio:.0%} of the requests: each is possible for one request alone, not under load"
        )
    return [*found, _nearest(search, (ttft_s, tpot_s))]


def _alone_s(option: WorkerOption, demand: WorkloadDemand, tokens: int) -> float:
    new = max(1, round(tokens * (1 - demand.cached_ratio)))
    return min(prompt_s(option.cost, new=new, cached=tokens - new, step_tokens=limit) for limit in STEP_TOKENS)


Targets = tuple[float, float]
"""TTFT and TPOT targets, in seconds."""


def _nearest(search: Search, fastest: Targets) -> str:
    """Return a suggestion: the nearest targets that a fleet meets.

    Targets start at the fastest option's times or the requested values, whichever are larger. TTFT is loosened alone,
    then TPOT alone, then both.
    """
    slo = search.demand.slo
    asked = (slo.ttft_s, slo.tpot_s)
    least = (max(asked[0], fastest[0]), max(asked[1], fastest[1]))
    missed = {place for place in (0, 1) if least[place] > asked[place]}
    for places in ((0,), (1,), (0, 1)):
        for rounds in range(ROUNDS_MAX) if missed <= set(places) else ():
            factor = LOOSENING_FACTOR**rounds
            found = (least[0] * (factor if 0 in places else 1), least[1] * (factor if 1 in places else 1))
            if _fleet(search, found) is not None:
                return _suggested(search, least, found)
    return "nothing near works: take faster hardware, a smaller model, or shorter prompts"


def _suggested(search: Search, least: Targets, found: Targets) -> str:
    for place in (0, 1):
        found = _tightened(search, least, found, place)
    ttft_s, tpot_s = (target if target == known else _up(target) for target, known in zip(found, least, strict=True))
    fleet = _fleet(search, (ttft_s, tpot_s))
    assert fleet is not None, "a fleet that meets a target also meets every looser one"
    return f"nearest that works: --ttft-slo-s {ttft_s:.6g} --tpot-slo-s {tpot_s:.6g}, with {fleet.name}"


def _tightened(search: Search, least: Targets, found: Targets, place: int) -> Targets:
    """Return the targets, with the target at index `place` as close to its minimum as a fleet can meet."""
    low, high = least[place], found[place]
    for _ in range(BISECTION_STEPS if high > low else 0):
        middle = (low + high) / 2
        tried = (middle, found[1]) if place == 0 else (found[0], middle)
        if _fleet(search, tried) is None:
            low = middle
        else:
            high, found = middle, tried
    return found


def _fleet(search: Search, targets: Targets) -> PlannedFleet | None:
    slo = structs.replace(search.demand.slo, ttft_s=targets[0], tpot_s=targets[1])
    return replace(search, demand=replace(search.demand, slo=slo)).fleet("best")


def _up(target_s: float) -> float:
    """Return the target rounded up to three digits. Rounding down could make it infeasible."""
    unit = 10.0 ** (math.floor(math.log10(target_s)) - 2)
    return math.ceil(target_s / unit) * unit
