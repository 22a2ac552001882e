"""Find the best fleet: compute the capacity of every option, then choose the worker counts.

Fleets with one pool per role are sized exactly, with the capacity of pools of that size. The solver searches for
combinations of more pools where they could save more than their penalty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from baton.core.types import Role
from baton.lab.plan.capacity import Capacity, decode_capacity, mixed_capacity, prefill_capacity
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.options import Objective, WorkerOption
from baton.lab.plan.planned_fleet import PlannedFleet, WorkerGroup, carried_rps
from baton.lab.plan.solve import Pool, Problem, pool_rps, solve

Shape = Literal["best", "disaggregated", "mixed"]
"""Roles that the fleet may consist of."""
ROLES_OF: dict[Shape, tuple[Role, ...]] = {
    "best": ("prefill", "decode", "mixed"),
    "disaggregated": ("prefill", "decode"),
    "mixed": ("mixed",),
}
MOST_ROLES = ROLES_OF["disaggregated"]
"""Roles of a disaggregated fleet: one pool for each is the most that a fleet has without extra pools."""
SIZES_MORE = 2
"""Further numbers of decode workers to try per number of prefill workers: smaller pools carry less per worker."""
ROUNDS = 2
"""Rounds of solving. Capacity depends on the number of workers that share a queue, which only a solution gives."""
POOL_GUESS = 2

Sized = tuple[Role, WorkerOption, int]
"""A pool: its role, its option, and the number of its workers."""
Worth = tuple[float, float]
"""Rate of a fleet up to the asked rate, then its rate per unit of the penalized price. Tuples compare in this order."""


FleetKey = tuple[WorkloadDemand, Objective, float, int, tuple[int, int], Shape, tuple[str, ...]]
"""Demand, objective, derating factor, extra pools, spares, shape and option names: the best fleet depends on these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Search space of one demand: its options and the objective."""

    demand: WorkloadDemand
    options: Sequence[WorkerOption]
    objective: Objective
    same_host: bool
    """Prefill and decode workers share a node."""
    pool_penalty_ratio: float = 0.05
    """Share of the price that each pool beyond one per role must save."""
    extra_pools_max: int = 3
    """Largest number of pools beyond one per role."""
    spare_workers: int = 0
    """Workers of each pool that may be lost while the others carry the asked rate (1: N+1)."""
    spare_hosts: int = 0
    """Hosts that may fail while the others carry the asked rate. Each pool is spread evenly over its stock's hosts."""
    derate: float = 1.0
    """Factor on the screened capacities. Below 1 after a simulation in which a fleet missed the SLO."""
    known: dict[tuple[WorkloadDemand, Role, str, int], Capacity] = field(
        default_factory=dict[tuple[WorkloadDemand, Role, str, int], Capacity], repr=False
    )
    """Cache of capacities before derating, shared by searches with the same options."""
    known_fleets: dict[FleetKey, PlannedFleet | None] = field(
        default_factory=dict["FleetKey", "PlannedFleet | None"], repr=False
    )
    """Cache of best fleets, shared by searches with the same options."""

    def fleet(self, shape: Shape, *, keep: Callable[[WorkerOption], bool] = lambda option: True) -> PlannedFleet | None:
        """Return the best fleet of a shape from the options that `keep` accepts, or None if none meets the SLO.

        For an asked rate, the best fleet has the lowest `penalized_price` of those that carry it. Otherwise, it has the
        best rate for its penalized price.
        """
        options = [option for option in self.options if keep(option)]
        names = tuple(option.name for option in options)
        key = (self.demand, self.objective, self.derate, self.extra_pools_max, self.spares, shape, names)
        if key not in self.known_fleets:
            self.known_fleets[key] = self._find_fleet(shape, options)
        return self.known_fleets[key]

    def _find_fleet(self, shape: Shape, options: Sequence[WorkerOption]) -> PlannedFleet | None:
        best = self._few_pools(shape, options) if self.demand.rate_rps is not None else self._best_ratio(shape, options)
        for extra in range(1, 1 + (0 if self.has_reserve else self.extra_pools_max)):
            if best is not None and self._is_unbeatable(best, shape, options, extra):
                break
            many = self._many_pools(shape, options, extra)
            if many is not None and (best is None or self.worth(many) > self.worth(best)):
                best = many
        return best

    def penalized_price(self, fleet: PlannedFleet) -> float:
        """Return the fleet's price in the objective's unit, raised by the penalty for every extra pool."""
        return fleet.price(self.objective) * (1 + self.pool_penalty_ratio * fleet.extra_pools)

    def worth(self, fleet: PlannedFleet) -> Worth:
        """Return the value that ranks a fleet: a larger one is better. Simulation results do not influence it."""
        asked_rps = min(fleet.rate_rps, self.demand.rate_rps or 0.0)
        return asked_rps, fleet.rate_rps / max(1e-12, self.penalized_price(fleet))

    def _few_pools(self, shape: Shape, options: Sequence[WorkerOption]) -> PlannedFleet | None:
        """Return the cheapest fleet with one pool per role that carries the asked rate, or None.

        Equal prices: the fleet with more capacity to spare.
        """
        rate_rps, found = self.demand.rate_rps or 0.0, list[PlannedFleet]()
        for roles in ROLES_OF["mixed"], ROLES_OF["disaggregated"]:
            if not set(roles) <= set(ROLES_OF[shape]):
                continue
            least_price = math.inf
            for bound_price, choice in self._choices(roles, options):
                if bound_price > least_price * (1 + 1e-9):
                    break
                groups = [self._sized(role, option, rate_rps) for role, option in choice]
                fleet = self._whole([group for group in groups if group is not None])
                if None not in groups and _fits(fleet) and fleet.capacity_rps >= rate_rps:
                    found.append(fleet)
                    least_price = min(least_price, fleet.price(self.objective))
        return min(
            found, key=lambda fleet: (self.penalized_price(fleet), -fleet.capacity_rps, fleet.name), default=None
        )

    def _best_ratio(self, shape: Shape, options: Sequence[WorkerOption]) -> PlannedFleet | None:
        """Return the fleet with one pool per role and the best rate for its price, or None.

        Fleets are tried in the order of an upper bound of that ratio, until no bound is above the best ratio found.
        """
        bounds: list[tuple[float, int, list[Sized]]] = []
        for roles in ROLES_OF["mixed"], ROLES_OF["disaggregated"]:
            if set(roles) <= set(ROLES_OF[shape]):
                for sized in self._sizes(roles, options):
                    bounds.append((self._ratio(sized, self._bound_rps), len(bounds), sized))
        best: list[Sized] = []
        best_ratio = 0.0
        for bound, _, sized in sorted(bounds, key=lambda each: (-each[0], each[1])):
            if bound <= best_ratio * (1 + 1e-9):
                break
            ratio = self._ratio(sized, self._each_rps)
            if ratio > best_ratio * (1 + 1e-9):
                best, best_ratio = sized, ratio
        return self._whole(self._group(*each) for each in best) if best else None

    def _sizes(self, roles: Sequence[Role], options: Sequence[WorkerOption]) -> Iterator[list[Sized]]:
        """Yield the fleets with one pool per role that may have the best ratio, and that the stocks allow.

        For each number of prefill workers, only numbers of decode workers with about the same total rate are tried.
        """
        for option in options if len(roles) == 1 else ():
            for workers in range(1, self._workers_max(option) + 1):
                yield [(roles[0], option, workers)]
        for first, second in product(options, options) if len(roles) == 2 else ():
            second_rps = self._bound_rps("decode", second, self._workers_max(second))
            if first.cost.precision.kv != second.cost.precision.kv or second_rps <= 0:
                continue
            for workers in range(1, self._workers_max(first) + 1):
                needed = math.ceil(workers * self._bound_rps("prefill", first, workers) / second_rps)
                for beside in range(max(1, needed - 1), needed + SIZES_MORE + 1):
                    sized: list[Sized] = [("prefill", first, workers), ("decode", second, beside)]
                    if _in_stock(sized):
                        yield sized

    def _ratio(self, sized: Sequence[Sized], each_rps: Callable[[Role, WorkerOption, int], float]) -> float:
        """Return rate / price of a fleet with one pool per role. `each_rps`: returns the rate of one of its workers."""
        rate_rps = min(workers * each_rps(role, option, workers) for role, option, workers in sized)
        return rate_rps / sum(workers * option.price(self.objective) for _, option, workers in sized)

    def _bound_rps(self, role: Role, option: WorkerOption, workers: int) -> float:
        """Return an upper bound of the rate of one worker: that in a pool of the next power of two."""
        return self._each_rps(role, option, 1 << (workers - 1).bit_length())

    def _workers_max(self, option: WorkerOption) -> int:
        """Return the largest number of workers that the stock allows."""
        return option.stock.gpus // option.facts.gpus

    def _choices(
        self, roles: Sequence[Role], options: Sequence[WorkerOption]
    ) -> list[tuple[float, list[tuple[Role, WorkerOption]]]]:
        """Return (lower bound of the price, one option per role) for every choice of options, cheapest first.

        KV is not converted, so all options of a choice have one KV format.
        """
        bounds: list[list[tuple[float, tuple[Role, WorkerOption]]]] = [
            [(self._bound_price(role, option), (role, option)) for option in options] for role in roles
        ]
        choices: list[tuple[float, list[tuple[Role, WorkerOption]]]] = [
            (math.fsum(price for price, _ in choice), [chosen for _, chosen in choice])
            for choice in product(*bounds)
            if len({option.cost.precision.kv for _, (_, option) in choice}) == 1
        ]
        return sorted((each for each in choices if each[0] < math.inf), key=lambda each: each[0])

    def _bound_price(self, role: Role, option: WorkerOption) -> float:
        """Return a lower bound of the price of a role's workers for the asked rate. Infinite: too few in stock."""
        rate_rps, most = self.demand.rate_rps or 0.0, self._workers_max(option)
        each_rps = self._each_rps(role, option, most)  # the largest pool has the shortest queues
        if most * each_rps < rate_rps:
            return math.inf
        return self._with_reserve(option, math.ceil(rate_rps / each_rps - 1e-9)) * option.price(self.objective)

    def _sized(self, role: Role, option: WorkerOption, rate_rps: float) -> WorkerGroup | None:
        """Return the smallest group that carries the rate. None: the stock is too small."""
        most = self._workers_max(option)
        workers = max(1, math.ceil(rate_rps / self._each_rps(role, option, most) - 1e-9))
        while workers <= most and workers * self._each_rps(role, option, workers) < rate_rps:
            workers += 1
        total = self._with_reserve(option, workers)
        return self._group(role, option, workers, total - workers) if total <= most else None

    @property
    def spares(self) -> tuple[int, int]:
        """The numbers of workers and of hosts that may be lost."""
        return self.spare_workers, self.spare_hosts

    @property
    def has_reserve(self) -> bool:
        """True if a fleet must carry the asked rate after losing workers. It then has one pool per role."""
        return self.spare_workers + self.spare_hosts > 0 or any(option.stock.lost_ratio for option in self.options)

    def _with_reserve(self, option: WorkerOption, workers: int) -> int:
        """Return the size of a pool of which `workers` are left after the loss of its reserve."""
        total = workers = max(1, workers)
        node_gpus = option.stock.hardware.gpus_per_node
        hosts, per_host = math.ceil(option.stock.gpus / node_gpus), max(1, node_gpus // option.facts.gpus)
        while True:
            failed = max(self.spare_workers, self.spare_hosts * min(per_host, math.ceil(total / hosts)))
            if total - failed - math.ceil(option.stock.lost_ratio * total - 1e-9) >= workers:
                return total
            total += 1

    def _each_rps(self, role: Role, option: WorkerOption, workers: int) -> float:
        """Return the rate of one worker of a pool, limited by its capacity and its network."""
        return pool_rps(
            role, option, self.capacity(role, option, workers),
            handoff_bytes=self._handoff_bytes(option), same_host=self.same_host,
        )  # fmt: skip

    def _is_unbeatable(self, best: PlannedFleet, shape: Shape, options: Sequence[WorkerOption], extra: int) -> bool:
        """Return whether no fleet with `extra` or more extra pools can be worth more, by a bound of price per rate."""
        if self.demand.rate_rps is not None and best.rate_rps < self.demand.rate_rps * (1 - 1e-6):
            return False
        per_rps = {
            role: min((self._rps_price(role, option) for option in options), default=math.inf)
            for role in ROLES_OF[shape]
        }
        least = min(per_rps.get("mixed", math.inf), per_rps.get("prefill", math.inf) + per_rps.get("decode", math.inf))
        return self.penalized_price(best) <= best.rate_rps * least * (1 + self.pool_penalty_ratio * extra)

    def _rps_price(self, role: Role, option: WorkerOption) -> float:
        each_rps = self._each_rps(role, option, self._workers_max(option))
        return option.price(self.objective) / each_rps if each_rps > 0 else math.inf

    def _many_pools(self, shape: Shape, options: Sequence[WorkerOption], extra: int) -> PlannedFleet | None:
        """Return the fleet that the solver chooses, with capacities that fit the sizes of its pools, or None.

        It has at most `extra` pools more than a fleet with one pool per role.

        A larger pool has shorter queues. If the fleet carries less than the solver assumed, the next round asks for
        more.
        """
        sizes: dict[tuple[Role, str], int] = {}
        fleets: list[PlannedFleet] = []
        asked_rps = wanted_rps = self.demand.rate_rps
        for _ in range(ROUNDS):
            pools = self._pools(shape, options, sizes)
            solution = solve(self._problem(pools, wanted_rps, len(MOST_ROLES) + extra))
            if solution is None:
                break
            chosen = [(pool, count) for pool, count in zip(pools, solution.counts, strict=True) if count]
            sizes = {(pool.role, pool.option.name): count for pool, count in chosen}
            fleet = self._whole(self._group(pool.role, pool.option, count) for pool, count in chosen)
            if fleet.rate_rps > 0:
                fleets.append(fleet)
            if asked_rps is not None and wanted_rps is not None:
                wanted_rps *= max(1.0, asked_rps / max(1e-9, fleet.rate_rps))
        return max(fleets, key=self.worth, default=None)

    def _group(self, role: Role, option: WorkerOption, workers: int, spare_workers: int = 0) -> WorkerGroup:
        capacity = self.capacity(role, option, workers)
        return WorkerGroup(
            role=role, option=option, workers=workers + spare_workers, capacity=capacity, spare_workers=spare_workers
        )

    def _whole(self, groups: Iterable[WorkerGroup]) -> PlannedFleet:
        """Return the fleet of these groups with the rate that it carries."""
        groups = tuple(groups)
        handoff_bytes = max((self._handoff_bytes(group.option) for group in groups), default=0.0)
        whole = PlannedFleet(groups=groups, rate_rps=0.0, capacity_rps=0.0)
        left = whole.without_spares().groups
        capacity_rps = carried_rps(left, handoff_bytes=handoff_bytes, same_host=self.same_host)
        rate_rps = min(capacity_rps, self.demand.rate_rps or math.inf)
        return replace(whole, rate_rps=rate_rps, capacity_rps=capacity_rps)

    def _handoff_bytes(self, option: WorkerOption) -> float:
        return option.facts.kv_token_bytes * self.demand.input_tokens

    def _problem(self, pools: list[Pool], wanted_rps: float | None, pools_max: int) -> Problem:
        kv_bytes = max((pool.option.facts.kv_token_bytes for pool in pools), default=0.0)
        return Problem(
            pools=pools,
            handoff_bytes=kv_bytes * self.demand.input_tokens,
            same_host=self.same_host,
            rate_rps=wanted_rps,
            pools_max=pools_max,
        )

    def _pools(self, shape: Shape, options: Sequence[WorkerOption], sizes: dict[tuple[Role, str], int]) -> list[Pool]:
        roles = ROLES_OF[shape]
        pools = [
            Pool(role=role, option=option, capacity=capacity, price=option.price(self.objective))
            for role in roles
            for option in options
            for capacity in (self.capacity(role, option, sizes.get((role, option.name), POOL_GUESS)),)
        ]
        return [pool for pool in pools if pool.capacity.rate_rps > 0]

    def capacity(self, role: Role, option: WorkerOption, workers: int) -> Capacity:
        """Return the derated capacity of one worker in a pool of `workers`."""
        workers = max(1, min(workers, option.stock.gpus // option.facts.gpus))
        key = (replace(self.demand, rate_rps=None), role, option.name, workers)
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


def derated(capacity: Capacity, factor: float) -> Capacity:
    """Return the capacity with its rate and requests multiplied by `factor`."""
    if factor == 1.0:
        return capacity
    return replace(capacity, rate_rps=capacity.rate_rps * factor, requests=capacity.requests * factor)


def _fits(fleet: PlannedFleet) -> bool:
    """Return whether the stocks have the GPUs of all groups."""
    return _in_stock([(group.role, group.option, group.workers) for group in fleet.groups])


def _in_stock(sized: Sequence[Sized]) -> bool:
    """Return whether the stocks have the GPUs of all pools."""
    used: dict[str, int] = defaultdict(int)
    for _, option, workers in sized:
        used[option.stock.name] += workers * option.facts.gpus
    return all(used[option.stock.name] <= option.stock.gpus for _, option, _ in sized)
