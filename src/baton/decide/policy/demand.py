"""How many prefill and decode workers a load keeps busy, by the cost model; and scaling by that number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any

from msgspec import Struct

from baton.core.plugin import load_plugin
from baton.core.ports import CostModel
from baton.core.types import ROLES, ClusterView, LoadWindow, Role, StepShape, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.forecast import ForecastPolicy, LoadRates

RECENT = "recent-demand"
_PHASES: tuple[Role, Role] = ("prefill", "decode")
BATCH_MAX = 1024
"""Largest decode batch that is considered for a worker that does not report its own limit."""


class WorkersNeeded(Struct, frozen=True, kw_only=True):
    """Workers that a load keeps fully busy, as fractions."""

    prefill: float
    decode: float


def workers_needed(
    demand: LoadRates, prompts: WorkerView, answers: WorkerView, cost: CostModel, tpot_s: float
) -> WorkersNeeded:
    """Predict how many workers like `prompts` compute the prompts, and how many like `answers` decode within TPOT."""
    model = cost_of(answers, cost)
    if not demand.requests_rps:
        return WorkersNeeded(prefill=0.0, decode=0.0)
    cached_tokens, new_tokens = round(demand.cached_tokens), round(demand.prompt_tokens - demand.cached_tokens)
    prompt_s = cost_of(prompts, cost).prefill_s(new_tokens=max(1, new_tokens), cached_tokens=cached_tokens)
    reach_tokens = round(demand.prompt_tokens + demand.output_tokens / 2)

    def step_s(batch: int) -> float:
        return model.step_s(StepShape(decode_requests=batch, context_tokens=batch * reach_tokens))

    batch = largest_batch(answers, reach_tokens, step_s_max=tpot_s, model=model)
    decode = demand.requests_rps * demand.output_tokens * step_s(batch) / batch
    return WorkersNeeded(prefill=demand.requests_rps * prompt_s, decode=decode)


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


def recent_slo_ttft_s(history: Sequence[LoadWindow], otherwise_s: float) -> float:
    """Return the most recent TTFT SLO of the last 60 windows, else `otherwise_s`."""
    for window in islice(reversed(history), 60):
        if window.slo_ttft_s:
            return window.slo_ttft_s
    return otherwise_s


def recent_slo_tpot_s(history: Sequence[LoadWindow], otherwise_s: float) -> float:
    """Return the most recent TPOT SLO of the last 60 windows, else `otherwise_s`."""
    for window in islice(reversed(history), 60):
        if window.slo_tpot_s:
            return window.slo_tpot_s
    return otherwise_s


@dataclass(slots=True, kw_only=True)
class ForecastScaling:
    """Scale each role to the demand at the time when a worker that starts now becomes ready.

    With the default forecast, `RecentDemand`, scaling reacts to load; other forecasts look ahead. Workers are retired
    one at a time, and only after the demand has been lower for `calm_s`. Mixed workers count for the phases without
    a worker of their own: beside workers of both phases, they are retired down to one.
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
    idle_s: float = 0.0
    """All workers are retired after this long without a request. The next request starts one of each role again and
    waits for it. 0: the last worker of a role stays."""
    _quiet_since_s: float | None = None
    """When the cluster became idle. None: it is busy."""
    _asleep: tuple[Role, ...] = ()
    """Roles of the workers that were retired because the cluster was idle, and have not started again since."""
    _calm_since_s: dict[Role, float] = field(default_factory=dict[Role, float])
    _forecast: ForecastPolicy = field(init=False)

    def __post_init__(self) -> None:
        self._forecast = load_plugin(self.forecast, self.forecast_options, expects=ForecastPolicy)

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        if not cluster.workers:
            if cluster.waiting_requests:
                self._quiet_since_s = None
            return dict.fromkeys(self._asleep, 1 if cluster.waiting_requests else 0)
        live = {role: sum(worker.role == role for worker in cluster.workers) for role in ROLES}
        if self._is_idle(cluster, history[-1], now_s):
            self._asleep = tuple(role for role in ROLES if live[role] or role in self._asleep)
            return dict.fromkeys(self._asleep, 0)
        self._asleep = tuple(role for role in self._asleep if not live[role])
        demand = self._forecast.ahead(history, self.start_s)
        prompts, answers = (cluster.having(role)[0] if cluster.having(role) else cluster.workers[0] for role in _PHASES)
        work = workers_needed(demand, prompts, answers, cost, recent_slo_tpot_s(history, self.tpot_s))
        load: dict[Role, float] = {"prefill": work.prefill, "decode": work.decode}
        load["mixed"] = sum(load[role] for role in _PHASES if not live[role] and role not in self._asleep)
        return {
            role: self._steady(role, live[role], max(1, ceil(load[role] / self.busy_ratio)), now_s)
            for role in ROLES
            if live[role] or role in self._asleep
        }

    def _is_idle(self, cluster: ClusterView, window: LoadWindow, now_s: float) -> bool:
        """Return whether the cluster has had no request for `idle_s`."""
        is_busy = window.arrived_requests or cluster.waiting_requests or cluster.starting
        if not self.idle_s or is_busy or any(worker.running_requests for worker in cluster.workers):
            self._quiet_since_s = None
            return False
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return now_s - self._quiet_since_s >= self.idle_s

    def _steady(self, role: Role, live: int, wanted: int, now_s: float) -> int:
        wanted = min(wanted, self.workers_max)
        if wanted >= live:
            self._calm_since_s.pop(role, None)
            return wanted
        if now_s - self._calm_since_s.setdefault(role, now_s) < self.calm_s:
            return live
        self._calm_since_s[role] = now_s
        return live - 1
