"""The fair queue of the coordinator: requests wait here, and not at a worker, until a worker has room for their turn.

A worker's own queue cannot be fair on a disaggregated fleet: a prefill worker never sees output tokens, and tenants
whose requests wait at different workers are not compared. So the order is decided here, for the whole fleet, with one
count of service per tenant. Workers hold only what keeps them busy.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from baton.core.messages import CloseRequest, StopRequest
from baton.core.ports import CostModel
from baton.core.ticking import TokensServed
from baton.core.types import ClusterView, Request, RequestId, WorkerView
from baton.decide.control.advice import Policies, PolicyFailure, asked
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight
from baton.decide.policy.fairness import ServiceFairness
from baton.decide.policy.predictions import queue_s

STEPS_AHEAD = 2
"""Full steps of prompt tokens that a worker may have in its queue: one step runs, and the next one is ready."""
AHEAD_S = 0.4
"""A worker gets another prompt only while its queued prompts take less than this: the next turn waits for them."""
AHEAD_REQUESTS = 4
"""Requests per prefill worker beyond the slots of the decode workers, so that no slot stays empty."""
_ROLES = ("prefill", "mixed")
_LOAD_REASONS = ("slo", "queue_full", "queue_deadline")
"""Reject reasons that a tenant's own load can cause."""
Answer = TypeVar("Answer")


class QueueAhead(Struct, frozen=True, gc=False):
    """The part of the queue that is predicted to have its turn before a new request."""

    requests: int
    tokens: int
    """Prompt tokens of these requests."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request whose turn has come."""

    flight: Flight
    candidates: Sequence[WorkerView]
    """Workers that may run it. Empty: it has to wait for one."""
    stops: Sequence[StopRequest]
    """Command that stops the request whose slot this one takes. Empty if a slot was free."""


@dataclass(slots=True)
class _TenantQueue:
    """The waiting requests of one tenant, by priority and arrival."""

    flights: list[Flight] = field(default_factory=list[Flight])
    prompt_tokens: int = 0


@dataclass(slots=True)
class TurnQueue:
    """Admitted requests that wait for their turn. The policy chooses the tenant, admission bounds the number."""

    policies: Policies
    fairness: ServiceFairness | None
    """None: the order does not depend on service, so workers queue requests themselves and this queue stays empty."""
    failure: str = ""
    """Error message of the policy's last failure. Where the policy fails, priority and arrival decide the order."""
    _tenants: dict[tuple[str, str], _TenantQueue] = field(default_factory=dict[tuple[str, str], _TenantQueue])
    """Queues by class and tenant. Empty ones are removed."""
    _on_workers: Counter[str] = field(default_factory=Counter[str])
    """Number of live requests that have had their turn, by class, except paused ones."""
    waiting: dict[RequestId, Flight] = field(default_factory=dict[RequestId, Flight])
    _turns: int = 0
    """Number of turns so far."""

    @classmethod
    def of(cls, policies: Policies) -> TurnQueue:
        """Return the queue for these policies. It is used only if the fairness policy counts service."""
        fairness = policies.fairness
        return cls(policies, fairness if isinstance(fairness, ServiceFairness) else None)

    @property
    def is_used(self) -> bool:
        return self.fairness is not None

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.waiting

    def put(self, flight: Flight) -> None:
        """Add a request that waits for its turn."""
        request = flight.request
        queue = self._tenants.setdefault(_queue_of(request), _TenantQueue())
        insort(queue.flights, flight, key=_in_order)
        queue.prompt_tokens += request.prompt_tokens
        self.waiting[request.id] = flight
        self._tell(lambda policy: policy.joined(request))

    def give(self, fleet: Fleet, flights: Iterable[Flight], now_s: float) -> Turn | None:
        """Give the next turn. Return None if no request waits, or no worker has room for the next one.

        A class that uses less than its reserve need not wait for room: a request of another one is paused.
        """
        if not self.waiting:
            return None
        slots = count_decode_slots(fleet)
        flight = self._next(slots, now_s)
        hosts = flight.request.hosts
        able = fleet.having(flight.stage, hosts) or list(fleet.views(hosts))
        if not able:  # its hosts are lost: it must not hold up the requests behind it
            self._remove(flight.request.id)
            return Turn(flight, [], [])
        has_reserve = self._has_reserve(flight.request, slots)
        candidates = with_room(able, self.policies.cost) or (able if has_reserve else [])
        if not candidates:
            return None
        stops: list[StopRequest] = []
        if self._on_workers.total() >= slots:
            paused = self._to_pause(flight.request, slots, flights) if has_reserve else None
            if paused is None or paused.worker is None:
                return None
            self._pause(paused)
            stops.append(StopRequest(paused.request.id, paused.attempt, paused.worker))
        self._take(flight)
        return Turn(flight, candidates, stops)

    def _take(self, flight: Flight) -> None:
        """Remove a request whose turn has come, and charge its tenant.

        A paused request keeps its first turn, and is not charged again.
        """
        request, expected_tokens = flight.request, self.policies.expected_tokens(flight.request)
        self._remove(request.id)
        self._on_workers[class_of(request)] += 1
        flight.is_paused = False
        if not request.turn:
            self._turns += 1
            flight.request = replace(request, turn=self._turns)
            self._tell(lambda policy: policy.began(request, expected_tokens=expected_tokens))

    def _next(self, slots: float, now_s: float) -> Flight:
        """Return the request whose turn is next. Requires that a request waits. `slots`: see `count_decode_slots`.

        The class decides first: classes that use less than their reserve, then the more urgent ones. A class grows more
        urgent while its requests wait. Then the policy chooses the tenant.
        """
        heads = [queue.flights[0] for queue in self._tenants.values()]
        urgency: dict[str, tuple[bool, float]] = {}
        for flight in heads:
            name, found = class_of(flight.request), self._urgency(flight.request, slots, now_s)
            urgency[name] = min(urgency.get(name, found), found)
        return min(heads, key=lambda flight: (urgency[class_of(flight.request)], self._key(flight)))

    def _urgency(self, request: Request, slots: float, now_s: float) -> tuple[bool, float]:
        service = request.service
        if service is None:
            return (True, 0.0)
        aged = (now_s - request.arrived_at_s) // service.aging_s
        return (not self._has_reserve(request, slots), service.priority - aged)

    def has_reserved_slot(self, request: Request, fleet: Fleet) -> bool:
        """Return whether the turn of a new request comes at once: its class uses less than its reserve."""
        service = request.service
        return (
            service is not None and service.decode_ratio > 0 and self._has_reserve(request, count_decode_slots(fleet))
        )

    def _has_reserve(self, request: Request, slots: float) -> bool:
        """Return whether the class of a request uses less than its reserve of the decode workers' slots."""
        return self._on_workers[class_of(request)] < _reserved(request, slots)

    def _to_pause(self, request: Request, slots: float, flights: Iterable[Flight]) -> Flight | None:
        """Return the flight that must leave its slot for a class that uses less than its reserve. None: there is none.

        It is the last one by `turn_key` of all classes above their own reserve.
        """

        def may_pause(flight: Flight) -> bool:
            name, reserved = class_of(flight.request), _reserved(flight.request, slots)
            has_slot = flight.worker is not None and flight.moving_to is None and not flight.is_paused
            return has_slot and name != class_of(request) and self._on_workers[name] > reserved

        return max(filter(may_pause, flights), key=lambda flight: flight.request.turn_key, default=None)

    def _pause(self, flight: Flight) -> None:
        """Record that a flight is paused: its worker is told to drop it."""
        flight.is_paused = True
        self._on_workers[class_of(flight.request)] -= 1

    def _key(self, flight: Flight) -> tuple[tuple[float, ...], RequestId]:
        request = flight.request
        key = self._tell(lambda policy: tuple(map(float, policy.key(request))))
        return ((float(request.priority), request.arrived_at_s) if key is None else key, request.id)

    def _remove(self, request_id: RequestId) -> None:
        """Remove a request that has its turn or has ended. Does nothing if it does not wait."""
        flight = self.waiting.pop(request_id, None)
        if flight is None:
            return
        request = flight.request
        queue = self._tenants[_queue_of(request)]
        queue.flights.remove(flight)
        queue.prompt_tokens -= request.prompt_tokens
        if not queue.flights:
            del self._tenants[_queue_of(request)]
        self._tell(lambda policy: policy.left(request))

    def drain(self) -> list[Flight]:
        """Remove and return all waiting requests, the oldest first."""
        flights = list(self.waiting.values())
        for flight in flights:
            self._remove(flight.request.id)
        return flights

    def count(self, served: Sequence[tuple[RequestId, int]], flights: Mapping[RequestId, Flight]) -> None:
        """Count output tokens of requests that have had their turn. Tokens of closed requests are ignored."""
        for request_id, tokens in served:
            flight = flights.get(request_id)
            if flight is not None:
                self._serve(flight.request, tokens)

    def _serve(self, request: Request, tokens: int) -> None:
        self._tell(lambda policy: policy.served(request, output_tokens=tokens))

    def close(self, flight: Flight) -> None:
        """Record the end of a request, whether it has had its turn or not."""
        request = flight.request
        if request.turn:
            self._tell(lambda policy: policy.ended(request))
            self._on_workers[class_of(request)] -= not flight.is_paused
        self._remove(request.id)

    def _tell(self, call: Callable[[ServiceFairness], Answer]) -> Answer | None:
        """Call the policy. Return None, and keep the reason, if it raises an exception."""
        policy = self.fairness
        if policy is None:
            return None
        answer = asked(policy, lambda: call(policy))
        if isinstance(answer, PolicyFailure):
            self.failure = answer.reason
            return None
        return answer

    # ---- predictions

    def ahead(self, request: Request) -> QueueAhead:
        """Predict the part of the queue whose turn comes before a new request, if every tenant gets equal service.

        It has all requests of the same tenant. Of each other tenant, it has as many prompt tokens as this tenant will
        have been served, the new request included.
        """
        own = self._tenants.get(_queue_of(request))
        own_tokens, requests = (own.prompt_tokens, len(own.flights)) if own is not None else (0, 0)
        tokens = own_tokens
        priority = _priority(request)
        for name, queue in self._tenants.items():
            theirs_first = _priority(queue.flights[0].request) <= priority
            if name != _queue_of(request) and theirs_first:
                theirs = min(queue.prompt_tokens, own_tokens + request.prompt_tokens)
                tokens += theirs
                requests += -(-len(queue.flights) * theirs // queue.prompt_tokens)
        return QueueAhead(requests, tokens)

    def name_share(self, request: Request, refused: CloseRequest) -> CloseRequest:
        """Return the rejection with the reason `share` if the tenant has more than its share of the queue.

        While no other tenant waits, its share is the whole queue.
        """
        own = self._tenants.get(_queue_of(request))
        is_larger = own is not None and len(own.flights) * len(self._tenants) > len(self.waiting)
        if not is_larger or refused.reject not in _LOAD_REASONS:
            return refused
        why = f"{refused.reason}; this tenant has more than its share of the queue, and others wait too"
        return replace(refused, reject="share", reason=why)

    def with_queue(self, cluster: ClusterView, request: Request) -> ClusterView:
        """Return the view as if the queue ahead of this request waited at the workers that compute prompts."""
        if not self.waiting:
            return cluster
        workers = [worker.id for worker in cluster.workers if worker.role in _ROLES]
        if not workers:
            return cluster
        ahead, count = self.ahead(request), len(workers)
        more_tokens, more_requests = ahead.tokens // count, -(-ahead.requests // count)
        return replace(
            cluster,
            workers=tuple(
                replace(
                    worker,
                    queued_tokens=worker.queued_tokens + more_tokens,
                    queued_requests=worker.queued_requests + more_requests,
                    queued_pairs=0.0,
                )
                if worker.id in workers
                else worker
                for worker in cluster.workers
            ),
        )


@dataclass(slots=True)
class TokenCount:
    """Counts output tokens between two events of the cluster. The driver, which sees the tokens, feeds it."""

    is_used: bool
    """False: the fairness policy does not count service, so nothing is counted."""
    _tokens: dict[RequestId, int] = field(default_factory=dict[RequestId, int])

    def add(self, request_id: RequestId) -> None:
        """Count one token that was sent to the client."""
        if self.is_used:
            self._tokens[request_id] = self._tokens.get(request_id, 0) + 1

    def take(self) -> TokensServed | None:
        """Return the tokens since the last call; None if there are none."""
        if not self._tokens:
            return None
        served, self._tokens = TokensServed(tuple(self._tokens.items())), {}
        return served


def _in_order(flight: Flight) -> tuple[int, float, RequestId]:
    return (flight.request.priority, flight.request.arrived_at_s, flight.request.id)


def class_of(request: Request) -> str:
    """Return the name of a request's class; empty if it has none."""
    return "" if request.service is None else request.service.name


def _reserved(request: Request, slots: float) -> int:
    """Return the number of slots that the class of a request has reserved. 0 if their number is not known."""
    service = request.service
    return int(service.decode_ratio * slots) if service is not None and isfinite(slots) else 0


def _priority(request: Request) -> int:
    return 0 if request.service is None else request.service.priority


def degraded(request: Request) -> Iterator[Request]:
    """Yield the weaker forms of a request that its class allows instead of a rejection, the best one first."""
    service = request.service
    if service is None:
        return
    if 0 < service.output_tokens_max < request.output_tokens_max:
        request = replace(request, output_tokens_max=service.output_tokens_max)
        yield request
    if service.defer_s and request.slo is not None:
        yield replace(request, slo=None, deferred_s=service.defer_s)


def _queue_of(request: Request) -> tuple[str, str]:
    return (class_of(request), request.tenant)


def count_decode_slots(fleet: Fleet) -> float:
    """Return the number of requests that may be on workers at once. Infinite if a worker's limit is not known.

    It is what decode workers run at once. Further requests would wait there with their KV, where the fairness policy
    cannot change their order any more.
    """
    every = fleet.views()
    prefillers, decoders = fleet.having("prefill") or every, fleet.having("decode") or every
    if not all(worker.requests_max for worker in decoders):
        return float("inf")
    ahead = AHEAD_REQUESTS * sum(worker.role == "prefill" for worker in prefillers)
    return sum(worker.requests_max for worker in decoders) + ahead


def with_room(workers: Sequence[WorkerView], cost: CostModel) -> list[WorkerView]:
    """Return the workers that may get another prompt, by the tokens and the predicted time of their queues."""
    return [
        worker
        for worker in workers
        if not worker.step_tokens_max
        or (worker.queued_tokens < STEPS_AHEAD * worker.step_tokens_max and queue_s(worker, cost) < AHEAD_S)
    ]
