"""Roles by demand: flip workers between prefill and decode as the load turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from operator import attrgetter
from typing import Any

from baton.core.plugin import load_plugin
from baton.core.ports import CostModel
from baton.core.types import ClusterView, LoadWindow, Role, Slo, StepShape, WorkerId, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.demand import (
    RECENT,
    recent_slo_tpot_s,
    recent_slo_ttft_s,
    workers_needed,
)
from baton.decide.policy.fleet import RoleChange
from baton.decide.policy.forecast import ForecastPolicy
from baton.decide.policy.predictions import decoding_requests, queued_work
from baton.decide.policy.splits import BUSY_RATIO_MAX, Pressure, Split, SplitLoad, busy_links

WORKERS_MIN = 2
"""Minimum number of workers for a change of roles."""
RECENT_S, RECENT_S_MAX = 10.0, 60.0
"""Span of the load history in which roles count arrivals, and the span of their default forecast. Where fewer than
`requests_min` requests arrive within the shorter one, it extends up to the longer one."""
OVERLOAD = 1.4
"""Workers may become mixed if a prediction exceeds its SLO, or utilization exceeds 1.4 times `BUSY_RATIO_MAX`."""
FIRST_ROLES_MAX = 100_000
"""Bound on the workers whose first role is kept: each start by a scaling policy adds one."""
_RUNNING, _QUEUED_REQUESTS = attrgetter("running_requests"), attrgetter("queued_requests")
_ID_AND_ROLE = attrgetter("id", "role")


@dataclass(slots=True, kw_only=True)
class DemandRoles:
    """Flip workers to the phase whose SLO is at risk, from the phase that has time left.

    The signals are those of Arrow (arXiv 2505.11916v2): queued prompts against TTFT and decode steps against TPOT, both
    predicted, and the demand of the recent past. A flip on one host is free, since the host owns the KV. Between hosts
    it loses the prefixes of the worker's host.

    At least one worker of each phase stays, or as many as `prefill_ratio_min` and `decode_ratio_min` demand. The last
    worker of a phase becomes mixed while the other phase would miss its SLO. All of three or more workers become mixed
    while no split can serve the load. Workers that were started as mixed stay mixed.
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
    mixed_after_s: float = 5.0
    """Workers become mixed once every tick for this long wanted a mixed one."""
    prefill_ratio_min: float = 0.0
    """Share of the workers started for prefill that always stay. The default of a server: the reserves of its
    classes."""
    decode_ratio_min: float = 0.0
    """Share of the workers started for decode that always stay. The default is as above."""
    forecast: str = RECENT
    """Name of the forecast policy, or `module:Class`."""
    forecast_options: dict[str, Any] = field(default_factory=dict[str, Any])
    _forecast: ForecastPolicy = field(init=False)
    _roles: dict[WorkerId, tuple[Role, float]] = field(default_factory=dict[WorkerId, tuple[Role, float]])
    """The role of each worker at the last tick, and since when it has had that role."""
    _noted: list[tuple[WorkerId, Role]] = field(default_factory=list[tuple[WorkerId, Role]])
    """The workers at the last tick, each with its role."""
    _first: dict[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    """The role of each worker when it was seen first. Kept while a worker restarts."""
    _last: tuple[Role, float] = ("mixed", -inf)
    """The phase that workers flipped to last, and when."""
    _mixed_since_s: float | None = None
    """Since when a mixed worker has been wanted. None: none is."""

    def __post_init__(self) -> None:
        options = self.forecast_options or ({"span_s": RECENT_S_MAX} if self.forecast == RECENT else {})
        self._forecast = load_plugin(self.forecast, options, expects=ForecastPolicy)

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, RoleChange]:
        self._note_roles(cluster, now_s)
        workers: Sequence[WorkerView] = cluster.workers
        if "mixed" in self._first.values():
            workers = [worker for worker in workers if self._first[worker.id] != "mixed"]
        present = _split(workers)
        phases = (present.prefill > 0) + (present.decode > 0) + present.mixed
        if len(workers) < WORKERS_MIN or not (present.is_mixed or (phases == 2 and present.mixed <= 1)):
            return {}
        recent = _recent(history, self.requests_min)
        load = self._load(workers, cluster, history, recent, cost)
        best = self._best(present, workers, load, recent)
        self._mixed_since_s = (self._mixed_since_s or now_s) if best.mixed > present.mixed else None
        if best == present or (self._mixed_since_s is not None and now_s - self._mixed_since_s < self.mixed_after_s):
            return {}
        changes = self._changes(workers, present, best, now_s)
        reason = f"{present} is at {_in_words(load.pressure(present))}; {best} at {_in_words(load.pressure(best))}"
        return {worker: RoleChange(role=role, reason=reason) for worker, role in changes.items()}

    def _best(
        self, present: Split, workers: Sequence[WorkerView], load: SplitLoad, recent: Sequence[LoadWindow]
    ) -> Split:
        """Return the split to change to; the present one if no other is worth the change."""
        pressure, now = load.pressure, load.pressure(present)
        is_known = sum(window.arrived_requests for window in recent) >= self.requests_min
        if not present.mixed and (not is_known or now.most < self.pressure_min):  # most ticks end here
            return present

        def order(split: Split) -> tuple[float, int, int]:
            return (pressure(split).most, abs(split.prefill - present.prefill), split.mixed)

        found = min(self._unmixed(workers), key=order)
        if present.is_mixed:
            return found if pressure(found).most < self.pressure_min else present
        if present.mixed:
            home = Split(present.prefill, 1) if not present.decode else Split(1, present.decode)
            if pressure(home).most < self.pressure_min or not is_known:
                found = home
            elif pressure(found).most * self.gain_min > now.most:
                return present
            return found
        if max(now.ttft_ratio, now.tpot_ratio, now.busy_ratio / OVERLOAD) > 1.0:  # mixing slows answers down
            every = Split(0, 0, len(workers))
            gain = min(pressure(found).busy_ratio / pressure(every).busy_ratio, now.most / pressure(every).most)
            if gain >= self.gain_min and pressure(found).busy_ratio > 1.0 and self._may_mix(workers):
                return every
            found = min([found, *self._with_mixed(present)], key=order)
        return found if now.most >= self.gain_min * pressure(found).most else present

    def _may_mix(self, workers: Sequence[WorkerView]) -> bool:
        """Return whether all workers may become mixed. Two workers never do: one becomes mixed instead."""
        return len(workers) > WORKERS_MIN and not (self.prefill_ratio_min or self.decode_ratio_min)

    def _unmixed(self, workers: Sequence[WorkerView]) -> Iterator[Split]:
        """Yield the splits with the minimum of each phase."""
        total, first = len(workers), [self._first[worker.id] for worker in workers]
        prefill_min = max(1, ceil(self.prefill_ratio_min * first.count("prefill")))
        decode_min = max(1, ceil(self.decode_ratio_min * first.count("decode")))
        for prefill in range(prefill_min, total - decode_min + 1):
            yield Split(prefill, total - prefill)

    def _with_mixed(self, present: Split) -> Iterator[Split]:
        """Yield the splits in which the last worker of a phase is mixed."""
        if present.decode == 1 and not self.decode_ratio_min:
            yield Split(present.prefill, 0, 1)
        if present.prefill == 1 and not self.prefill_ratio_min:
            yield Split(0, present.decode, 1)

    def _changes(
        self, workers: Sequence[WorkerView], present: Split, best: Split, now_s: float
    ) -> dict[WorkerId, Role]:
        """Return the workers that change their role now, as far as the minimum times allow."""
        if best.is_mixed or present.is_mixed:
            return self._change_all(workers, best, now_s)
        if best.mixed:
            lender: Role = "prefill" if best.decode else "decode"
            return self._flip([worker for worker in workers if worker.role == lender], 1, "mixed", "mixed", now_s)
        lent: dict[WorkerId, Role] = {}
        if present.mixed:
            missing: Role = "prefill" if present.decode else "decode"
            lent = self._flip([worker for worker in workers if worker.role == "mixed"], 1, missing, "mixed", now_s)
            if not lent:
                return {}
            workers = [worker for worker in workers if worker.id not in lent]
            present = Split(present.prefill + (missing == "prefill"), present.decode + (missing == "decode"))
            self._last = ("mixed", -inf)  # another worker may follow at once
        count, total = best.prefill - present.prefill, present.prefill + present.decode
        if not count:
            return lent
        to: Role = "prefill" if count > 0 else "decode"
        given = sorted((worker for worker in workers if worker.role != to), key=_decode_load if count > 0 else _queue)
        return lent | self._flip(given, min(abs(count), max(1, total // 8)), to, to, now_s)

    def _change_all(self, workers: Sequence[WorkerView], best: Split, now_s: float) -> dict[WorkerId, Role]:
        """Let all workers become mixed, or return them to their phases; those with the most context decode."""
        if any(now_s - self._roles[worker.id][1] < self.role_s_min for worker in workers):
            return {}
        self._last, self._mixed_since_s = ("mixed", now_s), None
        by_load = sorted(workers, key=_decode_load)
        counts: dict[Role, int] = {"prefill": best.prefill, "mixed": best.mixed, "decode": best.decode}
        phases: list[Role] = [role for role, count in counts.items() for _ in range(count)]
        return {worker.id: role for worker, role in zip(by_load, phases, strict=True)}

    def _flip(
        self, given: Sequence[WorkerView], count: int, role: Role, phase: Role, now_s: float
    ) -> dict[WorkerId, Role]:
        if self._last[0] != phase and now_s - self._last[1] < self.role_s_min:
            return {}
        ready = [worker.id for worker in given if now_s - self._roles[worker.id][1] >= self.role_s_min]
        if ready:
            self._last, self._mixed_since_s = (phase, now_s), None
        return dict.fromkeys(ready[:count], role)

    def _note_roles(self, cluster: ClusterView, now_s: float) -> None:
        """Record since when each worker has its role. A worker that was not seen before may flip at once."""
        noted = list(map(_ID_AND_ROLE, cluster.workers))
        if noted == self._noted:
            return
        self._noted = noted
        if len(self._first) > FIRST_ROLES_MAX:
            self._first.clear()
        for worker in cluster.workers:
            self._first.setdefault(worker.id, worker.role)
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
        recent: Sequence[LoadWindow],
        cost: CostModel,
    ) -> SplitLoad:
        is_own = self.forecast != RECENT or bool(self.forecast_options)
        demand = self._forecast.ahead(history if is_own else recent, 0.0)
        prompts, answers = self._longest(workers, "prefill"), self._longest(workers, "decode")
        prefill_model, decode_model = cost_of(prompts, cost), cost_of(answers, cost)
        bound = [cluster.bound[worker.id] for worker in workers if worker.id in cluster.bound]
        computing = filter(_QUEUED_REQUESTS, workers)
        prompts_only = sum(worker.running_requests - decoding_requests(worker) for worker in computing)
        decoding = sum(map(_RUNNING, workers)) - prompts_only + sum(load.requests for load in bound)
        context_tokens = sum(worker.context_tokens for worker in workers) + sum(load.tokens for load in bound)
        new_tokens = max(1, round(demand.prompt_tokens - demand.cached_tokens))
        prompt_s = prefill_model.prefill_s(new_tokens=new_tokens, cached_tokens=round(demand.cached_tokens))
        alone = StepShape(decode_requests=1, context_tokens=context_tokens // max(1, decoding))
        slo = Slo(
            ttft_s=recent_slo_ttft_s(history, self.ttft_s or self.ttft_slowdown * prompt_s),
            tpot_s=recent_slo_tpot_s(history, self.tpot_s or self.tpot_slowdown * decode_model.step_s(alone)),
        )
        waiting = cluster.waiting_requests
        queued = [worker for worker in workers if worker.queued_tokens]
        queue_s = sum(queued_work(worker, cost_of(worker, cost)).alone_s for worker in queued)
        return SplitLoad(
            decode_model=decode_model,
            requests_max=answers.requests_max,
            slo=slo,
            queue_s=queue_s + waiting * prompt_s,
            prompt_s=prompt_s,
            chunk_s=prefill_model.prefill_s(
                new_tokens=min(new_tokens, prompts.step_tokens_max or new_tokens), cached_tokens=0
            ),
            output_tokens=demand.output_tokens,
            decoding=decoding + waiting,
            waiting=waiting,
            context_tokens=context_tokens + round(waiting * demand.prompt_tokens),
            needed=workers_needed(demand, prompts, answers, cost, slo.tpot_s),
            links=busy_links(demand, workers, decode_model),
        )

    def _longest(self, workers: Sequence[WorkerView], role: Role) -> WorkerView:
        """Return the worker that has served a phase for longest: it has learned the prices of that phase."""
        able = [worker for worker in workers if worker.role == role] or workers
        return min(able, key=lambda worker: self._roles[worker.id][1])


def _split(workers: Sequence[WorkerView]) -> Split:
    roles = [worker.role for worker in workers]
    return Split(roles.count("prefill"), roles.count("decode"), roles.count("mixed"))


def _in_words(pressure: Pressure) -> str:
    shares = pressure.ttft_ratio, pressure.tpot_ratio, pressure.busy_ratio * BUSY_RATIO_MAX
    return "{:.0%} of the TTFT target, {:.0%} of TPOT, {:.0%} busy".format(*shares)


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


def _queue(worker: WorkerView) -> tuple[int, WorkerId]:
    return (worker.queued_tokens, worker.id)
