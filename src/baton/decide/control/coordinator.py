"""The coordinator: the control plane of a cluster as a state machine without I/O and clock. Events in, commands out.

It owns the life cycle of every request. The live server, the simulator and a replay use the same class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.core.messages import (
    AheadEnded,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    DecodeBegun,
    HostLost,
    Outcome,
    PrefillFinished,
    RejectReason,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    RetireWorker,
    RoleSet,
    SendAhead,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.ticking import QueuedTooLong, Tick, WaitedTooLong
from baton.core.types import (
    ClusterView,
    HostId,
    LoadWindow,
    RequestId,
    Role,
    WorkerId,
    WorkerView,
)
from baton.decide.control.advice import Policies, PolicyFailure, need_ticks
from baton.decide.control.bound import Bound
from baton.decide.control.fleet import Fleet, processes_of
from baton.decide.control.flight import Flight
from baton.decide.control.moves import Moves
from baton.decide.control.poison import PoisonPrompts
from baton.decide.control.prefixes import Prefixes, read_tokens
from baton.decide.control.reshaping import Reshaping
from baton.decide.control.room import WaitingRoom
from baton.decide.control.start_queue import StartQueue
from baton.decide.kv.window import Window
from baton.decide.policy.predictions import with_bound


@dataclass(slots=True)
class Coordinator:
    """Chooses the workers of every request, and closes it exactly once (INV-1)."""

    policies: Policies
    block_tokens: int
    attempts_max: int = 3
    window: Window | None = None
    """Attention window of the model. None: at least one layer attends to all tokens."""
    queue: StartQueue = field(default_factory=StartQueue)
    _reshaping: Reshaping = field(default_factory=Reshaping)
    _fleet: Fleet = field(default_factory=Fleet)
    _bound: Bound = field(default_factory=Bound)
    _prefixes: Prefixes = field(default_factory=Prefixes)
    _flights: dict[RequestId, Flight] = field(default_factory=dict[RequestId, Flight])
    _room: WaitingRoom = field(default_factory=WaitingRoom)
    """Flights without a worker."""
    _now_s: float = 0.0
    _moves: Moves = field(init=False)
    _poison: PoisonPrompts = field(default_factory=PoisonPrompts)

    def __post_init__(self) -> None:
        self._moves = Moves(self._fleet, self._flights)

    def open_host(self, host: HostId, workers_max: int | None) -> None:
        """Record the maximum number of workers of a host. None: it has not stated one."""
        if workers_max is not None:
            self._reshaping.workers_max[host] = workers_max

    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorCommand]:
        """Apply one event and return the resulting commands, in order.

        Late and repeated events are normal: an event of a closed request or an abandoned attempt has no effect.
        """
        self._now_s = now_s
        match event:
            case WorkerReported(view=view):
                self._fleet.report(view)
                return []
            case RequestArrived():
                return self._arrive(event, now_s)
            case PrefillFinished() | RequestFinished() | DecodeBegun() | RequestFailed() | RequestDropped():
                return self._progress(event)
            case RequestCancelled(request_id=request_id):
                return self._close(request_id, "cancelled")
            case WorkerJoined(view=view):
                self._fleet.join(view)
                self._reshaping.joined(view.id)
                return self._empty_room()
            case WorkerLost(worker=worker, reason=reason):
                self._reshaping.lost(worker, now_s)
                return self._lose([worker], reason)
            case HostLost(host=host, reason=reason):
                self._prefixes.forget(host)
                self._reshaping.workers_max.pop(host, None)
                return self._lose([view.id for view in processes_of(self._fleet) if view.host == host], reason)
            case WaitedTooLong(wait_s=wait_s):
                return self._reject_waiting(wait_s)
            case QueuedTooLong():
                return self._reject_overdue(now_s)
            case AheadEnded():
                return self._moves.stop(event)
            case Tick(window=window):
                return self._reshape(window, now_s)
            case RoleSet(worker=worker, role=role):
                self._fleet.set_role(worker, role)
                return []
            case BlocksStored() | BlocksRemoved():
                self._prefixes.note(event)
                return []
            case _:
                assert_never(event)

    @property
    def needs_ticks(self) -> bool:
        """A policy may change the present fleet, or move requests."""
        return need_ticks(self.policies, len(self._fleet.views()))

    @property
    def reshaping_failure(self) -> str:
        """Error message of the last failure of a policy for roles, scaling or moves. Empty: there was none."""
        return self._reshaping.failure

    @property
    def starting(self) -> Mapping[Role, int]:
        """Number of requested workers that have not joined, by role."""
        return self._reshaping.starting

    @property
    def waiting_since_s(self) -> float | None:
        """Time when the oldest waiting request began to wait for a worker. None: no request waits."""
        return self._room.since_s

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """The live workers with their present load."""
        return self._fleet.views()

    @property
    def live_requests(self) -> int:
        """Number of requests that have arrived and are not closed."""
        return len(self._flights)

    def _arrive(self, event: RequestArrived, now_s: float) -> list[CoordinatorCommand]:
        request = event.request
        assert request.id not in self._flights, f"request {request.id} arrived twice"
        flight = Flight(request, tier_hits=event.tier_hits)
        cluster = self._view(flight)
        refused = self._poison.refuse(request, now_s) or self.queue.refuse(request, now_s)
        key = refused or self.policies.admit(request, cluster, now_s)
        if not isinstance(key, tuple):
            return [key]
        flight.key = key
        self._flights[request.id] = flight
        return self._dispatch(flight, cluster)

    def _dispatch(self, flight: Flight, cluster: ClusterView) -> list[CoordinatorCommand]:
        """Assign the flight to a worker, or put it into the waiting room if there is none.

        A role is a preference: without a worker of the wanted role, any worker serves, slower but at once.
        """
        candidates = self._fleet.having(flight.stage) or list(cluster.workers)
        if not candidates:
            self._room.enter(flight.request.id, self._now_s)
            return [*self._reshaping.wake(self._cluster(), self.policies, self._fleet, self._now_s)]
        if flight.stage == "prefill":
            return self._start_prefill(flight, candidates, cluster)
        return self._start_decode(flight, candidates, cluster)

    def _start_prefill(
        self, flight: Flight, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> list[CoordinatorCommand]:
        request = flight.request
        route = self.policies.route(request, candidates, cluster)
        if isinstance(route, PolicyFailure):
            return self._close(request.id, "failed", route.reason)
        view = self._fleet.view(route.worker)
        hits = cluster.prefix_hit_tokens
        here = hits.get(view.host, 0)
        there = hits.get(route.fetch, 0) if route.fetch is not None else 0
        fetch = route.fetch if there > here else None
        reads = read_tokens(request, view, cluster, self.policies.cost) if fetch is None and cluster.tier_hits else 0
        flight.worker, flight.host, flight.started_at_s = route.worker, view.host, self._now_s
        flight.queued_tokens = request.prompt_tokens - max(here, there, reads)
        self._fleet.load(
            route.worker, request.id, queued_tokens=flight.queued_tokens, context_tokens=request.prompt_tokens
        )
        until = self.policies.until(request, route.until or ("first_token" if view.role == "prefill" else "end"))
        ahead = self._send_ahead(flight, view.host, cluster) if until != "end" else []
        groups = self.policies.layer_groups(request, view) if ahead and until == "first_token" else 1
        return [StartPrefill(request, flight.attempt, route.worker, until, fetch, reads, groups), *ahead]

    def _send_ahead(self, flight: Flight, source: HostId, cluster: ClusterView) -> list[CoordinatorCommand]:
        """Send the computed part of a prompt to its decode worker while the rest is computed."""
        request, flight.ahead = flight.request, None
        if not cluster.is_sent_ahead or request.sampling.prompt_logprobs or self._fleet.hosts == {source}:
            return []
        cluster = with_bound(cluster)
        candidates = cluster.having("decode")
        if all(worker.host == source for worker in candidates):
            return []
        choice = self.policies.place(request, source, candidates, cluster)
        if isinstance(choice, PolicyFailure):
            return []  # the policy is asked again when the prompt is computed
        if choice != flight.worker:
            self._bound.bind(request, choice)  # the load of the worker that computes the prompt includes the request
        flight.ahead = self._fleet.view(choice).host
        if flight.ahead == source:
            return []
        return [SendAhead(request, flight.attempt, source, choice, self.policies.run_tokens(request))]

    def _start_decode(
        self, flight: Flight, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> list[CoordinatorCommand]:
        request = flight.request
        worker = flight.moving_to if flight.moving_to in self._fleet else None
        flight.moving_to = None
        if worker is None:
            there = [view for view in candidates if view.host == flight.ahead] if flight.ahead is not None else []
            choice = self.policies.place(request, flight.host, there or candidates, cluster)
            if isinstance(choice, PolicyFailure):
                return self._close(request.id, "failed", choice.reason)
            worker = choice
        host = self._fleet.view(worker).host
        source = flight.host if flight.host != host else None
        flight.worker, flight.host, flight.started_at_s = worker, host, self._now_s
        self._fleet.load(worker, request.id, queued_tokens=0, context_tokens=request.prompt_tokens)
        return [StartDecode(request, flight.attempt, worker, source)]

    def _progress(
        self, event: PrefillFinished | DecodeBegun | RequestFinished | RequestFailed | RequestDropped
    ) -> list[CoordinatorCommand]:
        flight = self._flights.get(event.request_id)
        if flight is None or flight.attempt != event.attempt or flight.worker != event.worker:
            return []  # an event of an abandoned attempt
        if isinstance(event, RequestDropped):
            return self._dropped(flight)
        self.queue.leave(event.request_id)
        if isinstance(event, PrefillFinished):
            if flight.stage == "decode":
                return []  # a repeated event: the request decodes already
            self._unload(flight)
            flight.stage = "decode"
            return self._dispatch(flight, self._view(flight))
        if isinstance(event, RequestFinished):
            self.policies.learn(flight.request, event.output_tokens)
            return self._close(event.request_id, "finished")
        if isinstance(event, RequestFailed):
            self._unload(flight)
            return self._close(event.request_id, "failed", event.reason)
        flight.stage = "decode"
        return []

    def _reject_waiting(self, wait_s: float) -> list[CoordinatorCommand]:
        """Reject the requests that have waited at least `wait_s`, so that their clients can use another server."""
        why = f"no worker has been there for {wait_s:g} s; send the request again, later or to another server"
        overdue = self._room.overdue(wait_s, self._now_s)
        return [command for request_id in overdue for command in self._close(request_id, "rejected", why, "no_worker")]

    def _reject_overdue(self, now_s: float) -> list[CoordinatorCommand]:
        """Reject the requests that have waited too long for a step. Workers drop those that have blocks first."""
        commands = [command for close in self.queue.reject_overdue(now_s) for command in self._end(close)]
        for flight in [self._flights[request_id] for request_id in self.queue.stop_overdue(now_s)]:
            assert flight.worker is not None, f"{flight.request.id} waits for a step without a worker"
            commands.append(StopRequest(flight.request.id, flight.attempt, flight.worker, only_unstarted=True))
        return commands

    def _close(
        self, request_id: RequestId, outcome: Outcome, reason: str = "", reject: RejectReason | None = None
    ) -> list[CoordinatorCommand]:
        return self._end(CloseRequest(request_id, outcome, reason, reject))

    def _end(self, close: CloseRequest) -> list[CoordinatorCommand]:
        flight = self._flights.pop(close.request_id, None)
        if flight is None:
            return []
        self._room.leave(close.request_id)
        self.queue.leave(close.request_id)
        commands: list[CoordinatorCommand] = []
        if flight.worker is not None and close.outcome != "finished":
            commands.append(StopRequest(close.request_id, flight.attempt, flight.worker))
        self._unload(flight)
        return [*commands, ReleaseBlocks(close.request_id), close]

    def _lose(self, workers: Sequence[WorkerId], reason: str) -> list[CoordinatorCommand]:
        """Start the requests of dead workers on others: the server has their tokens, the hosts have their KV."""
        dead = set(workers)
        orphans = [flight for flight in self._flights.values() if flight.worker in dead]
        for worker in workers:
            self._fleet.leave(worker)
        commands: list[CoordinatorCommand] = []
        for flight in orphans:
            flight.worker = flight.moving_to = None
            self._bound.release(flight.request.id)
            self.queue.leave(flight.request.id)
            flight.deaths += 1
            if flight.deaths == self.attempts_max:
                why = f"the worker died under it {flight.deaths} times, last: {reason}"
                self._poison.add(flight.request, self._now_s)
                commands += self._close(flight.request.id, "failed", why)
                continue
            flight.attempt += 1
            commands += self._dispatch(flight, self._view(flight))
        return commands

    def _empty_room(self) -> list[CoordinatorCommand]:
        waiting = [self._flights[request_id] for request_id in self._room]
        waiting.sort(key=lambda flight: (flight.key, flight.request.id))
        self._room.clear()
        return [command for flight in waiting for command in self._dispatch(flight, self._view(flight))]

    def _reshape(self, window: LoadWindow, now_s: float) -> list[CoordinatorCommand]:
        """Change the fleet as its policies want, and begin moves: of their choice, and off draining workers."""
        drained = self._moves.drained()
        for worker in drained:
            self._fleet.leave(worker)
        commands: list[CoordinatorCommand] = [RetireWorker(worker) for worker in drained]
        commands += self._reshaping.tick(window, self._cluster(), self.policies, self._fleet, now_s)
        for flight in self._moves.on_draining():
            candidates, cluster = self._fleet.having("decode") or self._fleet.views(), self._view(flight)
            target = self.policies.place(flight.request, flight.host, candidates, cluster) if candidates else None
            if target is not None and not isinstance(target, PolicyFailure):
                commands += self._moves.begin(flight.request.id, target)
        flights = self._moves.movable()
        if flights:
            wanted = self._reshaping.moves(self._cluster(), flights, self.policies, now_s)
            commands += [command for name, target in wanted.items() for command in self._moves.begin(name, target)]
        return commands

    def _dropped(self, flight: Flight) -> list[CoordinatorCommand]:
        """Start a moving request on its target, or reject an overdue one, after its worker has dropped it."""
        rejection = self.queue.dropped(flight.request.id, self._now_s)
        if rejection is None and flight.moving_to is None:
            return []
        self._unload(flight)
        if rejection is not None:
            return self._end(rejection)
        flight.attempt += 1
        return self._dispatch(flight, self._view(flight))

    def _unload(self, flight: Flight) -> None:
        self._bound.release(flight.request.id)
        if flight.worker is not None:
            tokens = flight.request.prompt_tokens
            self._fleet.unload(
                flight.worker, flight.request.id, queued_tokens=flight.queued_tokens, context_tokens=tokens
            )
        flight.worker, flight.queued_tokens = None, 0

    def _view(self, flight: Flight) -> ClusterView:
        """Return the view of the cluster for a decision about this request."""
        request, policies = flight.request, self.policies
        return ClusterView(
            workers=self._fleet.views(),
            prefix_hit_tokens=self._prefixes.hit_tokens(request, self.block_tokens, self.window),
            expected_output_tokens=policies.expected_tokens(request),
            waiting_requests=len(self._room) + self._moves.draining_requests(),
            tier_hits=flight.tier_hits,
            starting=self._reshaping.starting,
            bound=self._bound.loads,
            first_token_by=policies.first_token_by(request),
            is_sent_ahead=policies.run_tokens(request) > 0,
        )

    def _cluster(self) -> ClusterView:
        """Return the view of the cluster for decisions that do not concern a single request."""
        return ClusterView(
            workers=self._fleet.views(),
            prefix_hit_tokens={},
            waiting_requests=len(self._room) + self._moves.draining_requests(),
            starting=self._reshaping.starting,
            bound=self._bound.loads,
        )
