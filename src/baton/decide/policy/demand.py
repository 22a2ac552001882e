"""Roles and scaling by demand: how many prefill and decode workers a load keeps busy, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any

from msgspec import Struct

from baton.core.plugin import load_plugin
from baton.core.ports import CostModel
from baton.core.types import ROLES, ClusterView, LoadWindow, Role, StepShape, WorkerId, WorkerView
from baton.decide.policy.forecast import ForecastPolicy, LoadRates

RECENT = "recent-demand"
BATCH_MAX = 1024
"""Largest decode batch that is considered for a worker that does not report its own limit."""


class WorkersNeeded(Struct, frozen=True, kw_only=True):
    """Workers that a load keeps fully busy, as fractions."""

    prefill: float
    decode: float


def workers_needed(demand: LoadRates, worker: WorkerView, cost: CostModel, tpot_s: float) -> WorkersNeeded:
    """Predict how many workers like `worker` compute the prompts of this load and decode its answers within TPOT."""
    model = cost.on(worker.kind)
    if not demand.requests_rps:
        return WorkersNeeded(prefill=0.0, decode=0.0)
    prompt_tokens = max(1, round(demand.prompt_tokens))
    prefill = demand.requests_rps * model.prefill_s(new_tokens=prompt_tokens, cached_tokens=0)
    reach_tokens = round(demand.prompt_tokens + demand.output_tokens / 2)

    def step_s(batch: int) -> float:
        return model.step_s(StepShape(decode_requests=batch, context_tokens=batch * reach_tokens))

    batch = largest_batch(worker, reach_tokens, step_s_max=tpot_s, model=model)
    return WorkersNeeded(prefill=prefill, decode=demand.requests_rps * demand.output_tokens * step_s(batch) / batch)


def largest_batch(worker: WorkerView, reach_tokens: int, *, step_s_max: float, model: CostModel) -> int:
    """Return the largest decode batch whose step takes at most `step_s_max` and whose KV fits; at least 1."""
    low, high = 1, worker.requests_max or BATCH_MAX
    if worker.kv_tokens_max and reach_tokens:
        high = max(1, min(high, worker.kv_tokens_max // reach_tokens))
    while low < high:
        middle = (low + high + 1) // 2
        shape = StepShape(decode_requests=middle, context_tokens=middle * reach_tokens)
        low, high = (middle, high) if model.step_s(shape) <= step_s_max else (low, middle - 1)
    return low


def recent_slo_tpot_s(history: Sequence[LoadWindow], otherwise_s: float) -> float:
    """Return the most recent TPOT SLO of the last 60 windows, else `otherwise_s`."""
    for window in islice(reversed(history), 60):
        if window.slo_tpot_s:
            return window.slo_tpot_s
    return otherwise_s


@dataclass(slots=True, kw_only=True)
class DemandRoles:
    """Split the workers between prefill and decode in proportion to the demand. Mixed workers stay mixed.

    A flip on one host is free, since the host owns the KV. Between hosts it loses the prefixes of the flipped worker's
    host. So workers flip only when the split is wrong by more than a margin.
    """

    tpot_s: float = 0.1
    """TPOT target where no recent request has an SLO."""
    margin_workers: float = 0.6
    """Workers flip only if the best split differs from the present one by at least this many workers."""
    forecast: str = RECENT
    """Name of the forecast policy, or `module:Class`."""
    forecast_options: dict[str, Any] = field(default_factory=dict[str, Any])
    _forecast: ForecastPolicy = field(init=False)

    def __post_init__(self) -> None:
        self._forecast = load_plugin(self.forecast, self.forecast_options, expects=ForecastPolicy)

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        prefill = [worker for worker in cluster.workers if worker.role == "prefill"]
        decode = [worker for worker in cluster.workers if worker.role == "decode"]
        total = len(prefill) + len(decode)
        if total < 3:
            return {}
        work = workers_needed(
            self._forecast.ahead(history, 0.0), cluster.workers[0], cost, recent_slo_tpot_s(history, self.tpot_s)
        )
        if not work.prefill + work.decode:
            return {}
        best = min(max(total * work.prefill / (work.prefill + work.decode), 1.0), total - 1.0)
        if abs(best - len(prefill)) < self.margin_workers:
            return {}
        wanted = round(best)
        more = sorted(decode, key=lambda worker: (worker.running_requests, worker.id))[: max(0, wanted - len(prefill))]
        less = sorted(prefill, key=lambda worker: (worker.queued_tokens, worker.id))[: max(0, len(prefill) - wanted)]
        return {**{worker.id: "prefill" for worker in more}, **{worker.id: "decode" for worker in less}}


@dataclass(slots=True, kw_only=True)
class ForecastScaling:
    """Scale each role to the demand at the time when a worker that starts now becomes ready.

    With the default forecast, `RecentDemand`, scaling reacts to load; other forecasts look ahead. Workers are retired
    one at a time, and only after the demand has been lower for `calm_s`.
    """

    forecast: str = RECENT
    """Name of the forecast policy, or `module:Class`."""
    forecast_options: dict[str, Any] = field(default_factory=dict[str, Any])
    start_s: float = 30.0
    """Start-up time of a worker, and so the horizon of the forecast."""
    busy_ratio: float = 0.75
    """Planned utilization of the workers."""
    workers_max: int = 64
    """Maximum number of workers of one role."""
    tpot_s: float = 0.1
    """TPOT target where no recent request has an SLO."""
    calm_s: float = 120.0
    """A worker is retired after its role has had too many workers for this long."""
    _calm_since_s: dict[Role, float] = field(default_factory=dict[Role, float])
    _forecast: ForecastPolicy = field(init=False)

    def __post_init__(self) -> None:
        self._forecast = load_plugin(self.forecast, self.forecast_options, expects=ForecastPolicy)

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        if not cluster.workers:
            return {}
        demand = self._forecast.ahead(history, self.start_s)
        work = workers_needed(demand, cluster.workers[0], cost, recent_slo_tpot_s(history, self.tpot_s))
        load: dict[Role, float] = {"prefill": work.prefill, "decode": work.decode, "mixed": work.prefill + work.decode}
        live = {role: sum(worker.role == role for worker in cluster.workers) for role in ROLES}
        return {
            role: self._steady(role, live[role], max(1, ceil(load[role] / self.busy_ratio)), now_s)
            for role in ROLES
            if live[role]
        }

    def _steady(self, role: Role, live: int, wanted: int, now_s: float) -> int:
        wanted = min(wanted, self.workers_max)
        if wanted >= live:
            self._calm_since_s.pop(role, None)
            return wanted
        if now_s - self._calm_since_s.setdefault(role, now_s) < self.calm_s:
            return live
        self._calm_since_s[role] = now_s
        return live - 1
