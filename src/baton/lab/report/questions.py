"""What a coordinator asked its policies, recomputed: a log holds events and commands, and replaying it shows the rest.

`watch` puts itself between a coordinator and its policies. Nothing is decided here: what the policies answer is passed
on as it is, with the times that the cost model predicts beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    StepShape,
    Until,
    WorkerId,
    WorkerView,
)
from baton.decide.control.advice import Policies, PolicyFailure
from baton.decide.policy.moves import MovesPolicy
from baton.decide.policy.predictions import first_token_delay_s, queue_s
from baton.decide.policy.prefix import prefix_on
from baton.decide.policy.routing import Route

RANKED_MAX = 8
"""Places of a policy's own order that are asked for."""

Subject = Literal["admit", "prefill", "decode", "move"]


class Option(Struct, frozen=True, kw_only=True):
    """One worker that might have been chosen: what the policy saw of it, and what the cost model predicts there."""

    worker: WorkerId
    role: Role
    running_requests: int
    waiting_requests: int
    queued_tokens: int
    context_tokens: int
    report_age_s: float | None
    """How old its own report was; None: it has not reported yet. What it was given since is in the other figures."""
    bound_requests: int = 0
    """That will decode there, and whose prompts are still computed elsewhere."""
    kv_tokens_max: int = 0
    """Tokens whose KV its host can hold. 0: not told."""
    hit_tokens: int
    """Leading prompt tokens that its host holds, those included that are worth reading from its tiers."""
    load_s: float = 0.0
    """Until those are in its arena. Predicted, as are those below."""
    queue_s: float | None = None
    """Time until the earlier prompts of the worker are done and the blocks are read."""
    prefill_s: float | None = None
    """To compute this prompt."""
    ttft_s: float | None = None
    """Sum of both, and of the handoff if the decode worker draws the first token."""
    step_s: float | None = None
    """A decode step with this request in it."""
    handoff_s: float | None = None
    """Until its KV is there."""
    is_offered: bool = True
    """A candidate. False: another role, or a host to which its KV has not gone ahead. It may be chosen all the same."""
    rank: int | None = None
    """Place in the policy's own order, from 1: whom it chooses, whom it would without that one, and so on."""

    @property
    def predicted_s(self) -> float:
        """What the choice is measured by: the first token of a prompt, the next token of a decode."""
        return self.ttft_s if self.ttft_s is not None else (self.step_s or 0.0) + (self.handoff_s or 0.0)


class Question(Struct, frozen=True, kw_only=True):
    """One question to a policy, and its answer."""

    at_s: float
    request_id: RequestId
    subject: Subject
    policy: str
    """Name of its class."""
    waiting_requests: int
    """In the coordinator's room, without a worker."""
    live_requests: int
    """On all workers."""
    expected_output_tokens: float = 0.0
    """Of the answer, as predicted. 0: nothing is known yet."""
    options: tuple[Option, ...]
    chosen: WorkerId | None = None
    """None: no worker. An admission chooses none."""
    refusal: str = ""
    """Why the request was refused, or how the policy failed."""
    fetch: HostId | None = None
    """For prefill: the host whose longer prefix is copied first."""
    until: Until | None = None
    """For prefill: how far that worker computes, by the route."""

    @property
    def best(self) -> Option | None:
        """Where the prediction is shortest; the first of equals."""
        return min(self.options, key=lambda option: option.predicted_s, default=None)

    def option(self, worker: WorkerId | None) -> Option | None:
        return next((option for option in self.options if option.worker == worker), None)


@dataclass(slots=True)
class Notes:
    """Questions since the last clear, and the present time."""

    now_s: float = 0.0
    ranked: RequestId | None = None
    """The request whose questions are asked again and again, without those chosen before."""
    questions: list[Question] = field(default_factory=list[Question])


@dataclass(frozen=True, slots=True)
class _Answer:
    chosen: WorkerId | None = None
    refusal: str = ""
    source: HostId | None = None
    """Where the KV of a request to decode is."""
    order: tuple[WorkerId, ...] = ()
    """The policy's own, as far as it was asked for."""
    fetch: HostId | None = None
    until: Until | None = None


Ask = Callable[[Policies, Sequence[WorkerView], ClusterView], Route | WorkerId | PolicyFailure]
"""One question, to any policies, about some of the candidates and workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPolicies(Policies):
    """Policies whose questions are noted. Answers are theirs."""

    notes: Notes

    def admit(self, request: Request, cluster: ClusterView, now_s: float) -> tuple[float, ...] | CloseRequest:
        """See `Policies.admit`."""
        answer = Policies.admit(self, request, cluster, now_s)
        refusal = answer.reason if isinstance(answer, CloseRequest) else ""
        candidates = cluster.having("prefill") or cluster.workers
        self._note("admit", request, candidates, cluster, _Answer(refusal=refusal))
        return answer

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView) -> Route | PolicyFailure:
        """See `Policies.route`."""
        order = self._order("prefill", request, cluster, lambda asked, left, seen: asked.route(request, left, seen))
        answer = Policies.route(self, request, candidates, cluster)
        said = _Answer(refusal=answer.reason) if isinstance(answer, PolicyFailure) else _routed(answer, order, cluster)
        self._note("prefill", request, candidates, cluster, said)
        return answer

    def place(
        self, request: Request, source: HostId | None, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> WorkerId | PolicyFailure:
        """See `Policies.place`."""
        order = self._order(
            "decode", request, cluster, lambda asked, left, seen: asked.place(request, source, left, seen)
        )
        answer = Policies.place(self, request, source, candidates, cluster)
        failed = isinstance(answer, PolicyFailure)
        said = _Answer(refusal=answer.reason, source=source) if failed else _Answer(answer, "", source, order)
        self._note("decode", request, candidates, cluster, said)
        return answer

    def _order(self, role: Role, request: Request, cluster: ClusterView, ask: Ask) -> tuple[WorkerId, ...]:
        """Ask copies of the policies, each time without those chosen before. () for other requests than the one.

        A policy may keep notes of its answers: a copy's are thrown away, so that the question itself changes nothing.
        """
        if self.notes.ranked != request.id:
            return ()
        order: list[WorkerId] = []
        left: list[WorkerView] = list(cluster.workers)
        is_any_role = not cluster.having(role)  # as the coordinator does it: a role is a preference
        while len(order) < RANKED_MAX:
            seen = structs.replace(cluster, workers=tuple(left))
            candidates = left if is_any_role else seen.having(role)
            if not candidates:
                break
            try:
                asked = Policies(**copy.deepcopy(families(self)))
            except TypeError:  # something in a user's policy cannot be copied
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
        named = {answer.chosen, *answer.order}
        seen += [worker for worker in cluster.workers if worker.id in named and worker not in seen]
        ranks = {worker: rank for rank, worker in enumerate(answer.order, start=1)}
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
                        _decode_option(request, worker, cluster, answer.source, (self.cost, self.notes.now_s))
                        if subject == "decode"
                        else _prefill_option(request, worker, cluster, (self.cost, self.notes.now_s)),
                        rank=ranks.get(worker.id),
                        is_offered=worker in candidates,
                    )
                    for worker in seen
                ),
                chosen=answer.chosen,
                refusal=answer.refusal,
                fetch=answer.fetch,
                until=answer.until,
            )
        )


def _routed(route: Route, order: tuple[WorkerId, ...], cluster: ClusterView) -> _Answer:
    """Say what a route comes to: a prefix that is no longer than the worker's own is not pulled."""
    view = next(worker for worker in cluster.workers if worker.id == route.worker)
    here, there = (cluster.prefix_hit_tokens.get(host, 0) for host in (view.host, route.fetch or view.host))
    until = route.until or ("first_token" if view.role == "prefill" else "end")
    return _Answer(route.worker, order=order, fetch=route.fetch if there > here else None, until=until)


def watched(policies: Policies, notes: Notes) -> WatchedPolicies:
    """Return the same policies, which write every question to `notes`. Set `now_s` of the notes before each event."""
    own: dict[str, Any] = families(policies) | {"moves": _WatchedMoves(policies.moves, notes)}
    return WatchedPolicies(**own, notes=notes)


def families(policies: Policies) -> dict[str, Any]:
    """Return every policy by the name of its family, and the cost model."""
    names = [family.name for family in fields(Policies)]
    return dict(zip(names, attrgetter(*names)(policies), strict=True))


@dataclass(frozen=True, slots=True)
class _WatchedMoves:
    """Implements `MovesPolicy`: that of the log, with a note of where the one request goes, and among whom."""

    moves_policy: MovesPolicy
    notes: Notes

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        """See `MovesPolicy.moves`."""
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
    new_tokens = request.prompt_tokens - prefix.tokens
    prompt_s = prefix.ttft_s - wait_s
    return structs.replace(
        _seen(worker, cluster, now_s),
        hit_tokens=prefix.tokens,
        load_s=prefix.load_s,
        queue_s=wait_s,
        prefill_s=cost.on(worker.kind).prefill_s(new_tokens=new_tokens, cached_tokens=prefix.tokens),
        ttft_s=prefix.ttft_s + first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s),
    )


def _decode_option(
    request: Request,
    worker: WorkerView,
    cluster: ClusterView,
    source: HostId | None,
    model: tuple[CostModel, float],
) -> Option:
    cost, now_s = model
    shape = StepShape(
        decode_requests=worker.running_requests + 1, context_tokens=worker.context_tokens + request.prompt_tokens
    )
    return structs.replace(
        _seen(worker, cluster, now_s),
        step_s=cost.on(worker.kind).step_s(shape),
        handoff_s=handoff_between_s(
            cost,
            {*cluster.kinds_on(source), worker.kind},
            tokens=request.prompt_tokens,
            same_host=source in (None, worker.host),
        ),
    )
