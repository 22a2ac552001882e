"""Baton's own choices: every request goes where the most pressed promise of all that it touches is pressed least.

Pressure is predicted time over promised time: of this request's first token, and of each token of those that decode
where its prompt would be computed. For a request with an SLO a worker's role says where its work goes if all else is
equal, and forbids nothing: a decode worker computes a short prompt itself when the prefill workers are behind, and a
prefill worker decodes as far as prompts leave it time, so the fleet takes the shape that the load asks for.
Without an SLO nobody can say what a prompt between two tokens may cost: then roles are kept, as an operator expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import exp
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import ClusterView, HostId, Request, Slo, StepShape, WorkerId, WorkerView
from baton.decide.policy.admission import AdmitAll, Reject, refuse_late
from baton.decide.policy.distinct_workers import DistinctWorkers
from baton.decide.policy.predictions import (
    PromptWork,
    decoding_requests,
    first_token_delay_s,
    prompt_work,
    queued_work,
    with_bound,
)
from baton.decide.policy.prefix import prefix_on
from baton.decide.policy.routing import Route

_CONTEXT, _ARENA = attrgetter("context_tokens"), attrgetter("host", "kv_tokens_max")
_EMPTY = StepShape()
TIME_S_MIN = 1e-9
"""What a cost model says takes no time at all, takes so long: it is divided by."""
CHUNK_TOKENS_MIN = 16
"""Prompt tokens that a step takes even where decodes leave it no time, as `SloChunked` does."""


@dataclass(slots=True)
class _Share:
    """Seconds that prompts add to a worker's steps, of those that it was given lately: what its answers wait for."""

    prompts_s: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float, memory_s: float) -> float:
        return self.prompts_s * exp((self.at_s - now_s) / memory_s) if now_s > self.at_s else self.prompts_s


class _Arena(Struct, frozen=True, gc=False):
    """One host's KV, as the loads of its workers tell."""

    room_s: float
    """When there will be room for the request."""
    fill_ratio: float
    kinds: Set[str] = frozenset()
    """Of its workers, where it has the longest hit: they would send it."""


class _Plan(Struct, frozen=True, gc=False):
    """One way to compute a prompt."""

    worker: WorkerView
    fetch: HostId | None
    ttft_s: float
    work_s: float
    """What the prompt adds to the steps of those that decode there."""
    pressure: float
    breaks_promise: bool
    """This request's first token is predicted too late, or the tokens of those that decode there too slow."""


@dataclass(slots=True, kw_only=True)
class SloHeadroom:
    """Admits, routes and places. One object plays all three families, so that each knows what the others have done."""

    ttft_slack: float = 0.95
    """Admit while predicted TTFT <= slack * SLO."""
    tpot_slack: float = 1.0
    """The same of TPOT."""
    mixing_ratio: float = 2.0
    """Work of both kinds on one worker counts as this many times as pressing: who comes to decode when a step with a
    prompt in it has just begun waits for two, and an answer of a few tokens does not make up for that. On a prefill
    worker an answer weighs so much where prompts take all of its time, and less where they take less."""
    step_slack: float = 0.9
    """Share of the TPOT that a step beside decodes takes: `SloChunked.tpot_slack`, as far as policies go together."""
    output_tokens: float = 200.0
    """Taken for an answer's length until some have finished."""
    requests_max: int = 1024
    """Most requests in the cluster: the bound that INV-9 asks for."""
    _shares: dict[WorkerId, _Share] = field(default_factory=dict[WorkerId, _Share])
    _answers: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    """Mean length that was predicted of the answers which decode on a worker."""
    _computing: DistinctWorkers = field(default_factory=DistinctWorkers)
    """Whom a prompt may go to."""
    _decoding: DistinctWorkers = field(default_factory=DistinctWorkers)
    _now_s: float = 0.0
    _alone: tuple[Request | None, CostModel | None, Slo] = (None, None, Slo(ttft_s=1e-9, tpot_s=1e-9))
    """What the last request without a promise would see if it were alone: a decision asks that for every worker."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """See `AdmissionPolicy.admit`. Refuses what is predicted to miss its TTFT or its TPOT wherever it goes."""
        self._now_s = max(self._now_s, now_s)
        full = AdmitAll(requests_max=self.requests_max).admit(request, cluster, cost, now_s)
        if full is not None or request.slo is None or not cluster.workers:
            return full
        cluster = with_bound(cluster)
        plan = self._plan(request, cluster.workers, cluster, cost)
        decoders = self._decoding.among(cluster.workers, self._shares)
        tpot_s = min(self._answer(worker, request, cluster, cost)[0] for worker in decoders)
        return refuse_late(request.slo, plan.ttft_s / self.ttft_slack, tpot_s / self.tpot_slack)

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        """See `RoutingPolicy.route`."""
        workers = candidates if request.slo is None else cluster.workers
        if cluster.bound:
            wanted, cluster = {worker.id for worker in workers}, with_bound(cluster)
            workers = [worker for worker in cluster.workers if worker.id in wanted]
        plan = self._plan(request, workers, cluster, cost)
        share = self._shares.setdefault(plan.worker.id, _Share())
        share.prompts_s = share.at(self._now_s, self._memory_s(request, plan.worker, cluster, cost)) + plan.work_s
        share.at_s = self._now_s
        if len(self._shares) > 2 * len(cluster.workers):
            self._forget(cluster)
        until = "end" if plan.worker.role == "mixed" else "first_token"
        if until == "end":
            self._note_answer(plan.worker, cluster)
        return Route(worker=plan.worker.id, fetch=plan.fetch, until=until)

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """See `PlacementPolicy.place`. Workers go first that keep its TPOT, and the TTFT of prompts that wait there.

        Then those whose promises are pressed least. A prefill worker weighs more as far as prompts take its time. Of
        equals the worker whose role it is goes first. Who has no room for the KV, or no place in its batch, comes last:
        a batch serves the oldest, and a short answer waits for their end.
        Where KV has gone ahead, whoever is there and keeps it has the request: elsewhere it would be copied again.
        """
        tokens, output_tokens, slo = request.prompt_tokens, self._expected_tokens(cluster), request.slo
        sources = cluster.kinds_on(source)
        ways_s: dict[tuple[str, bool], float] = {}

        def way_s(kind: str, *, same_host: bool) -> float:
            if (kind, same_host) not in ways_s:
                handoff_s = handoff_between_s(cost, {*sources, kind}, tokens=tokens, same_host=same_host)
                ways_s[kind, same_host] = handoff_s / output_tokens
            return ways_s[kind, same_host]

        def key(worker: WorkerView) -> tuple[bool, bool, float, bool, WorkerId]:
            stays = source is None or source == worker.host
            tpot_s, prompts_ratio = self._answer(worker, request, cluster, cost)
            tpot_s += way_s(worker.kind, same_host=stays)
            is_full = 0 < worker.kv_tokens_max < worker.context_tokens + tokens
            is_full = is_full or 0 < worker.requests_max <= decoding_requests(worker)
            is_lent = worker.role == "prefill"
            if slo is None:
                return (is_full, False, tpot_s, is_lent, worker.id)
            slow, late = tpot_s / slo.tpot_s, self._late(worker, tokens, slo, cost.on(worker.kind))
            mixing = 1.0 + (self.mixing_ratio - 1.0) * min(1.0, prompts_ratio) if is_lent else 1.0
            breaks_promise = slow > self.tpot_slack or late > self.ttft_slack
            return (is_full, breaks_promise, max(slow, late) * mixing, is_lent, worker.id)

        chosen = min(candidates, key=key) if _is_ahead(candidates, cluster) else None
        if chosen is None or any(key(chosen)[:2]):
            workers = candidates if slo is None else cluster.workers
            chosen = min(self._decoding.among(workers, self._shares), key=key)
        self._note_answer(chosen, cluster)
        return chosen.id

    # ---- predictions

    def _plan(self, request: Request, workers: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> _Plan:
        """Choose one of the workers, and what it fetches, under the least pressure: first of those that keep promises.

        Prompts beside decodes weigh more, but only among plans that keep them all or that all break one. Of equals the
        worker whose role it is goes first.
        """
        arenas = self._arenas(request, cluster, cost)
        looked_at = self._computing.among(workers, {})
        plans = [self._on(worker, request, cluster, cost, arenas) for worker in looked_at]
        return min(plans, key=_order)

    def _arenas(self, request: Request, cluster: ClusterView, cost: CostModel) -> dict[HostId, _Arena]:
        """See how full each host's arena is, and when it has room for the request: as answers end, KV is given back."""
        arena_tokens = dict(map(_ARENA, reversed(cluster.workers)))  # as the first worker of each host tells it
        used = dict.fromkeys(arena_tokens, 0)
        for worker in filter(_CONTEXT, cluster.workers):
            used[worker.host] += worker.context_tokens
        reach_tokens = request.prompt_tokens + self._expected_tokens(cluster) / 2
        best = _longest_hit(cluster)
        kinds = {best: cluster.kinds_on(best)} if best is not None else {}
        arenas: dict[HostId, _Arena] = {}
        for host, tokens_max in arena_tokens.items():
            if not tokens_max:
                arenas[host] = _Arena(0.0, 0.0, kinds.get(host, frozenset()))
                continue
            missing_tokens = used[host] + reach_tokens - tokens_max
            room_s = missing_tokens / self._freed_tokens(host, cluster, cost) if missing_tokens > 0 else 0.0
            arenas[host] = _Arena(room_s, min(1.0, used[host] / tokens_max), kinds.get(host, frozenset()))
        return arenas

    def _freed_tokens(self, host: HostId, cluster: ClusterView, cost: CostModel) -> float:
        """Predict how many tokens' KV is given back on a host in a second, at least one."""
        freed_tokens = 0.0
        for worker in cluster.workers:
            if worker.host == host and worker.context_tokens:
                life_s = self._answer_tokens(worker, cluster) * _decode_s(worker, 0, 0, cost.on(worker.kind))
                decoding_ratio = decoding_requests(worker) / max(1, worker.running_requests)
                freed_tokens += worker.context_tokens * decoding_ratio / max(TIME_S_MIN, life_s)
        return max(1.0, freed_tokens)

    def _on(
        self,
        worker: WorkerView,
        request: Request,
        cluster: ClusterView,
        cost: CostModel,
        arenas: Mapping[HostId, _Arena],
    ) -> _Plan:
        model, hits, arena = cost.on(worker.kind), cluster.prefix_hit_tokens, arenas[worker.host]
        here = hits.get(worker.host, 0)
        done_tokens, load_s = here, 0.0
        promise = self._promise(request, model)
        queue_s = arena.room_s + self._place_s(worker, cluster, model)
        if worker.queued_tokens:
            queue_s += self._compute_s(worker, queued_work(worker, model), promise.tpot_s, model)
        if worker.host in cluster.tier_hits:
            prefix = prefix_on(worker, request, cluster, cost, wait_s=queue_s)
            done_tokens, load_s = prefix.tokens, prefix.load_s
        work = prompt_work(request.prompt_tokens - done_tokens, done_tokens, model)
        prompt_s = self._compute_s(worker, work, promise.tpot_s, model)
        ttft_s, fetch = max(queue_s, load_s) + prompt_s, None
        best = _longest_hit(cluster)
        if best is not None and hits[best] > here:
            there = hits[best]
            kinds = {*(arenas[best].kinds if best in arenas else ()), worker.kind}
            wait_s = max(queue_s, handoff_between_s(cost, kinds, tokens=there - here, same_host=False))
            rest = prompt_work(request.prompt_tokens - there, there, model)
            rest_s = self._compute_s(worker, rest, promise.tpot_s, model)
            if wait_s + rest_s < ttft_s:
                ttft_s, prompt_s, fetch, work = wait_s + rest_s, rest_s, best, rest
        ttft_s += first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s)
        late = ttft_s / promise.ttft_s
        slow = self._slow(worker, request, cluster, model, work.alone_s)
        mixing, risk = 1.0, 1.0
        if request.slo is not None and decoding_requests(worker):
            mixing, risk = self.mixing_ratio, 1.0 + arena.fill_ratio
        return _Plan(
            worker=worker, fetch=fetch, ttft_s=ttft_s, work_s=work.alone_s, pressure=max(late, slow) * risk * mixing,
            breaks_promise=request.slo is not None and max(late, slow * risk) > self.ttft_slack,
        )  # fmt: skip

    def _slow(
        self, worker: WorkerView, request: Request, cluster: ClusterView, model: CostModel, work_s: float
    ) -> float:
        """Return the pressure on the tokens of those that decode there already, with this prompt beside them."""
        if not decoding_requests(worker):
            return 0.0
        share, shared_s = self._shares.get(worker.id), work_s
        if share is not None:
            shared_s += share.at(self._now_s, self._memory_s(request, worker, cluster, model))
        tpot_s = _decode_s(worker, 0, 0, model) + shared_s / self._answer_tokens(worker, cluster)
        return tpot_s / self._promise(request, model).tpot_s

    def _answer(
        self, worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel
    ) -> tuple[float, float]:
        """Predict the time per token of a request that decodes on this worker, and how much of its time prompts take.

        Prompts are taken to go on as of late (0..1 of its time, more where it is behind), and every token to wait for
        that share of the TPOT.
        """
        model = cost.on(worker.kind)
        alone_s = _decode_s(worker, 1, request.prompt_tokens, model)
        share = self._shares.get(worker.id)
        if share is None:
            return alone_s, 0.0
        memory_s = self._memory_s(request, worker, cluster, model)
        prompts_ratio = share.at(self._now_s, memory_s) / memory_s
        return alone_s + prompts_ratio * self._promise(request, model).tpot_s, prompts_ratio

    def _late(self, worker: WorkerView, tokens: int, slo: Slo, model: CostModel) -> float:
        """Return the pressure on the prompts that wait there, with one more that decodes beside them."""
        if not worker.queued_tokens:
            return 0.0
        with_it = replace(
            worker, running_requests=worker.running_requests + 1, context_tokens=worker.context_tokens + tokens
        )
        return self._compute_s(with_it, queued_work(worker, model), slo.tpot_s, model) / slo.ttft_s

    def _memory_s(self, request: Request, worker: WorkerView, cluster: ClusterView, cost: CostModel) -> float:
        """How long an answer of this worker decodes: the time over which prompts beside it count."""
        return self._answer_tokens(worker, cluster) * self._promise(request, cost.on(worker.kind)).tpot_s

    def _place_s(self, worker: WorkerView, cluster: ClusterView, model: CostModel) -> float:
        """Predict when a step has a place for one request more: decodes fill it until enough of them have ended."""
        too_many = decoding_requests(worker) + 1 - worker.requests_max
        if not worker.requests_max or too_many <= 0:
            return 0.0
        life_s = self._answer_tokens(worker, cluster) * _decode_s(worker, 0, 0, model)
        return too_many * life_s / decoding_requests(worker)

    def _note_answer(self, worker: WorkerView, cluster: ClusterView) -> None:
        """Count an answer that will decode here."""
        before = decoding_requests(worker)
        known = self._answer_tokens(worker, cluster) * before
        self._answers[worker.id] = (known + self._expected_tokens(cluster)) / (before + 1)
        if len(self._answers) > 2 * len(cluster.workers):
            self._forget(cluster)

    def _answer_tokens(self, worker: WorkerView, cluster: ClusterView) -> float:
        """Length of the answers that decode here: what a prompt costs them, they bear over that many tokens.

        It is theirs, not that of the request in question: after a turn of long answers come short ones, and the other
        way round. Where none decodes, it is this one's.
        """
        expected_tokens = self._expected_tokens(cluster)
        return self._answers.get(worker.id, expected_tokens) if decoding_requests(worker) else expected_tokens

    def _expected_tokens(self, cluster: ClusterView) -> float:
        return max(2.0, cluster.expected_output_tokens or self.output_tokens)

    def _promise(self, request: Request, model: CostModel) -> Slo:
        """What the client was promised. Where nothing was: what it would see if it were alone."""
        if request.slo is not None:
            return request.slo
        asked, of, promise = self._alone
        if request is not asked or model is not of:
            alone = StepShape(decode_requests=1, context_tokens=request.prompt_tokens)
            promise = Slo(
                ttft_s=max(TIME_S_MIN, model.prefill_s(new_tokens=request.prompt_tokens, cached_tokens=0)),
                tpot_s=max(TIME_S_MIN, model.step_s(alone)),
            )
            self._alone = (request, model, promise)
        return promise

    def _compute_s(self, worker: WorkerView, work: PromptWork, tpot_s: float, model: CostModel) -> float:
        """Predict how long prompt tokens take here: in chunks, each beside a token of every request that decodes.

        Chunks are as long as a step may be, and beside decodes as long as their TPOT leaves room for.
        """
        if work.tokens <= 0:
            return 0.0
        alone_s, beside_s = work.alone_s, model.step_s(_EMPTY)
        chunk_tokens = worker.step_tokens_max or work.tokens
        if decoding_requests(worker):
            beside_s = model.step_s(
                StepShape(decode_requests=decoding_requests(worker), context_tokens=worker.context_tokens)
            )
            left_ratio = (self.step_slack * tpot_s - beside_s) / max(1e-12, alone_s)
            chunk_tokens = min(chunk_tokens, max(CHUNK_TOKENS_MIN, int(left_ratio * work.tokens)))
        return alone_s + -(-work.tokens // chunk_tokens) * beside_s

    def _forget(self, cluster: ClusterView) -> None:
        """Forget workers that are gone."""
        known = {worker.id for worker in cluster.workers}
        self._shares = {worker: share for worker, share in self._shares.items() if worker in known}
        self._answers = {worker: tokens for worker, tokens in self._answers.items() if worker in known}


def _longest_hit(cluster: ClusterView) -> HostId | None:
    """Find the host that holds most of the prompt."""
    hits = cluster.prefix_hit_tokens
    return min(hits, key=lambda host: (-hits[host], host)) if hits else None


def _order(plan: _Plan) -> tuple[bool, float, float, bool, WorkerId]:
    """What plans are sorted by, the best first."""
    worker = plan.worker
    return (plan.breaks_promise, plan.pressure, plan.ttft_s, worker.role == "decode", worker.id)


def _decode_s(worker: WorkerView, more_requests: int, more_tokens: int, model: CostModel) -> float:
    """Predict the time between two tokens beside what decodes here; those past the batch limit take turns."""
    requests = decoding_requests(worker) + more_requests
    shape = StepShape(decode_requests=requests, context_tokens=worker.context_tokens + more_tokens)
    turns = requests / worker.requests_max if 0 < worker.requests_max < requests else 1.0
    return turns * model.step_s(shape)


def _is_ahead(candidates: Sequence[WorkerView], cluster: ClusterView) -> bool:
    """The request's KV has gone ahead to a host: its workers alone are candidates, not all that decode."""
    if not cluster.is_sent_ahead or candidates[0].host != candidates[-1].host:
        return False
    return len(candidates) < len(cluster.having("decode"))
