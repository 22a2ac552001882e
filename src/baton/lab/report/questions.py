"""Record the questions that a coordinator asks its policies while a decision log is replayed.

A log holds only events and commands; a replay recomputes the questions behind them. `watched` wraps the policies: it
passes their answers on unchanged, and adds the times that the cost model predicts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct, structs

from baton.core.messages import CloseRequest
from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import (
    ClusterView,
    FlightView,
    HostId,
    Request,
    RequestId,
    Role,
    Until,
    WorkerId,
    WorkerView,
)
from baton.decide.control.advice import Policies, PolicyFailure
from baton.decide.policy.fleet import MovesPolicy
from baton.decide.policy.predictions import decode_step_s, first_token_delay_s, prompt_s, queue_s
from baton.decide.policy.prefix import prefix_on
from baton.decide.policy.routing import Route
from baton.decide.policy.weighing import Weighed, WeighsAnswers, WeighsPrompts

RANKED_MAX = 8
"""Bound on the ranks that are requested of a policy."""

Subject = Literal["admit", "prefill", "decode", "move"]


class Option(Struct, frozen=True, kw_only=True):
    """One candidate worker: its state as the policy saw it, and the cost model's predictions for it."""

    worker: WorkerId
    role: Role
    running_requests: int
    waiting_requests: int
    queued_tokens: int
    context_tokens: int
    report_age_s: float | None
    """Age of the worker's last report. None: no report yet. The other figures include work assigned since then."""
    bound_requests: int = 0
    """Requests that will decode on this worker and whose prompts still run on another."""
    kv_tokens_max: int = 0
    """Tokens of KV that the worker's host can hold. 0: unknown."""
    hit_tokens: int
    """Leading prompt tokens with KV on the worker's host, including those worth reading from its tiers."""
    load_s: float = 0.0
    """Predicted time until the KV of these tokens is in the arena."""
    queue_s: float | None = None
    """Predicted time until earlier prompts are computed and the prefix is loaded or fetched."""
    prefill_s: float | None = None
    """Predicted time to compute this prompt."""
    ttft_s: float | None = None
    """Predicted TTFT: `queue_s` plus `prefill_s`, plus the handoff if the decode worker samples the first token."""
    step_s: float | None = None
    """Predicted time of a decode step that includes this request."""
    handoff_s: float | None = None
    """Predicted time of the KV transfer to this worker; per output token if `weighed` is known."""
    is_offered: bool = True
    """The coordinator offered this worker. Otherwise its role differs, or the request's KV was sent ahead to another
    host; a policy may still choose it."""
    weighed: Weighed | None = None
    """How the policy weighs this worker. None: the policy does not show it, so the times are the cost model's."""
    rank: int | None = None
    """Rank in the policy's own order, from 1. Rank 2 is its choice without the worker of rank 1, and so on."""

    @property
    def predicted_s(self) -> float:
        """Predicted time that ranks the options: TTFT for a prompt, time to the next token for a decode."""
        return self.ttft_s if self.ttft_s is not None else (self.step_s or 0.0) + (self.handoff_s or 0.0)


class Question(Struct, frozen=True, kw_only=True):
    """One question to a policy and its answer."""

    at_s: float
    request_id: RequestId
    subject: Subject
    policy: str
    """Class name of the policy."""
    waiting_requests: int
    """Requests in the coordinator's queue, without a worker."""
    live_requests: int
    """Requests on all workers."""
    expected_output_tokens: float = 0.0
    """Predicted output length. 0: no prediction yet."""
    options: tuple[Option, ...]
    chosen: WorkerId | None = None
    """Chosen worker. None: no worker, as for every admission question."""
    refusal: str = ""
    """Reason of a rejection, or of a policy failure."""
    fetch: HostId | None = None
    """For prefill: host from which a longer prefix is copied first."""
    until: Until | None = None
    """For prefill: how far the chosen worker computes the request, according to the route."""

    @property
    def best(self) -> Option | None:
        """Option with the shortest prediction, the first of equals."""
        return min(self.options, key=lambda option: option.predicted_s, default=None)

    def option(self, worker: WorkerId | None) -> Option | None:
        return next((option for option in self.options if option.worker == worker), None)


@dataclass(slots=True)
class Notes:
    """Questions since the last clear, and the current time."""

    now_s: float = 0.0
    ranked: RequestId | None = None
    """Request whose questions are repeated without earlier choices, to find the policy's ranks."""
    questions: list[Question] = field(default_factory=list[Question])


@dataclass(frozen=True, slots=True)
class _Answer:
    chosen: WorkerId | None = None
    refusal: str = ""
    source: HostId | None = None
    """Host that holds the KV of the request to decode."""
    order: tuple[WorkerId, ...] = ()
    """Workers of the policy's first ranks, best first."""
    fetch: HostId | None = None
    until: Until | None = None
    weighed: Sequence[Weighed] = ()
    """How the policy weighs the workers, for the ranked request."""


Ask = Callable[[Policies, Sequence[WorkerView], ClusterView], Route | WorkerId | PolicyFailure]
"""A function that asks the given policies one question, about some candidates and a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPolicies(Policies):
    """Policies that record every question. The wrapped policies give the answers."""

    notes: Notes

    def admit(self, request: Request, cluster: ClusterView, now_s: float) -> tuple[float, ...] | CloseRequest:
        answer = Policies.admit(self, request, cluster, now_s)
        refusal = answer.reason if isinstance(answer, CloseRequest) else ""
        candidates = cluster.having("prefill") or cluster.workers
        asked = self._copy(request)
        weighed: Sequence[Weighed] = ()
        if asked is not None and isinstance(asked.admission, WeighsPrompts):
            weighed = asked.admission.weigh_prompt(request, candidates, cluster, self.cost)
        self._note("admit", request, candidates, cluster, _Answer(refusal=refusal, weighed=weighed))
        return answer

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView) -> Route | PolicyFailure:
        order = self._order("prefill", request, cluster, lambda asked, left, seen: asked.route(request, left, seen))
        asked, weighed = self._copy(request), list[Weighed]()
        if asked is not None and isinstance(asked.routing, WeighsPrompts):
            weighed = asked.routing.weigh_prompt(request, candidates, cluster, self.cost)
        answer = Policies.route(self, request, candidates, cluster)
        said = _Answer(refusal=answer.reason) if isinstance(answer, PolicyFailure) else _routed(answer, order, cluster)
        self._note("prefill", request, candidates, cluster, replace(said, weighed=weighed))
        return answer

    def place(
        self, request: Request, source: HostId | None, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> WorkerId | PolicyFailure:
        order = self._order(
            "decode", request, cluster, lambda asked, left, seen: asked.place(request, source, left, seen)
        )
        asked, weighed = self._copy(request), list[Weighed]()
        if asked is not None and isinstance(asked.placement, WeighsAnswers):
            weighed = asked.placement.weigh_answer(request, source, candidates, cluster, self.cost)
        answer = Policies.place(self, request, source, candidates, cluster)
        failed = isinstance(answer, PolicyFailure)
        said = _Answer(refusal=answer.reason, source=source) if failed else _Answer(answer, "", source, order)
        self._note("decode", request, candidates, cluster, replace(said, weighed=weighed))
        return answer

    def _copy(self, request: Request) -> Policies | None:
        """Return a copy of the policies, which may keep state. None for other requests, or if a copy fails."""
        if self.notes.ranked != request.id:
            return None
        try:
            return Policies(**copy.deepcopy(families(self)))
        except TypeError:  # a user's policy may hold state that cannot be copied
            return None

    def _order(self, role: Role, request: Request, cluster: ClusterView, ask: Ask) -> tuple[WorkerId, ...]:
        """Return the policy's ranking of workers for the ranked request. Empty for every other request.

        Each round asks a copy of the policies again, without the workers chosen before.
        """
        if self.notes.ranked != request.id:
            return ()
        order: list[WorkerId] = []
        left: list[WorkerView] = list(cluster.workers)
        is_any_role = not cluster.having(role)  # same rule as the coordinator: a role is a preference
        while len(order) < RANKED_MAX:
            seen = structs.replace(cluster, workers=tuple(left))
            candidates = left if is_any_role else seen.having(role)
            if not candidates:
                break
            asked = self._copy(request)
            if asked is None:
                break
            answer = ask(asked, candidates, seen)
            if isinstance(answer, PolicyFailure):
                break
            chosen = answer.worker if isinstance(answer, Route) else answer
            order.append(chosen)
            left = [worker for worker in left if worker.id != chosen]
        return tuple(order)

    def _note(
        self,
        subject: Subject,
        request: Request,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        answer: _Answer,
    ) -> None:
        policy = {"admit": self.admission, "prefill": self.routing, "decode": self.placement}[subject]
        seen = list(candidates)
        named = {answer.chosen, *answer.order, *(each.worker for each in answer.weighed)}
        seen += [worker for worker in cluster.workers if worker.id in named and worker not in seen]
        ranks = {worker: rank for rank, worker in enumerate(answer.order, start=1)}
        weighed = {each.worker: each for each in answer.weighed}
        offered, model = {worker.id for worker in candidates}, (self.cost, self.notes.now_s)
        options = (
            _decode_option(request, worker, cluster, answer.source, model)
            if subject == "decode"
            else _prefill_option(request, worker, cluster, model)
            for worker in seen
        )
        self.notes.questions.append(
            Question(
                at_s=self.notes.now_s,
                request_id=request.id,
                subject=subject,
                policy=type(policy).__name__,
                waiting_requests=cluster.waiting_requests,
                live_requests=sum(worker.running_requests for worker in cluster.workers),
                expected_output_tokens=cluster.expected_output_tokens,
                options=tuple(
                    structs.replace(
                        _by_policy(option, weighed.get(option.worker)),
                        rank=ranks.get(option.worker),
                        is_offered=option.worker in offered,
                    )
                    for option in options
                ),
                chosen=answer.chosen,
                refusal=answer.refusal,
                fetch=answer.fetch,
                until=answer.until,
            )
        )


def _routed(route: Route, order: tuple[WorkerId, ...], cluster: ClusterView) -> _Answer:
    """Return the effect of a route. A prefix that is no longer than the worker's own is not fetched."""
    view = next(worker for worker in cluster.workers if worker.id == route.worker)
    here, there = (cluster.prefix_hit_tokens.get(host, 0) for host in (view.host, route.fetch or view.host))
    until = route.until or ("first_token" if view.role == "prefill" else "end")
    return _Answer(route.worker, order=order, fetch=route.fetch if there > here else None, until=until)


def watched(policies: Policies, notes: Notes) -> WatchedPolicies:
    """Return the same policies, which record every question in `notes`. Set `notes.now_s` before each event."""
    own: dict[str, Any] = families(policies) | {"moves": _WatchedMoves(policies.moves, notes)}
    return WatchedPolicies(**own, notes=notes)


def families(policies: Policies) -> dict[str, Any]:
    """Return every policy by the name of its family, and the cost model."""
    names = [family.name for family in fields(Policies)]
    return dict(zip(names, attrgetter(*names)(policies), strict=True))


@dataclass(frozen=True, slots=True)
class _WatchedMoves:
    """Records each move of the ranked request, with its options. Implements `MovesPolicy` for the wrapped policy."""

    moves_policy: MovesPolicy
    notes: Notes

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        moves = self.moves_policy.moves(cluster, flights, cost, now_s)
        for flight in flights:
            target = moves.get(flight.request.id)
            if flight.request.id == self.notes.ranked and target not in (None, flight.worker):
                self.notes.questions.append(self._question(flight, target, cluster, cost))
        return moves

    def _question(self, flight: FlightView, target: WorkerId | None, cluster: ClusterView, cost: CostModel) -> Question:
        source = next((worker.host for worker in cluster.workers if worker.id == flight.worker), None)
        both = (target, flight.worker)
        seen = [worker for worker in cluster.workers if worker.role != "prefill" or worker.id in both]
        return Question(
            at_s=self.notes.now_s,
            request_id=flight.request.id,
            subject="move",
            policy=type(self.moves_policy).__name__,
            waiting_requests=cluster.waiting_requests,
            live_requests=sum(worker.running_requests for worker in cluster.workers),
            options=tuple(
                _decode_option(flight.request, worker, cluster, source, (cost, self.notes.now_s)) for worker in seen
            ),
            chosen=target,
        )


def _seen(worker: WorkerView, cluster: ClusterView, now_s: float) -> Option:
    return Option(
        worker=worker.id,
        role=worker.role,
        running_requests=worker.running_requests,
        waiting_requests=worker.waiting_requests,
        queued_tokens=worker.queued_tokens,
        context_tokens=worker.context_tokens,
        bound_requests=cluster.bound[worker.id].requests if worker.id in cluster.bound else 0,
        kv_tokens_max=worker.kv_tokens_max,
        report_age_s=max(0.0, now_s - worker.observed_at_s) if worker.observed_at_s else None,
        hit_tokens=cluster.prefix_hit_tokens.get(worker.host, 0),
    )


def _prefill_option(
    request: Request, worker: WorkerView, cluster: ClusterView, model: tuple[CostModel, float]
) -> Option:
    cost, now_s = model
    prefix = prefix_on(worker, request, cluster, cost, wait_s=queue_s(worker, cost))
    wait_s = max(queue_s(worker, cost), prefix.load_s)
    delay_s = first_token_delay_s(worker, request, cluster, cost, prompt_s=prefix.ttft_s - wait_s)
    return structs.replace(
        _seen(worker, cluster, now_s),
        hit_tokens=prefix.tokens,
        load_s=prefix.load_s,
        queue_s=wait_s,
        prefill_s=prompt_s(worker, request, prefix.tokens, cost),
        ttft_s=prefix.ttft_s + delay_s,
    )


def _by_policy(option: Option, weighed: Weighed | None) -> Option:
    """Return the option with the policy's own predictions in place of those of the cost model alone."""
    if weighed is None:
        return option
    if option.ttft_s is None:
        return structs.replace(option, weighed=weighed, step_s=weighed.own_s, handoff_s=weighed.wait_s)
    return structs.replace(
        option, weighed=weighed, queue_s=weighed.wait_s, prefill_s=weighed.own_s, ttft_s=weighed.predicted_s
    )


def _decode_option(
    request: Request,
    worker: WorkerView,
    cluster: ClusterView,
    source: HostId | None,
    model: tuple[CostModel, float],
) -> Option:
    cost, now_s = model
    return structs.replace(
        _seen(worker, cluster, now_s),
        step_s=decode_step_s(worker, cost, more_requests=1, more_tokens=request.prompt_tokens),
        handoff_s=handoff_between_s(
            cost,
            {*cluster.kinds_on(source), worker.kind},
            tokens=request.prompt_tokens,
            same_host=source in (None, worker.host),
        ),
    )
