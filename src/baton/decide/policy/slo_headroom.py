"""Baton's default policy: route each request to the worker whose tightest SLO stays furthest from violation.

Pressure is predicted time / SLO: the TTFT of this request, and the TPOT of the requests that already decode on the
worker. For requests with an SLO the role of a worker only breaks ties: a decode worker computes a short prompt itself
when the prefill workers are behind, and a prefill worker decodes as far as prompts leave it time. Requests without an
SLO follow the roles: without a target, the delay that a prompt adds between two tokens cannot be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import ClusterView, HostId, Prediction, Request, RequestId, Slo, Until, WorkerId, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.admission import Reject, refuse_full
from baton.decide.policy.answer_forecast import AnswerForecast
from baton.decide.policy.arena_room import ArenaRoom, arena_rooms
from baton.decide.policy.batching import URGENT_RATIO
from baton.decide.policy.distinct_workers import DistinctWorkers
from baton.decide.policy.headroom_plans import (
    FOLLOWS_ROLES,
    SENT_ELSEWHERE,
    AnswerKey,
    AnswerPlan,
    PromptPlan,
    best_prompt_plan,
    is_sent_ahead,
    prompt_order,
    weigh_by_phase,
    weigh_by_role,
)
from baton.decide.policy.predictions import (
    PromptWork,
    ahead_s,
    answer_step_s,
    compute_s,
    decoding_requests,
    first_token_delay_s,
    join_s,
    prompt_work,
    queue_ahead,
    queued_work,
    under_way_s,
    with_bound,
)
from baton.decide.policy.prefix import longest_hit, prefix_on
from baton.decide.policy.routing import Route
from baton.decide.policy.slo_risk import MissRatios, refuse_risky
from baton.decide.policy.weighing import Weighed

_NO_LIMIT_S = 1e6
"""Step time of decodes without an SLO: `SloChunked` puts a whole prompt into one step."""


@dataclass(slots=True, kw_only=True)
class SloHeadroom:
    """Admission, routing and placement by predicted time / SLO. One object, because the decisions share state."""

    ttft_slack: float = 0.95
    """Predicted TTFTs above slack * SLO are misses."""
    tpot_slack: float = 1.0
    """Predicted TPOTs above slack * SLO are misses."""
    mixing_ratio: float = 1.3
    """Factor of the pressure if prompts and decodes mix on one worker, because each slows down the other ones to come.
    For decodes on a prefill worker it scales with the prompts' share of time."""
    step_slack: float = 0.9
    """Expected step time with decodes, as a share of the TPOT. Keep it equal to `SloChunked.tpot_slack`."""
    lends_above: float = 0.9
    """A prefill worker decodes only if the TPOT pressure on all other workers is above this."""
    output_tokens: float = 200.0
    """Expected answer length until some requests have finished."""
    requests_max: int = 1024
    """Maximum number of requests in the cluster (INV-9)."""
    miss_ratio_max: float = 0.3
    """Admit while the probability to miss the SLO of the TTFT is at most this. Requests wait for each other's prompts,
    so that one request too many makes all behind it late."""
    tpot_miss_ratio_max: float = 0.5
    """The same for the TPOT."""
    fetches: bool = True
    """Plan copies of cached prefixes between hosts. False: a prefix is used on its own host only."""
    pins_turns: bool = True
    """A request without an SLO may be computed by a decode worker whose host has most of its prompt cached."""
    hands_off: bool = True
    """A mixed worker may hand off an answer that would miss an SLO there. False: it decodes all of them."""
    _forecast: AnswerForecast = field(init=False)
    _computing: DistinctWorkers = field(default_factory=DistinctWorkers)
    """Candidates for prompts."""
    _decoding: DistinctWorkers = field(default_factory=DistinctWorkers)
    _tpots_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """TPOT predicted at admission, of each request that waits for its turn. The oldest ones are dropped."""

    def __post_init__(self) -> None:
        self._forecast = AnswerForecast(self.output_tokens)

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """Reject a request whose risk of missing its TTFT or TPOT is above the maximum."""
        forecast = self._forecast
        forecast.now_s = max(forecast.now_s, now_s)
        full = refuse_full(cluster, cost, self.requests_max)
        if full is not None or request.slo is None or not cluster.workers:
            return full
        present, cluster = cluster, with_bound(cluster)
        plan = self._plan(request, cluster.workers, cluster, cost)
        tpot_s = self._best_tpot_s(request, request.slo, cluster, cost, (present, plan.ttft_s))
        judged = Prediction(plan.ttft_s / self.ttft_slack, tpot_s / self.tpot_slack)
        alone = forecast.alone(request, cost_of(plan.worker, cost))
        answer_s = forecast.answers.expected(cluster) * tpot_s
        refused = refuse_risky(
            request.slo, judged, cluster,
            alone=Prediction(alone.ttft_s, alone.tpot_s), answer_s=answer_s,
            miss_ratios_max=MissRatios(self.miss_ratio_max, self.tpot_miss_ratio_max),
        )  # fmt: skip
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
        until = self._until(request, plan.worker, cluster, cost)
        self._forecast.note_prompt(request, plan.worker, plan.work, cluster, cost)
        if until == "end":
            self._forecast.answers.note(plan.worker, cluster)
        tpot_s = self._tpots_s.pop(request.id, 0.0)
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

        Order: workers with room for the KV; workers that meet the TPOT of this request and the TTFT of their queued
        prompts; lower pressure, which rises on a busy prefill worker; the matching role. The TPOT contains the turns
        of a full batch. If KV was streamed ahead, its target keeps the request while it meets the SLOs.
        """
        chosen = None
        if is_sent_ahead(candidates, cluster):
            key, chosen = self._best_decoder(request, source, candidates, cluster, cost)
            chosen = None if any(key[:2]) else chosen
        if chosen is None:
            workers = candidates if request.slo is None else cluster.workers
            workers = self._decoding.among(workers, self._forecast.shares)
            _, chosen = self._best_decoder(request, source, workers, cluster, cost)
        self._forecast.answers.note(chosen, cluster)
        return chosen.id

    def weigh_prompt(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> list[Weighed]:
        """Return how `route` weighs every worker of the cluster, for `baton explain`."""
        cluster, offered = with_bound(cluster), {worker.id for worker in candidates}
        arenas = arena_rooms(request, cluster, cost, self._forecast.answers)
        plans = [self._on(worker, request, cluster, cost, arenas) for worker in cluster.workers]
        if request.slo is not None:
            return weigh_by_phase(plans, self._plan(request, cluster.workers, cluster, cost).worker.id)
        best = min((plan for plan in plans if plan.worker.id in offered), key=prompt_order)
        pinned = self._pinned(best, request, cluster, cost) if self.pins_turns else best
        return weigh_by_role(plans, offered, None if pinned is best else pinned.worker.id)

    def weigh_answer(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> list[Weighed]:
        """Return how `place` weighs every worker of the cluster, for `baton explain`."""
        plan_on = self._answer_plans(request, source, cluster, cost)
        is_ahead = is_sent_ahead(candidates, cluster)
        if is_ahead:
            is_ahead = not any(self._best_decoder(request, source, candidates, cluster, cost)[0][:2])
        offered = {worker.id for worker in (candidates if is_ahead or request.slo is None else cluster.workers)}
        plans = [plan_on(worker) for worker in cluster.workers]
        owners = [plan.key() for plan in plans if plan.worker.role != "prefill" and plan.worker.id in offered]
        has_headroom = bool(owners) and not any(min(owners)[:2]) and min(owners)[2] <= self.lends_above
        why = SENT_ELSEWHERE if is_ahead else FOLLOWS_ROLES
        unable = ["" if plan.worker.id in offered else why for plan in plans]
        return [
            plan.weighed(request.slo, unable=reason, has_headroom=has_headroom)
            for plan, reason in zip(plans, unable, strict=True)
        ]

    def _best_decoder(
        self,
        request: Request,
        source: HostId | None,
        workers: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> tuple[AnswerKey, WorkerView]:
        """Return the worker under the least pressure, and its sort key.

        Prefill workers are considered only if the pressure is above `lends_above` on all others.
        """
        owners = [worker for worker in workers if worker.role != "prefill"]
        lenders = [worker for worker in workers if worker.role == "prefill"]
        plan_on = self._answer_plans(request, source, cluster, cost)
        plans = list(map(plan_on, owners))
        if plans:
            best = min(plans, key=AnswerPlan.key)
            if not (best.is_full or best.misses_slo) and best.pressure <= self.lends_above:
                return best.key(), best.worker
        best = min([*plans, *map(plan_on, lenders)], key=AnswerPlan.key)
        return best.key(), best.worker

    def _answer_plans(
        self, request: Request, source: HostId | None, cluster: ClusterView, cost: CostModel
    ) -> Callable[[WorkerView], AnswerPlan]:
        """Return the function that plans the answer on a worker."""
        tokens, output_tokens = request.prompt_tokens, self._forecast.answers.expected(cluster)
        slo, sources = request.slo, cluster.kinds_on(source)
        shares_s: dict[tuple[str, bool], float] = {}
        """Handoff time per output token, by the kind of the worker and whether it is on the source's host."""
        predict = self._forecast.predict

        def plan_on(worker: WorkerView) -> AnswerPlan:
            stays, kind = source is None or source == worker.host, worker.kind
            found, share_s = predict(worker, request, cluster, cost), shares_s.get((kind, stays))
            if share_s is None:
                handoff_s = handoff_between_s(cost, {*sources, kind}, tokens=tokens, same_host=stays)
                share_s = shares_s[kind, stays] = handoff_s / output_tokens
            is_full = 0 < worker.kv_tokens_max < worker.context_tokens + tokens
            tpot_s, free_s = found.tpot_s + share_s, found.load_s + share_s
            if slo is None:
                return AnswerPlan(worker, is_full, tpot_s, free_s, share_s, 0.0, free_s, False)
            ttft_ratio = self._ttft_pressure(worker, tokens, slo, cost_of(worker, cost))
            is_lent = worker.role == "prefill"
            mixing = 1.0 + (self.mixing_ratio - 1.0) * min(1.0, found.prompts_ratio) if is_lent else 1.0
            misses_slo = tpot_s > self.tpot_slack * slo.tpot_s or ttft_ratio > self.ttft_slack
            pressure = max(free_s / slo.tpot_s, ttft_ratio) * mixing
            return AnswerPlan(worker, is_full, tpot_s, free_s, share_s, ttft_ratio, pressure, misses_slo)

        return plan_on

    def _until(self, request: Request, worker: WorkerView, cluster: ClusterView, cost: CostModel) -> Until:
        """Return how far the worker runs the request.

        A mixed worker runs it to the end, unless the answer would miss an SLO or find no room there, and another worker
        is better. A faster step alone is no reason: prompts come to the other worker, too.
        """
        if worker.role != "mixed" or any(other.role == "decode" for other in cluster.workers):
            return "first_token"
        if request.slo is None or not self.hands_off or len(cluster.workers) == 1:
            return "end"
        workers = self._decoding.among(cluster.workers, self._forecast.shares)
        own = self._answer_plans(request, worker.host, cluster, cost)(worker).key()
        key, best = self._best_decoder(request, worker.host, workers, cluster, cost)
        return "first_token" if best.id != worker.id and own[:2] > key[:2] else "end"

    # ---- predictions

    def _plan(
        self, request: Request, workers: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> PromptPlan:
        """Return the best plan: plans that meet all SLOs first, then the lowest pressure, then the matching role.

        A decode worker must be needed, too (`best_prompt_plan`).
        """
        arenas = arena_rooms(request, cluster, cost, self._forecast.answers)
        plans = [self._on(worker, request, cluster, cost, arenas) for worker in self._computing.among(workers, {})]
        return best_prompt_plan(plans, request.slo, lambda each: self._forecast.predict(each, request, cluster, cost))

    def _best_tpot_s(
        self, request: Request, slo: Slo, cluster: ClusterView, cost: CostModel, since: tuple[ClusterView, float]
    ) -> float:
        """Predict the TPOT on the best worker for the answer. A prefill worker counts if its next prompts allow it."""
        predict, workers = self._forecast.predict, self._decoding.among(cluster.workers, self._forecast.shares)
        own = [predict(worker, request, cluster, cost, since).tpot_s for worker in workers if worker.role != "prefill"]
        if own and min(own) <= self.lends_above * slo.tpot_s:
            return min(own)
        lenders = [worker for worker in workers if worker.role == "prefill"]
        tokens, slack = request.prompt_tokens, self.ttft_slack
        able = [each for each in lenders if self._ttft_pressure(each, tokens, slo, cost_of(each, cost)) <= slack]
        found = [predict(worker, request, cluster, cost, since).tpot_s for worker in (able if own else able or lenders)]
        return min([*own, *found])

    def _pinned(self, plan: PromptPlan, request: Request, cluster: ClusterView, cost: CostModel) -> PromptPlan:
        """Return a plan for the decode worker beside the cached prefix if its first token is predicted no later.

        So a later turn of a conversation stays with the worker that decoded the earlier one, and no KV is copied. At
        least half of the prompt has to be cached, because the rest delays the answers that decode there.
        Source: ConServe, which prefills the first turn remotely and later turns on the decoder.
        """
        best = longest_hit(cluster)
        if best in (None, plan.worker.host) or 2 * cluster.prefix_hit_tokens[best] < request.prompt_tokens:
            return plan
        there = [worker for worker in cluster.workers if worker.host == best and worker.role == "decode"]
        arenas = arena_rooms(request, cluster, cost, self._forecast.answers)
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
    ) -> PromptPlan:
        model, hits, arena = cost_of(worker, cost), cluster.prefix_hit_tokens, arenas[worker.host]
        here = hits.get(worker.host, 0)
        done_tokens, load_s = here, 0.0
        slo = self._forecast.slo(request, model)
        is_pinned = request.slo is None and worker.role == "decode"
        step_s_max = _NO_LIMIT_S if is_pinned else self.step_slack * slo.tpot_s
        queue_s = arena.room_s + self._forecast.place_s(worker, cluster, model)
        after, now_s = worker, self._forecast.now_s
        began_s = cluster.step_began_s.get(worker.id, now_s) if worker.queued_tokens else now_s
        spare_s, urgent_s = ahead_s(worker, began_s, model), URGENT_RATIO * slo.ttft_s
        if worker.queued_tokens:
            during, after = (worker, worker) if request.slo is None else queue_ahead(worker)
            work = queued_work(worker, model, None if request.slo is None else slo.ttft_s)
            before_s = compute_s(during, work, model, step_s_max=step_s_max, spare_s=spare_s, urgent_s=urgent_s)
            queue_s += before_s - under_way_s(worker, before_s, now_s - began_s, step_s_max=step_s_max + spare_s)
            spare_s = 0.0  # the answers of these prompts begin
        else:
            queue_s += join_s(worker, model)
        if worker.host in cluster.tier_hits:
            prefix = prefix_on(worker, request, cluster, cost, wait_s=queue_s)
            done_tokens, load_s = prefix.tokens, prefix.load_s
        work = prompt_work(request.prompt_tokens - done_tokens, done_tokens, model)
        prompt_s = compute_s(after, work, model, step_s_max=step_s_max, spare_s=spare_s, urgent_s=urgent_s)
        wait_s = max(queue_s, load_s)
        ttft_s, fetch = wait_s + prompt_s, None
        best = longest_hit(cluster)
        if self.fetches and best is not None and hits[best] > here:
            there = hits[best]
            kinds = {*(arenas[best].kinds if best in arenas else ()), worker.kind}
            copied_s = max(queue_s, handoff_between_s(cost, kinds, tokens=there - here, same_host=False))
            rest = prompt_work(request.prompt_tokens - there, there, model)
            rest_s = compute_s(after, rest, model, step_s_max=step_s_max, spare_s=spare_s, urgent_s=urgent_s)
            if copied_s + rest_s < ttft_s:
                ttft_s, prompt_s, fetch, work, wait_s = copied_s + rest_s, rest_s, best, rest, copied_s
        if worker.queued_tokens and request.slo is not None:
            ttft_s += self._forecast.followers_s(request, worker, cluster, model, work, queue_s)
        ttft_s += first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s)
        ttft_pressure = ttft_s / slo.ttft_s
        mixing, risk = 1.0, 1.0
        if request.slo is not None and decoding_requests(worker):
            mixing, risk = self.mixing_ratio, 1.0 + arena.fill_ratio
        bounded_s, beside_s = self._tpots_beside_s(worker, request, cluster, model, work.alone_s, risk)
        return PromptPlan(
            worker=worker, fetch=fetch, queue_s=wait_s, prompt_s=prompt_s, ttft_s=ttft_s, work=work, slo=slo,
            beside_s=beside_s, bounded_s=bounded_s, factor=risk * mixing,
            pressure=max(ttft_pressure, beside_s / slo.tpot_s) * risk * mixing,
            misses_slo=request.slo is not None and max(ttft_pressure, bounded_s / slo.tpot_s) > self.ttft_slack,
        )  # fmt: skip

    def _tpots_beside_s(
        self, worker: WorkerView, request: Request, cluster: ClusterView, model: CostModel, work_s: float, risk: float
    ) -> tuple[float, float]:
        """Return the TPOT of the requests that decode on the worker, with this prompt added."""
        if not decoding_requests(worker):
            return 0.0, 0.0
        memory_s = self._forecast.memory_s(request, worker, cluster, model)
        shared_s = work_s + self._forecast.recent_s(request, worker, model, memory_s)
        alone_s = answer_step_s(worker, 0, 0, model)
        load_s = alone_s + shared_s / self._forecast.answers.on(worker, cluster)
        return self._forecast.bounded_s(request, risk * alone_s, risk * load_s), load_s

    def _ttft_pressure(self, worker: WorkerView, tokens: int, slo: Slo, model: CostModel) -> float:
        """Return the TTFT pressure on the worker's queued prompts, with one more request that decodes.

        On a prefill worker, the next prompt counts as queued: it will come while the request decodes.
        """
        work = queued_work(worker, model) if worker.queued_tokens else PromptWork(0, 0.0)
        if worker.role == "prefill":
            coming = prompt_work(round(self._forecast.prompt_tokens), 0, model)
            work = PromptWork(work.tokens + coming.tokens, work.alone_s + coming.alone_s, coming.context_tokens)
        if not work.tokens:
            return 0.0
        with_it = replace(
            worker, running_requests=worker.running_requests + 1, context_tokens=worker.context_tokens + tokens
        )
        return compute_s(with_it, work, model, step_s_max=self.step_slack * slo.tpot_s) / slo.ttft_s
