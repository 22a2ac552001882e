"""Roles and scaling by demand: how many prefill and decode workers a load keeps busy, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, inf
from typing import Any

from msgspec import Struct

from baton.core.plugin import load_plugin
from baton.core.ports import CostModel
from baton.core.types import ROLES, ClusterView, LoadWindow, Role, Slo, StepShape, WorkerId, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.forecast import ForecastPolicy, LoadRates
from baton.decide.policy.predictions import decoding_requests, queued_work

RECENT = "recent-demand"
WORKERS_MIN = 3
"""Minimum number of workers for a role flip: one worker of each phase has to stay."""
RECENT_S, RECENT_S_MAX = 10.0, 60.0
"""Span of the load history in which roles count arrivals, and the span of their default forecast. Where fewer than
`requests_min` requests arrive within the shorter one, it extends up to the longer one."""
BUSY_RATIO_MAX = 0.9
"""Utilization of a role above which its queue is expected to grow."""
BATCH_MAX = 1024
"""Largest decode batch that is considered for a worker that does not report its own limit."""


class WorkersNeeded(Struct, frozen=True, kw_only=True):
    """Workers that a load keeps fully busy, as fractions."""

    prefill: float
    decode: float


def workers_needed(demand: LoadRates, worker: WorkerView, cost: CostModel, tpot_s: float) -> WorkersNeeded:
    """Predict how many workers like `worker` compute the prompts of this load and decode its answers within TPOT."""
    model = cost_of(worker, cost)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """The load of the workers that prefill or decode, and the targets of its requests."""

    model: CostModel
    workers: int
    slo: Slo
    queue_s: float
    """Seconds that one worker needs for all queued prompts."""
    prompt_s: float
    """Seconds of a prompt of the mean length."""
    decoding: int
    """Requests that decode, or will as soon as their prompts are computed."""
    context_tokens: int
    needed: WorkersNeeded
    """Workers that the recent arrivals keep busy."""

    def pressure(self, prefill: int) -> float:
        """Predict the larger of TTFT / SLO and TPOT / SLO with this number of prefill workers.

        A phase whose workers are busier than `BUSY_RATIO_MAX` will miss its SLO, too, if the recent arrivals go on.
        """
        decode = self.workers - prefill
        late = (self.queue_s / prefill + self.prompt_s) / self.slo.ttft_s
        shape = StepShape(
            decode_requests=max(1, ceil(self.decoding / decode)), context_tokens=self.context_tokens // decode
        )
        slow = self.model.step_s(shape) / self.slo.tpot_s
        busy = max(self.needed.prefill / prefill, self.needed.decode / decode)
        return max(late, slow, busy / BUSY_RATIO_MAX)


@dataclass(slots=True, kw_only=True)
class DemandRoles:
    """Flip workers to the phase whose SLO is at risk, from the phase that has time left. Mixed workers stay mixed.

    The signals are those of Arrow (arXiv 2505.11916v2): queued prompts against TTFT and decode steps against TPOT, both
    predicted, and the demand of the recent past. A flip on one host is free, since the host owns the KV. Between hosts
    it loses the prefixes of the worker's host. At least one worker of each phase stays.
    """

    ttft_s: float | None = None
    """TTFT target where no recent request has an SLO. None: `ttft_slowdown` times the TTFT of an idle worker."""
    tpot_s: float | None = None
    """TPOT target where no recent request has an SLO. None: `tpot_slowdown` times the TPOT of a request alone."""
    ttft_slowdown: float = 8.0
    tpot_slowdown: float = 4.0
    requests_min: int = 8
    """No worker flips before this many requests have arrived within the last `RECENT_S_MAX`."""
    pressure_min: float = 0.75
    """No worker flips while predicted TTFT and TPOT are at most this share of their targets."""
    gain_min: float = 1.25
    """Workers flip only if this reduces the larger share by at least this factor."""
    role_s_min: float = 10.0
    """Minimum time of a worker in a role, and between flips in opposite directions."""
    forecast: str = RECENT
    """Name of the forecast policy, or `module:Class`."""
    forecast_options: dict[str, Any] = field(default_factory=dict[str, Any])
    _forecast: ForecastPolicy = field(init=False)
    _roles: dict[WorkerId, tuple[Role, float]] = field(default_factory=dict[WorkerId, tuple[Role, float]])
    """The role of each worker at the last tick, and since when it has had that role."""
    _last: tuple[Role, float] = ("mixed", -inf)
    """The role that workers flipped to last, and when."""

    def __post_init__(self) -> None:
        options = self.forecast_options or ({"span_s": RECENT_S_MAX} if self.forecast == RECENT else {})
        self._forecast = load_plugin(self.forecast, options, expects=ForecastPolicy)

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        self._note_roles(cluster, now_s)
        prefill = [worker for worker in cluster.workers if worker.role == "prefill"]
        decode = [worker for worker in cluster.workers if worker.role == "decode"]
        total, present = len(prefill) + len(decode), len(prefill)
        if total < WORKERS_MIN or not prefill or not decode:
            return {}
        recent = _recent(history, self.requests_min)
        if sum(window.arrived_requests for window in recent) < self.requests_min:
            return {}
        is_own = self.forecast != RECENT or bool(self.forecast_options)
        demand = self._forecast.ahead(history if is_own else recent, 0.0)
        load = self._load([*prefill, *decode], cluster, history, demand, cost)
        pressure = load.pressure(present)
        best = min(range(1, total), key=lambda count: (load.pressure(count), abs(count - present)))
        if pressure < self.pressure_min or pressure < self.gain_min * load.pressure(best):
            return {}
        role: Role = "prefill" if best > present else "decode"
        if self._last[0] != role and now_s - self._last[1] < self.role_s_min:
            return {}
        flips = min(abs(best - present), max(1, total // 8))
        given = sorted(decode, key=_decode_load) if role == "prefill" else sorted(prefill, key=_prompt_load)
        ready = [worker.id for worker in given if now_s - self._roles[worker.id][1] >= self.role_s_min]
        if ready:
            self._last = role, now_s
        return dict.fromkeys(ready[:flips], role)

    def _note_roles(self, cluster: ClusterView, now_s: float) -> None:
        """Record since when each worker has its role. A worker that was not seen before may flip at once."""
        self._roles = {
            worker.id: (worker.role, now_s if known is not None else -inf)
            if (known := self._roles.get(worker.id)) is None or known[0] != worker.role
            else known
            for worker in cluster.workers
        }

    def _load(
        self,
        workers: Sequence[WorkerView],
        cluster: ClusterView,
        history: Sequence[LoadWindow],
        demand: LoadRates,
        cost: CostModel,
    ) -> _Load:
        model = cost_of(workers[0], cost)
        bound = [cluster.bound[worker.id] for worker in workers if worker.id in cluster.bound]
        decoding = sum(map(decoding_requests, workers)) + sum(load.requests for load in bound)
        context_tokens = sum(worker.context_tokens for worker in workers) + sum(load.tokens for load in bound)
        prompt_s = model.prefill_s(new_tokens=max(1, round(demand.prompt_tokens)), cached_tokens=0)
        alone = StepShape(decode_requests=1, context_tokens=context_tokens // max(1, decoding))
        slo = Slo(
            ttft_s=recent_slo_ttft_s(history, self.ttft_s or self.ttft_slowdown * prompt_s),
            tpot_s=recent_slo_tpot_s(history, self.tpot_s or self.tpot_slowdown * model.step_s(alone)),
        )
        return _Load(
            model=model,
            workers=len(workers),
            slo=slo,
            queue_s=sum(queued_work(worker, cost_of(worker, cost)).alone_s for worker in workers),
            prompt_s=prompt_s,
            decoding=decoding,
            context_tokens=context_tokens,
            needed=workers_needed(demand, workers[0], cost, slo.tpot_s),
        )


def _recent(history: Sequence[LoadWindow], requests_min: int) -> list[LoadWindow]:
    """Return the windows of the last `RECENT_S`, or of a longer time, until enough requests arrived, oldest first."""
    end_s, arrived, windows = history[-1].end_s, 0, list[LoadWindow]()
    for window in reversed(history):
        span_s = RECENT_S if arrived >= requests_min else RECENT_S_MAX
        if windows and window.end_s <= end_s - span_s:
            break
        windows.append(window)
        arrived += window.arrived_requests
    return windows[::-1]


def _decode_load(worker: WorkerView) -> tuple[int, WorkerId]:
    return (worker.context_tokens, worker.id)


def _prompt_load(worker: WorkerView) -> tuple[int, WorkerId]:
    return (worker.queued_tokens, worker.id)


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
        work = workers_needed(demand, cluster.workers[0], cost, recent_slo_tpot_s(history, self.tpot_s))
        load: dict[Role, float] = {"prefill": work.prefill, "decode": work.decode, "mixed": work.prefill + work.decode}
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
