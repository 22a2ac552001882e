"""Choose the number of workers of each kind with a mixed-integer program.

The variables are the workers of every option and role, and the rate from each prefill option to each decode option. The
capacities and the networks of both pools bound each flow. Pools on different hardware may be combined.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.types import Role
from baton.lab.plan.capacity import Capacity
from baton.lab.plan.options import WorkerOption

SECONDS_MAX = 2.0
"""Time limit of one call. The solver returns its best solution so far."""
GAP_RATIO = 1e-3
"""Relative gap at which the solver stops. Capacities are less accurate than this."""
LINK_RATIO = 0.8
"""Share of a network's bandwidth that handoffs may use."""
ROUNDS_MAX = 12
"""Bound on the rounds of Dinkelbach's method, which converges in a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers of one option in one role, with the capacity of each."""

    role: Role
    option: WorkerOption
    capacity: Capacity
    price: float
    """Price of one worker, in the objective's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Input of the solver."""

    pools: Sequence[Pool]
    handoff_bytes: float
    """KV bytes of a mean request."""
    same_host: bool
    """Handoffs stay inside a node, so the network does not limit them."""
    rate_rps: float | None
    """Wanted rate. None: maximize the rate for the price."""
    pools_max: int
    """Largest number of pools of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Number of workers of each pool, with their total rate and price."""

    counts: tuple[int, ...]
    rate_rps: float
    """Total rate, at most the wanted one."""
    price: float


def solve(problem: Problem) -> Solution | None:
    """Return the cheapest worker counts that carry the wanted rate, or, if none is wanted, the best rate for the price.

    If the hardware cannot carry the wanted rate, the result has the largest rate that it can. None: no pool carries any
    load.

    Source: Dinkelbach (1967) for the ratio: maximize rate - q * price, where q is the last ratio.
    """
    if not problem.pools:
        return None
    most = _maximize(problem, price_weight=0.0, fixed_rps=None)
    if most is None or most.rate_rps <= 1e-9:
        return None
    if problem.rate_rps is not None:
        if most.rate_rps < problem.rate_rps * (1 - 1e-6):
            return most
        return _maximize(problem, price_weight=1.0, fixed_rps=problem.rate_rps)
    best = most
    for _ in range(ROUNDS_MAX):
        quotient = best.rate_rps / best.price
        better = _maximize(problem, price_weight=quotient, fixed_rps=None)
        if better is None or better.price <= 0 or better.rate_rps / better.price <= quotient * (1 + 1e-6):
            break
        best = better
    return best


def _maximize(problem: Problem, *, price_weight: float, fixed_rps: float | None) -> Solution | None:
    """Return the solution with the largest rate - price_weight * price, at `fixed_rps` if given.

    Columns: workers of each pool, then 1 for each pool with workers, then flows, then the rate of each mixed pool.
    """
    flows = _flows(problem.pools)
    mixed = [index for index, pool in enumerate(problem.pools) if pool.role == "mixed"]
    count, rates = len(problem.pools), len(flows) + len(mixed)
    width = 2 * count + rates
    goal = [max(price_weight, 1e-9) * pool.price for pool in problem.pools] + [0.0] * count
    goal += [0.0 if fixed_rps is not None else -1.0] * rates
    rows, limits = _rows(problem, flows, mixed, width)
    total = [0.0] * (2 * count) + [1.0] * rates
    if fixed_rps is not None:
        rows.append([-value for value in total])
        limits.append(-fixed_rps)
    if problem.rate_rps is not None:
        rows.append(total)
        limits.append(problem.rate_rps)
    found = _minimize(goal, rows=rows, limits=limits, whole=2 * count)
    if found is None:
        return None
    counts = tuple(round(value) for value in found[:count])
    price = sum(number * pool.price for number, pool in zip(counts, problem.pools, strict=True))
    return Solution(counts=counts, rate_rps=sum(found[2 * count :]), price=price)


def _minimize(
    goal: Sequence[float], *, rows: Sequence[Sequence[float]], limits: Sequence[float], whole: int
) -> list[float] | None:
    """Return x that minimizes goal x under rows x <= limits and x >= 0, or None if no x satisfies them.

    The first `whole` values of x are integers.
    """
    optimize: Any = importlib.import_module("scipy.optimize")  # late: `baton plan --help` does not need it
    found = optimize.milp(
        c=goal,
        constraints=optimize.LinearConstraint(rows, ub=limits),
        integrality=[1] * whole + [0] * (len(goal) - whole),
        bounds=optimize.Bounds(0, math.inf),
        options={"time_limit": SECONDS_MAX, "mip_rel_gap": GAP_RATIO},
    )
    return None if found.x is None else [float(value) for value in found.x]


def _flows(pools: Sequence[Pool]) -> list[tuple[int, int]]:
    """Return the index pairs of prefill and decode pools with the same KV format. A conversion would lose precision."""
    return [
        (source, target)
        for source, giver in enumerate(pools)
        if giver.role == "prefill"
        for target, taker in enumerate(pools)
        if taker.role == "decode" and taker.option.cost.precision.kv == giver.option.cost.precision.kv
    ]


def _rows(
    problem: Problem, flows: list[tuple[int, int]], mixed: list[int], width: int
) -> tuple[list[list[float]], list[float]]:
    """Return the rows and limits of the constraints: capacity and network of pools, GPUs of stocks, number of pools."""
    pools = problem.pools
    rows = [_carried(index, pool, flows, mixed, width) for index, pool in enumerate(pools)]
    if not problem.same_host and problem.handoff_bytes > 0:
        for index, pool in enumerate(pools):
            if pool.role != "mixed":
                moved = _carried(index, pool, flows, mixed, width)
                moved[index] = -LINK_RATIO * link_bytes_per_s(pool.option) / problem.handoff_bytes
                rows.append(moved)
    limits = [0.0] * len(rows)
    for stock in {id(pool.option.stock): pool.option.stock for pool in pools}.values():
        used = [float(pool.option.facts.gpus) if pool.option.stock is stock else 0.0 for pool in pools]
        rows.append(used + [0.0] * (width - len(pools)))
        limits.append(float(stock.gpus))
    for index, pool in enumerate(pools):
        most = float(pool.option.stock.gpus // pool.option.facts.gpus)
        row = [0.0] * width
        row[index], row[len(pools) + index] = 1.0, -most
        rows.append(row)
        limits.append(0.0)
    rows.append([0.0] * len(pools) + [1.0] * len(pools) + [0.0] * (width - 2 * len(pools)))
    limits.append(float(problem.pools_max))
    return rows, limits


def _carried(index: int, pool: Pool, flows: list[tuple[int, int]], mixed: list[int], width: int) -> list[float]:
    """Return the constraint row of a pool: the rate through the pool minus the capacity of its workers."""
    row = [0.0] * width
    first = width - len(flows) - len(mixed)
    row[index] = -pool.capacity.rate_rps
    for place, ends in enumerate(flows):
        if index in ends:
            row[first + place] = 1.0
    if pool.role == "mixed":
        row[first + len(flows) + mixed.index(index)] = 1.0
    return row


def link_bytes_per_s(option: WorkerOption) -> float:
    """Return the network bandwidth of one worker: that of its configured link, or of all its GPUs together."""
    cost = option.cost
    return cost.wire.bytes_per_s if cost.wire else cost.hardware.inter_node_bytes_per_s * cost.parallel.gpus


def pool_rps(role: Role, option: WorkerOption, capacity: Capacity, *, handoff_bytes: float, same_host: bool) -> float:
    """Return the request rate of one worker, limited by its network if it hands off between hosts."""
    if role == "mixed" or same_host or handoff_bytes <= 0:
        return capacity.rate_rps
    return min(capacity.rate_rps, LINK_RATIO * link_bytes_per_s(option) / handoff_bytes)
