"""The fair queue of the coordinator: requests wait here, and not at a worker, until a worker has room for their turn.

A worker's own queue cannot be fair on a disaggregated fleet: a prefill worker never sees output tokens, and tenants
whose requests wait at different workers are not compared. So the order is decided here, for the whole fleet, with one
count of service per tenant. Workers hold only what keeps them busy.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from baton.core.ticking import TokensServed
from baton.core.types import ClusterView, Request, RequestId, WorkerView
from baton.decide.control.advice import PolicyFailure, asked
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight
from baton.decide.policy.fairness import FairnessPolicy, ServiceFairness

STEPS_AHEAD = 2
"""Steps of prompts that a worker may have in its queue: one runs, and one is ready when it ends."""
AHEAD_REQUESTS = 4
"""Requests per prefill worker beyond the places of the decode workers, so that no place stays empty."""
_ROLES = ("prefill", "mixed")
Answer = TypeVar("Answer")


class QueueAhead(Struct, frozen=True, gc=False):
    """The part of the queue that is predicted to have its turn before a new request."""

    requests: int
    tokens: int
    """Prompt tokens of these requests."""


@dataclass(slots=True)
class _TenantQueue:
    """The waiting requests of one tenant, by priority and arrival."""

    flights: list[Flight] = field(default_factory=list[Flight])
    prompt_tokens: int = 0


@dataclass(slots=True)
class TurnQueue:
    """Admitted requests that wait for their turn. The policy chooses the tenant, admission bounds the number."""

    fairness: ServiceFairness | None
    """None: the order does not depend on service, so workers queue requests themselves and this queue stays empty."""
    failure: str = ""
    """Error message of the last failure of the policy. Without its key, requests wait by priority and arrival."""
    _tenants: dict[str, _TenantQueue] = field(default_factory=dict[str, _TenantQueue])
    """Tenants without waiting requests are left out."""
    _waiting: dict[RequestId, Flight] = field(default_factory=dict[RequestId, Flight])
    _turns: int = 0
    """Number of turns so far."""

    @classmethod
    def of(cls, fairness: FairnessPolicy) -> TurnQueue:
        """Return the queue for a policy. It is used only if the order depends on service."""
        return cls(fairness if isinstance(fairness, ServiceFairness) else None)

    @property
    def is_used(self) -> bool:
        return self.fairness is not None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def put(self, flight: Flight) -> None:
        """Add a request that waits for its turn."""
        request = flight.request
        queue = self._tenants.setdefault(request.tenant, _TenantQueue())
        insort(queue.flights, flight, key=_in_order)
        queue.prompt_tokens += request.prompt_tokens
        self._waiting[request.id] = flight
        self._tell(lambda policy: policy.joined(request))

    def take(self, expected_tokens: float) -> Flight:
        """Remove the request whose turn is next, and charge its tenant. `expected_tokens`: predicted answer length."""
        flight = self.next
        request = flight.request
        self.remove(request.id)
        self._turns += 1
        flight.request = replace(request, turn=self._turns)
        self._tell(lambda policy: policy.began(request, expected_tokens=expected_tokens))
        return flight

    @property
    def next(self) -> Flight:
        """The request whose turn is next. Requires that a request waits."""
        return min((queue.flights[0] for queue in self._tenants.values()), key=self._key)

    def _key(self, flight: Flight) -> tuple[tuple[float, ...], RequestId]:
        request = flight.request
        key = self._tell(lambda policy: tuple(map(float, policy.key(request))))
        return ((float(request.priority), request.arrived_at_s) if key is None else key, request.id)

    def remove(self, request_id: RequestId) -> None:
        """Remove a request that has its turn or has ended. Does nothing if it does not wait."""
        flight = self._waiting.pop(request_id, None)
        if flight is None:
            return
        request = flight.request
        queue = self._tenants[request.tenant]
        queue.flights.remove(flight)
        queue.prompt_tokens -= request.prompt_tokens
        if not queue.flights:
            del self._tenants[request.tenant]
        self._tell(lambda policy: policy.left(request))

    def drain(self) -> list[Flight]:
        """Remove and return all waiting requests, the oldest first."""
        flights = list(self._waiting.values())
        for flight in flights:
            self.remove(flight.request.id)
        return flights

    def count(self, served: Sequence[tuple[RequestId, int]], flights: Mapping[RequestId, Flight]) -> None:
        """Count output tokens of requests that have had their turn. Tokens of closed requests are ignored."""
        for request_id, tokens in served:
            flight = flights.get(request_id)
            if flight is not None:
                self._serve(flight.request, tokens)

    def _serve(self, request: Request, tokens: int) -> None:
        self._tell(lambda policy: policy.served(request, output_tokens=tokens))

    def close(self, request: Request) -> None:
        """Record the end of a request, whether it has had its turn or not."""
        if request.turn:
            self._tell(lambda policy: policy.ended(request))
        else:
            self.remove(request.id)

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
        """Predict the part of the queue whose turn comes before a new request: equal service for every tenant.

        All requests of its own tenant, and of each other tenant as many prompt tokens as its own will have had.
        """
        own = self._tenants.get(request.tenant)
        own_tokens, requests = (own.prompt_tokens, len(own.flights)) if own is not None else (0, 0)
        tokens = own_tokens
        for tenant, queue in self._tenants.items():
            if tenant != request.tenant:
                theirs = min(queue.prompt_tokens, own_tokens + request.prompt_tokens)
                tokens += theirs
                requests += -(-len(queue.flights) * theirs // queue.prompt_tokens)
        return QueueAhead(requests, tokens)

    def exceeds_share(self, request: Request) -> bool:
        """Return whether the tenant has more than its share of the queue, while other tenants wait too."""
        own = self._tenants.get(request.tenant)
        return own is not None and len(own.flights) * len(self._tenants) > len(self._waiting)

    def with_queue(self, cluster: ClusterView, request: Request) -> ClusterView:
        """Return the view as if the queue ahead of this request waited at the workers that compute prompts."""
        workers = [worker.id for worker in cluster.workers if worker.role in _ROLES]
        if not self._waiting or not workers:
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


def workers_with_room(fleet: Fleet, requests: int) -> list[WorkerView]:
    """Return the workers that may get another prompt, if the fleet may get another request beside these.

    A worker has room if the prompts in its queue last for less than `STEPS_AHEAD` steps. The fleet has room for as many
    requests as its decode workers run at once: further ones would wait there with their KV, in the order of their
    turns, whatever service their tenants get meanwhile.
    """
    every = fleet.views()
    prefillers, decoders = fleet.having("prefill") or every, fleet.having("decode") or every
    if all(worker.requests_max for worker in decoders):
        ahead = AHEAD_REQUESTS * sum(worker.role == "prefill" for worker in prefillers)
        if requests >= sum(worker.requests_max for worker in decoders) + ahead:
            return []
    return [
        worker
        for worker in prefillers
        if not worker.step_tokens_max or worker.queued_tokens < STEPS_AHEAD * worker.step_tokens_max
    ]
