"""Baton's default policy: route each request to the worker whose tightest SLO stays furthest from violation.

Pressure is predicted time / SLO: the TTFT of this request, and the TPOT of the requests that already decode on the
worker. For requests with an SLO the role of a worker only breaks ties: a decode worker computes a short prompt itself
when the prefill workers are behind, and a prefill worker decodes as far as prompts leave it time. Requests without an
SLO follow the roles: without a target, the delay that a prompt adds between two tokens cannot be judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

from msgspec import Struct
from msgspec.structs import replace

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import ClusterView, HostId, Prediction, Request, RequestId, Slo, StepShape, WorkerId, WorkerView
from baton.decide.cost.online import cost_of, price_ratio
from baton.decide.policy.admission import Reject, refuse_full
from baton.decide.policy.arena_room import TIME_S_MIN, AnswerLengths, ArenaRoom, arena_rooms
from baton.decide.policy.distinct_workers import DistinctWorkers
from baton.decide.policy.predictions import (
    answer_step_s,
    coming_requests,
    compute_s,
    decoding_requests,
    first_token_delay_s,
    prompt_work,
    queue_ahead,
    queued_work,
    with_bound,
)
from baton.decide.policy.prefix import longest_hit, prefix_on
from baton.decide.policy.routing import Route
from baton.decide.policy.slo_risk import refuse_risky

_NO_LIMIT_S = 1e6
"""Step time of decodes without an SLO: `SloChunked` puts a whole prompt into one step."""


@dataclass(slots=True)
class _Share:
    """Seconds of recent prompt work on a worker, by the given prices and with exponential decay."""

    prompts_s: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float, memory_s: float) -> float:
        return self.prompts_s * exp((self.at_s - now_s) / memory_s) if now_s > self.at_s else self.prompts_s


class _Plan(Struct, frozen=True, gc=False):
    """A candidate worker for a prompt, with the predictions for it."""

    worker: WorkerView
    fetch: HostId | None
    ttft_s: float
    work_s: float
    """Time that the prompt adds to the steps of the requests that decode there."""
    pressure: float
    misses_slo: bool
    """True if the TTFT of this request or the TPOT of the requests that decode there would miss its SLO."""


@dataclass(slots=True, kw_only=True)
class SloHeadroom:
    """Admission, routing and placement by predicted time / SLO. One object, because the decisions share state."""

    ttft_slack: float = 0.95
    """Admit while predicted TTFT <= slack * SLO."""
    tpot_slack: float = 1.0
    """Admit while predicted TPOT <= slack * SLO."""
    mixing_ratio: float = 2.0
    """Factor of the pressure if prompts and decodes mix on one worker: a decode that joins just after a step with a
    prompt has begun waits for two steps. For decodes on a prefill worker it scales with the prompts' share of time."""
    step_slack: float = 0.9
    """Expected step time with decodes, as a share of the TPOT. Keep it equal to `SloChunked.tpot_slack`."""
    output_tokens: float = 200.0
    """Expected answer length until some requests have finished."""
    requests_max: int = 1024
    """Maximum number of requests in the cluster (INV-9)."""
    miss_ratio_max: float = 0.3
    """Admit while the probability to miss the SLO is at most this."""
    fetches: bool = True
    """Plan copies of cached prefixes between hosts. False: a prefix is used on its own host only."""
    pins_turns: bool = True
    """A request without an SLO may be computed by a decode worker whose host has most of its prompt cached."""
    _shares: dict[WorkerId, _Share] = field(default_factory=dict[WorkerId, _Share])
    _answers: AnswerLengths = field(init=False)
    _computing: DistinctWorkers = field(default_factory=DistinctWorkers)
    """Candidates for prompts."""
    _decoding: DistinctWorkers = field(default_factory=DistinctWorkers)
    _now_s: float = 0.0
    _tpots_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """TPOT predicted at admission, of each request that waits for its turn. The oldest ones are dropped."""
    _alone: tuple[Request | None, CostModel | None, Slo] = (None, None, Slo(ttft_s=1e-9, tpot_s=1e-9))
    """Cache: the latencies that the last request without an SLO would have on an idle worker."""

    def __post_init__(self) -> None:
        self._answers = AnswerLengths(self.output_tokens)

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """Reject a request whose TTFT or TPOT is predicted to miss its SLO on every worker."""
        self._now_s = max(self._now_s, now_s)
        full = refuse_full(cluster, cost, self.requests_max)
        if full is not None or request.slo is None or not cluster.workers:
            return full
        present, cluster = cluster, with_bound(cluster)
        plan = self._plan(request, cluster.workers, cluster, cost)
        decoders = self._decoding.among(cluster.workers, self._shares)
        now, predict = (present, plan.ttft_s), self._predict_decode
        tpot_s = min(predict(worker, request, cluster, cost, now)[0] for worker in decoders)
        judged = Prediction(plan.ttft_s / self.ttft_slack, tpot_s / self.tpot_slack)
        answer_s = self._answers.expected(cluster) * tpot_s
        refused = refuse_risky(request.slo, judged, cluster, miss_ratio_max=self.miss_ratio_max, answer_s=answer_s)
        if refused is None:
            self._tpots_s[request.id] = tpot_s
        if len(self._tpots_s) > self.requests_max:  # some requests have ended before their turn
            del self._tpots_s[next(iter(self._tpots_s))]
        return refused

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        workers = candidates if request.slo is None else cluster.workers
        if cluster.bound:
            wanted, cluster = {worker.id for worker in workers}, with_bound(cluster)
            workers = [worker for worker in cluster.workers if worker.id in wanted]
        plan = self._plan(request, workers, cluster, cost)
        if request.slo is None and self.pins_turns:
            plan = self._pinned(plan, request, cluster, cost)
        share = self._shares.setdefault(plan.worker.id, _Share())
        model = cost_of(plan.worker, cost)
        memory_s = self._memory_s(request, plan.worker, cluster, model)
        share.prompts_s = share.at(self._now_s, memory_s) + plan.work_s / price_ratio(model, request.prompt_tokens)
        share.at_s = self._now_s
        if len(self._shares) > 2 * len(cluster.workers):
            present = {worker.id for worker in cluster.workers}
            self._shares = {worker: share for worker, share in self._shares.items() if worker in present}
        tpot_s, until = self._tpots_s.pop(request.id, 0.0), "first_token"
        if plan.worker.role == "mixed" and all(worker.role != "decode" for worker in cluster.workers):
            until = "end"
            self._answers.note(plan.worker, cluster)
        return Route(worker=plan.worker.id, fetch=plan.fetch, until=until, predicted=Prediction(plan.ttft_s, tpot_s))

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """Choose the decode worker under the least pressure.

        Order: workers with room for the KV and a place in their batch; workers that meet the TPOT of this request and
        the TTFT of their queued prompts; lower pressure, which rises on a busy prefill worker; the matching role. If KV
        was streamed ahead, its target keeps the request while it meets the SLOs: others would need a second copy.
        """
        tokens, output_tokens, slo = request.prompt_tokens, self._answers.expected(cluster), request.slo
        sources = cluster.kinds_on(source)
        shares_s: dict[tuple[str, bool], float] = {}

        def handoff_share_s(kind: str, *, same_host: bool) -> float:
            """Return the handoff time per output token."""
            if (kind, same_host) not in shares_s:
                handoff_s = handoff_between_s(cost, {*sources, kind}, tokens=tokens, same_host=same_host)
                shares_s[kind, same_host] = handoff_s / output_tokens
            return shares_s[kind, same_host]

        def key(worker: WorkerView) -> tuple[bool, bool, float, bool, WorkerId]:
            stays = source is None or source == worker.host
            tpot_s, prompts_ratio = self._predict_decode(worker, request, cluster, cost)
            tpot_s += handoff_share_s(worker.kind, same_host=stays)
            is_full = 0 < worker.kv_tokens_max < worker.context_tokens + tokens
            is_full = is_full or 0 < worker.requests_max <= decoding_requests(worker)
            is_lent = worker.role == "prefill"
            if slo is None:
                return (is_full, False, tpot_s, is_lent, worker.id)
            tpot_pressure = tpot_s / slo.tpot_s
            ttft_pressure = self._ttft_pressure(worker, tokens, slo, cost_of(worker, cost))
            mixing = 1.0 + (self.mixing_ratio - 1.0) * min(1.0, prompts_ratio) if is_lent else 1.0
            misses_slo = tpot_pressure > self.tpot_slack or ttft_pressure > self.ttft_slack
            return (is_full, misses_slo, max(tpot_pressure, ttft_pressure) * mixing, is_lent, worker.id)

        chosen = min(candidates, key=key) if _is_ahead(candidates, cluster) else None
        if chosen is None or any(key(chosen)[:2]):
            workers = candidates if slo is None else cluster.workers
            chosen = min(self._decoding.among(workers, self._shares), key=key)
        self._answers.note(chosen, cluster)
        return chosen.id

    # ---- predictions

    def _plan(self, request: Request, workers: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> _Plan:
        """Return the best plan: plans that meet all SLOs first, then the lowest pressure, then the matching role.

        The mixing factor changes the order only among plans that meet all SLOs, or among plans that miss one.
        """
        arenas = arena_rooms(request, cluster, cost, self._answers)
        plans = [self._on(worker, request, cluster, cost, arenas) for worker in self._computing.among(workers, {})]
        return min(plans, key=_order)

    def _pinned(self, plan: _Plan, request: Request, cluster: ClusterView, cost: CostModel) -> _Plan:
        """Return a plan for the decode worker beside the cached prefix if its first token is predicted no later.

        So a later turn of a conversation stays with the worker that decoded the earlier one, and no KV is copied. At
        least half of the prompt has to be cached, because the rest delays the answers that decode there.
        Source: ConServe, which prefills the first turn remotely and later turns on the decoder.
        """
        best = longest_hit(cluster)
        if best in (None, plan.worker.host) or 2 * cluster.prefix_hit_tokens[best] < request.prompt_tokens:
            return plan
        there = [worker for worker in cluster.workers if worker.host == best and worker.role == "decode"]
        arenas = arena_rooms(request, cluster, cost, self._answers)
        plans = [self._on(worker, request, cluster, cost, arenas) for worker in self._computing.among(there, {})]
        own = min(plans, key=lambda own: (own.ttft_s, own.worker.id), default=plan)
        return own if own.ttft_s <= plan.ttft_s else plan

    def _on(
        self,
        worker: WorkerView,
        request: Request,
        cluster: ClusterView,
        cost: CostModel,
        arenas: Mapping[HostId, ArenaRoom],
    ) -> _Plan:
        model, hits, arena = cost_of(worker, cost), cluster.prefix_hit_tokens, arenas[worker.host]
        here = hits.get(worker.host, 0)
        done_tokens, load_s = here, 0.0
        slo = self._slo(request, model)
        is_pinned = request.slo is None and worker.role == "decode"
        step_s_max = _NO_LIMIT_S if is_pinned else self.step_slack * slo.tpot_s
        queue_s = arena.room_s + self._place_s(worker, cluster, model)
        if is_pinned and decoding_requests(worker):
            queue_s += answer_step_s(worker, 0, 0, model)  # the step that runs at arrival
        after = worker
        if worker.queued_tokens:
            during, after = (worker, worker) if request.slo is None else queue_ahead(worker)
            queue_s += compute_s(during, queued_work(worker, model), model, step_s_max=step_s_max)
        if worker.host in cluster.tier_hits:
            prefix = prefix_on(worker, request, cluster, cost, wait_s=queue_s)
            done_tokens, load_s = prefix.tokens, prefix.load_s
        work = prompt_work(request.prompt_tokens - done_tokens, done_tokens, model)
        prompt_s = compute_s(after, work, model, step_s_max=step_s_max)
        ttft_s, fetch = max(queue_s, load_s) + prompt_s, None
        best = longest_hit(cluster)
        if self.fetches and best is not None and hits[best] > here:
            there = hits[best]
            kinds = {*(arenas[best].kinds if best in arenas else ()), worker.kind}
            wait_s = max(queue_s, handoff_between_s(cost, kinds, tokens=there - here, same_host=False))
            rest = prompt_work(request.prompt_tokens - there, there, model)
            rest_s = compute_s(after, rest, model, step_s_max=step_s_max)
            if wait_s + rest_s < ttft_s:
                ttft_s, prompt_s, fetch, work = wait_s + rest_s, rest_s, best, rest
        ttft_s += first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s)
        ttft_pressure = ttft_s / slo.ttft_s
        tpot_pressure = self._tpot_pressure(worker, request, cluster, model, work.alone_s)
        mixing, risk = 1.0, 1.0
        if request.slo is not None and decoding_requests(worker):
            mixing, risk = self.mixing_ratio, 1.0 + arena.fill_ratio
        return _Plan(
            worker=worker, fetch=fetch, ttft_s=ttft_s, work_s=work.alone_s,
            pressure=max(ttft_pressure, tpot_pressure) * risk * mixing,
            misses_slo=request.slo is not None and max(ttft_pressure, tpot_pressure * risk) > self.ttft_slack,
        )  # fmt: skip

    def _tpot_pressure(
        self, worker: WorkerView, request: Request, cluster: ClusterView, model: CostModel, work_s: float
    ) -> float:
        """Return the TPOT pressure on the requests that decode on the worker, with this prompt added."""
        if not decoding_requests(worker):
            return 0.0
        share, shared_s = self._shares.get(worker.id), work_s
        if share is not None:
            recent_s = share.at(self._now_s, self._memory_s(request, worker, cluster, model))
            shared_s += recent_s * price_ratio(model, request.prompt_tokens)
        tpot_s = answer_step_s(worker, 0, 0, model) + shared_s / self._answers.on(worker, cluster)
        return tpot_s / self._slo(request, model).tpot_s

    def _predict_decode(
        self,
        worker: WorkerView,
        request: Request,
        cluster: ClusterView,
        cost: CostModel,
        since: tuple[ClusterView, float] | None = None,
    ) -> tuple[float, float]:
        """Predict the TPOT of a request that decodes on this worker, and the share of the worker's time for prompts.

        `since`: the present cluster, and the time until the request decodes, in which answers end and begin. None: now.
        Prompts are assumed to keep their recent share, which delays tokens. It is above 1 if the worker is behind.
        """
        model, decodes = cost_of(worker, cost), decoding_requests(worker)
        more = 0.0
        if since is not None:
            present, after_s = since
            bound = present.bound.get(worker.id)
            begun = decodes - (bound.requests if bound is not None else 0)
            life_s = self._answers.on(worker, cluster) * answer_step_s(worker, 0, 0, model)
            more = coming_requests(present) if worker.role != "prefill" else 0.0
            more -= max(0, begun) * min(1.0, after_s / max(TIME_S_MIN, life_s))
        each_tokens = (worker.context_tokens + request.prompt_tokens) / (decodes + 1)
        alone_s = answer_step_s(worker, 1 + round(more), request.prompt_tokens + round(more * each_tokens), model)
        share = self._shares.get(worker.id)
        if share is None:
            return alone_s, 0.0
        memory_s = self._memory_s(request, worker, cluster, model)
        prompts_ratio = share.at(self._now_s, memory_s) * price_ratio(model, request.prompt_tokens) / memory_s
        return alone_s + prompts_ratio * self._slo(request, model).tpot_s, prompts_ratio

    def _ttft_pressure(self, worker: WorkerView, tokens: int, slo: Slo, model: CostModel) -> float:
        """Return the TTFT pressure on the worker's queued prompts, with one more request that decodes."""
        if not worker.queued_tokens:
            return 0.0
        with_it = replace(
            worker, running_requests=worker.running_requests + 1, context_tokens=worker.context_tokens + tokens
        )
        step_s_max = self.step_slack * slo.tpot_s
        return compute_s(with_it, queued_work(worker, model), model, step_s_max=step_s_max) / slo.ttft_s

    def _memory_s(self, request: Request, worker: WorkerView, cluster: ClusterView, model: CostModel) -> float:
        """Return the seconds for which an answer decodes on this worker: the decay time of `_Share`."""
        return self._answers.on(worker, cluster) * self._slo(request, model).tpot_s

    def _place_s(self, worker: WorkerView, cluster: ClusterView, model: CostModel) -> float:
        """Predict the time until the batch has a free place: enough decodes must finish first."""
        too_many = decoding_requests(worker) + 1 - worker.requests_max
        if not worker.requests_max or too_many <= 0:
            return 0.0
        life_s = self._answers.on(worker, cluster) * answer_step_s(worker, 0, 0, model)
        return too_many * life_s / decoding_requests(worker)

    def _slo(self, request: Request, model: CostModel) -> Slo:
        """Return the SLO of the request. Without one: the latencies that it would have on an idle worker."""
        if request.slo is not None:
            return request.slo
        asked, of, slo = self._alone
        if request is not asked or model is not of:
            alone = StepShape(decode_requests=1, context_tokens=request.prompt_tokens)
            slo = Slo(
                ttft_s=max(TIME_S_MIN, model.prefill_s(new_tokens=request.prompt_tokens, cached_tokens=0)),
                tpot_s=max(TIME_S_MIN, model.step_s(alone)),
            )
            self._alone = (request, model, slo)
        return slo


def _order(plan: _Plan) -> tuple[bool, float, float, bool, WorkerId]:
    """Return the sort key of a plan; the lowest is best."""
    worker = plan.worker
    return (plan.misses_slo, plan.pressure, plan.ttft_s, worker.role == "decode", worker.id)


def _is_ahead(candidates: Sequence[WorkerView], cluster: ClusterView) -> bool:
    """Return whether the KV was streamed ahead to one host: then only workers of that host are candidates."""
    if not cluster.is_sent_ahead or candidates[0].host != candidates[-1].host:
        return False
    return len(candidates) < len(cluster.having("decode"))
