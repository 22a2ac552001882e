"""Speed for one user against throughput of a GPU: where separate workers begin to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from msgspec import Struct, structs

from baton.lab.plan.search import PlannedFleet, Search, Shape

TARGETS = 8
"""TPOT targets that are tried, from the fastest that one request alone gets to `SLOWEST_FACTOR` times that."""
SLOWEST_FACTOR = 12.0


class FrontierPoint(Struct, frozen=True, kw_only=True):
    """The best fleet of a shape for one TPOT target."""

    shape: Shape
    user_tokens_per_s: float
    """1 / TPOT target: how fast text grows for each user."""
    gpu_tokens_per_s: float
    """Output tokens within the SLO."""
    fleet: str


def frontier(search: Search) -> list[FrontierPoint]:
    """Sweep TPOT and find the best fleet of each shape, as much as the hardware gives, per GPU."""
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
    """TPOT of a request alone on the fastest option."""
    context = round(search.demand.context_tokens)
    return min(option.cost.decode_run_s(requests=1, context_tokens=context, steps=1)[0] for option in search.options)


def _best(search: Search, tpot_s: float, shape: Shape) -> PlannedFleet | None:
    slo = structs.replace(search.demand.slo, tpot_s=tpot_s)
    demand = replace(search.demand, slo=slo, rate_rps=None)
    return replace(search, demand=demand, objective="goodput-per-gpu").fleet(shape)


def crossover(points: Sequence[FrontierPoint]) -> float | None:
    """Tokens per second and user above which separate workers give more. None where one shape is ahead everywhere.

    Straight lines between the targets, on the ratio of both.
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
    """Points that no other beats in both."""
    return [
        point
        for point in points
        if not any(
            other.user_tokens_per_s >= point.user_tokens_per_s and other.gpu_tokens_per_s > point.gpu_tokens_per_s
            for other in points
        )
    ]
