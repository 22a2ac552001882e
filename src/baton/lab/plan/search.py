"""Find the best fleet: compute the capacity of every option, then solve for the worker counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.core.types import Role
from baton.lab.plan.capacity import Capacity, decode_capacity, mixed_capacity, prefill_capacity
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.options import WorkerOption
from baton.lab.plan.solve import Pool, Problem, Solution, solve

Objective = Literal["cheapest", "goodput-per-dollar", "goodput-per-watt", "goodput-per-gpu"]
Shape = Literal["best", "disaggregated", "mixed"]
"""Roles that the fleet may consist of."""
ROLES_OF: dict[Shape, tuple[Role, ...]] = {
    "best": ("prefill", "decode", "mixed"),
    "disaggregated": ("prefill", "decode"),
    "mixed": ("mixed",),
}
ROUNDS = 2
"""Rounds of solving. Capacity depends on the number of workers that share a queue, which only a solution gives."""
POOL_GUESS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Workers of a fleet with the same role and option."""

    role: Role
    option: WorkerOption
    workers: int
    capacity: Capacity

    @property
    def rate_rps(self) -> float:
        """Total rate of the group."""
        return self.workers * self.capacity.rate_rps


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """A fleet with its capacity, price and power."""

    groups: tuple[WorkerGroup, ...]
    rate_rps: float
    """Request rate within the SLO."""

    @property
    def gpus(self) -> int:
        return sum(group.workers * group.option.facts.gpus for group in self.groups)

    @property
    def usd_per_hour(self) -> float:
        return sum(group.workers * group.option.usd_per_hour for group in self.groups)

    @property
    def power_w(self) -> float:
        """Rated power, including each GPU's share of its node."""
        return sum(group.workers * group.option.facts.power_w for group in self.groups)

    @property
    def name(self) -> str:
        """Name such as `2 x prefill A100-80G-SXM tp2 + 1 x decode A100-80G-SXM tp1`."""
        return " + ".join(f"{group.workers} x {group.role} {group.option.name}" for group in self.groups)

    def having(self, role: Role) -> list[WorkerGroup]:
        """Return the fleet's groups with the given role."""
        return [group for group in self.groups if group.role == role]

    def value(self, objective: Objective) -> float:
        """Return the objective's value, which the search maximizes: request rate per unit of price."""
        return self.rate_rps / max(1e-12, self.price(objective))

    def price(self, objective: Objective) -> float:
        """Return the fleet's price in the objective's unit."""
        match objective:
            case "goodput-per-gpu":
                return float(self.gpus)
            case "goodput-per-watt":
                return self.power_w
            case "cheapest" | "goodput-per-dollar":
                return self.usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Search space of one demand: its options and the objective."""

    demand: WorkloadDemand
    options: Sequence[WorkerOption]
    objective: Objective
    same_host: bool
    """Prefill and decode workers share a node."""
    derate: float = 1.0
    """Factor on the screened capacities. Below 1 after a simulation in which a fleet missed the SLO."""
    known: dict[tuple[WorkloadDemand, Role, str, int], Capacity] = field(
        default_factory=dict[tuple[WorkloadDemand, Role, str, int], Capacity], repr=False
    )
    """Cache of capacities before derating, shared by searches with the same options."""

    def fleet(self, shape: Shape, *, keep: Callable[[WorkerOption], bool] = lambda option: True) -> PlannedFleet | None:
        """Return the best fleet of a shape from the options that `keep` accepts, or None if none meets the SLO."""
        sizes: dict[tuple[Role, str], int] = {}
        found: tuple[list[Pool], Solution] | None = None
        for _ in range(ROUNDS):
            pools = self._pools(shape, [option for option in self.options if keep(option)], sizes)
            solution = solve(self._problem(pools))
            if solution is None:
                return None
            found = (pools, solution)
            sizes = {
                (pool.role, pool.option.name): count
                for pool, count in zip(pools, solution.counts, strict=True)
                if count
            }
        return _fleet(*found) if found else None

    def _problem(self, pools: list[Pool]) -> Problem:
        kv_bytes = max((pool.option.facts.kv_token_bytes for pool in pools), default=0.0)
        return Problem(
            pools=pools,
            handoff_bytes=kv_bytes * self.demand.input_tokens,
            same_host=self.same_host,
            rate_rps=self.demand.rate_rps,
        )

    def _pools(self, shape: Shape, options: list[WorkerOption], sizes: dict[tuple[Role, str], int]) -> list[Pool]:
        roles = ROLES_OF[shape]
        pools = [
            Pool(role=role, option=option, capacity=capacity, price=self.price(option))
            for role in roles
            for option in options
            for capacity in (self.capacity(role, option, sizes.get((role, option.name), POOL_GUESS)),)
        ]
        return [pool for pool in pools if pool.capacity.rate_rps > 0]

    def capacity(self, role: Role, option: WorkerOption, workers: int) -> Capacity:
        """Return the derated capacity of one worker in a pool of `workers`."""
        workers = max(1, min(workers, option.stock.gpus // option.facts.gpus))
        key = (self.demand, role, option.name, workers)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._new_capacity(role, option, workers)
        return derated(found, self.derate)

    def _new_capacity(self, role: Role, option: WorkerOption, workers: int) -> Capacity:
        match role:
            case "prefill":
                return prefill_capacity(option, self.demand, workers=workers)
            case "decode":
                return decode_capacity(option, self.demand, workers=workers, same_host=self.same_host)
            case "mixed":
                return mixed_capacity(option, self.demand, workers=workers)

    def price(self, option: WorkerOption) -> float:
        """Return the price of one worker in the objective's unit."""
        match self.objective:
            case "goodput-per-gpu":
                return float(option.facts.gpus)
            case "goodput-per-watt":
                return option.facts.power_w
            case "cheapest" | "goodput-per-dollar":
                return option.usd_per_hour


def derated(capacity: Capacity, factor: float) -> Capacity:
    """Return the capacity with its rate and requests multiplied by `factor`."""
    if factor == 1.0:
        return capacity
    return Capacity(
        rate_rps=capacity.rate_rps * factor, step_tokens_max=capacity.step_tokens_max,
        requests=capacity.requests * factor, ttft_s=capacity.ttft_s, tpot_s=capacity.tpot_s, limit=capacity.limit,
    )  # fmt: skip


def _fleet(pools: list[Pool], solution: Solution) -> PlannedFleet:
    groups = tuple(
        WorkerGroup(role=pool.role, option=pool.option, workers=count, capacity=pool.capacity)
        for pool, count in zip(pools, solution.counts, strict=True)
        if count
    )
    return PlannedFleet(groups=groups, rate_rps=solution.rate_rps)
