"""Pareto frontier of tokens/s per user and tokens/s per GPU, for separate and mixed workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from msgspec import Struct, structs

from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.search import Search, Shape

TARGETS = 8
"""Number of TPOT targets, spaced from near the TPOT of a single request to `SLOWEST_FACTOR` times that."""
SLOWEST_FACTOR = 12.0


class FrontierPoint(Struct, frozen=True, kw_only=True):
    """Best fleet of one shape for one TPOT target."""

    shape: Shape
    user_tokens_per_s: float
    """Reciprocal of the TPOT target: the speed at which each user receives text."""
    gpu_tokens_per_s: float
    """Output tokens per second and GPU within the SLO."""
    fleet: str


def frontier(search: Search) -> list[FrontierPoint]:
    """Return the best fleet of each shape for each TPOT target, by goodput per GPU and without a wanted rate.

    Fleets have one pool per role.
    """
    fastest_s = fastest_tpot_s(search)
    step = SLOWEST_FACTOR ** (1 / (TARGETS - 1))
    targets_s = sorted({1.15 * fastest_s * step**index for index in range(TARGETS)} | {search.demand.slo.tpot_s})
    shapes: tuple[Shape, ...] = ("disaggregated", "mixed")
    return [
        FrontierPoint(
            shape=shape,
            user_tokens_per_s=1 / target_s,
            gpu_tokens_per_s=fleet.rate_rps * search.demand.output_tokens / fleet.gpus,
            fleet=fleet.name,
        )
        for target_s in targets_s
        for shape in shapes
        for fleet in (_best(search, target_s, shape),)
        if fleet is not None
    ]


def fastest_tpot_s(search: Search) -> float:
    """Return the TPOT of a single request on the fastest option."""
    context = round(search.demand.context_tokens)
    return min(option.cost.decode_run_s(requests=1, context_tokens=context, steps=1)[0] for option in search.options)


def _best(search: Search, tpot_s: float, shape: Shape) -> PlannedFleet | None:
    slo = structs.replace(search.demand.slo, tpot_s=tpot_s)
    demand = replace(search.demand, slo=slo, rate_rps=None)
    return replace(search, demand=demand, objective="goodput-per-gpu", extra_pools_max=0).fleet(shape)


def crossover(points: Sequence[FrontierPoint]) -> float | None:
    """Return the tokens/s per user from which separate workers yield more tokens/s per GPU than mixed ones.

    None: one shape always leads. The ratio of both shapes is interpolated linearly between TPOT targets.
    """
    by_speed: dict[float, dict[str, float]] = {}
    for point in points:
        by_speed.setdefault(point.user_tokens_per_s, {})[point.shape] = point.gpu_tokens_per_s
    ratios = sorted(
        (speed, shapes.get("disaggregated", 0.0) / shapes["mixed"])
        for speed, shapes in by_speed.items()
        if shapes.get("mixed", 0.0) > 0
    )
    for (slow, below), (fast, above) in pairwise(ratios):
        if below < 1 <= above:
            return slow + (fast - slow) * (1 - below) / (above - below)
    return None


def pareto_points(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return the points that no other point beats in tokens/s per GPU at the same or a higher speed per user."""
    return [
        point
        for point in points
        if not any(
            other.user_tokens_per_s >= point.user_tokens_per_s and other.gpu_tokens_per_s > point.gpu_tokens_per_s
            for other in points
        )
    ]
