"""A planned fleet: groups of equal workers, the rate that they carry, and their price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.types import Role
from baton.lab.plan.capacity import Capacity
from baton.lab.plan.options import Objective, WorkerOption
from baton.lab.plan.solve import pool_rps

PRICE_UNIT: Mapping[Objective, str] = {
    "cheapest": "USD/h", "goodput-per-dollar": "USD/h", "goodput-per-watt": "W", "goodput-per-gpu": "GPUs",
}  # fmt: skip
UNIT: Mapping[Objective, str] = {
    "cheapest": "req/s per USD/h", "goodput-per-dollar": "req/s per USD/h", "goodput-per-watt": "req/s per W",
    "goodput-per-gpu": "req/s per GPU",
}  # fmt: skip
"""Unit of the objective's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Workers of a fleet with the same role and option."""

    role: Role
    option: WorkerOption
    workers: int
    capacity: Capacity
    spare_workers: int = 0
    """Workers that may be lost: the others carry the planned rate."""

    @property
    def rate_rps(self) -> float:
        """Total rate of the group."""
        return self.workers * self.capacity.rate_rps


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """A fleet with its capacity, price and power."""

    groups: tuple[WorkerGroup, ...]
    rate_rps: float
    """Planned request rate: the asked rate, or `capacity_rps` if that is lower or no rate is asked."""
    capacity_rps: float
    """Largest request rate within the SLO without the spare workers, by the screening."""

    def without_spares(self) -> PlannedFleet:
        """Return the fleet after the loss of its spare workers, at the same planned rate."""
        if not any(group.spare_workers for group in self.groups):
            return self
        groups = (replace(group, workers=group.workers - group.spare_workers, spare_workers=0) for group in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def extra_pools(self) -> int:
        """Number of groups beyond one pool of mixed workers, or one of prefill and one of decode workers."""
        return len(self.groups) - (2 if self.having("prefill") else 1)

    @property
    def spare_ratio(self) -> float:
        """Capacity that the planned rate leaves, as a share of that rate."""
        return self.capacity_rps / max(1e-12, self.rate_rps) - 1

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
        return sum(group.workers * group.option.price(objective) for group in self.groups)


def carried_rps(groups: Sequence[WorkerGroup], *, handoff_bytes: float, same_host: bool) -> float:
    """Return the request rate that the groups carry together.

    Prefill and decode are limited by the scarcer side, per KV format, because KV is not converted between pools.
    """
    rates: dict[str, dict[Role, float]] = defaultdict(lambda: {"prefill": 0.0, "decode": 0.0, "mixed": 0.0})
    for group in groups:
        each_rps = pool_rps(group.role, group.option, group.capacity, handoff_bytes=handoff_bytes, same_host=same_host)
        rates[group.option.cost.precision.kv][group.role] += group.workers * each_rps
    return sum(min(sides["prefill"], sides["decode"]) + sides["mixed"] for sides in rates.values())


def gpus_text(count: int) -> str:
    """Return a number of GPUs in words, such as `1 GPU`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
