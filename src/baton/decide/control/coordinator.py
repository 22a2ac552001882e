"""The coordinator: the control plane of a cluster as a state machine without I/O and clock. Events in, commands out.

It owns the life cycle of every request. The live server, the simulator and a replay use the same class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.core.leaving import RestartWanted
from baton.core.messages import (
    AheadEnded,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    DecodeBegun,
    HostLost,
    Outcome,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    RoleSet,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.ticking import QueuedTooLong, ScaleWanted, Tick, TokensServed, WaitedTooLong
from baton.core.types import ClusterView, HostId, LoadWindow, Request, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.advice import Policies, PolicyFailure, need_ticks
from baton.decide.control.bound import Bound
from baton.decide.control.decode_slot_queue import DecodeSlotQueue
from baton.decide.control.fleet import Fleet, processes_of
from baton.decide.control.flight import Flight, in_order
from baton.decide.control.moves import Moves, RollingRestart
from baton.decide.control.prediction_errors import NO_ERRORS, PredictionMeter
from baton.decide.control.prefixes import Prefixes, read_tokens
from baton.decide.control.reshaping import Reshaping
from baton.decide.control.retries import Retries
from baton.decide.control.room import WaitingRoom
from baton.decide.control.start_queue import StartQueue
from baton.decide.control.turn_queue import TurnQueue, degraded
from baton.decide.kv.window import Window
from baton.decide.policy.fleet import NoMoves


@dataclass(slots=True)
class Coordinator:
    """Chooses the workers of every request, and closes it exactly once (INV-1)."""

    policies: Policies
    block_tokens: int
    retries: Retries = field(default_factory=Retries)
    window: Window | None = None
    """Attention window of the model. None: at least one layer attends to all tokens."""
    queue: StartQueue = field(default_factory=StartQueue)
    reshaping: Reshaping = field(default_factory=Reshaping)
    _fleet: Fleet = field(default_factory=Fleet)
    bound: Bound = field(default_factory=Bound)
    _prefixes: Prefixes = field(default_factory=Prefixes)
    _flights: dict[RequestId, Flight] = field(default_factory=dict[RequestId, Flight])
    _room: WaitingRoom = field(default_factory=WaitingRoom)
    """Flights without a worker, while the cluster has no worker at all."""
    turns: TurnQueue = field(init=False)
    """Fair queue: flights without a worker, until a worker has room for their turn."""
    slot_queue: DecodeSlotQueue = field(init=False)
    """Flights without a worker, until the decode workers have a free slot for them."""
    _meter: PredictionMeter = field(default_factory=PredictionMeter)
    _now_s: float = 0.0
    moves: Moves = field(init=False)

    def __post_init__(self) -> None:
        self.turns = TurnQueue.of(self.policies)
        self.slot_queue = DecodeSlotQueue(self.queue)
        self.moves = Moves(self._fleet, self._flights, RollingRestart(self._fleet))

    def open_host(self, host: HostId, workers_max: int | None) -> None:
        """Record the maximum number of workers of a host. None: it has not stated one."""
        if workers_max is not None:
            self.reshaping.workers_max[host] = workers_max

    def leave_host(self, host: HostId) -> list[CoordinatorCommand]:
        """Assign no further requests to a leaving host, and begin to move its decodes."""
        self.reshaping.workers_max.pop(host, None)
        self.moves.drain_host(host)
        return self.moves.leave_draining(self.policies, self._cluster())

    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorCommand]:
        """Apply one event and return the commands, in order. Late events of ended requests and attempts are ignored."""
        self._now_s = now_s
        commands = self._apply(event, now_s)
        return [*commands, *self._start_waiting()] if self.turns.waiting or self.slot_queue.waiting else commands

    def _apply(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorCommand]:
        match event:  # in order of frequency: see `Transfers.handle`
            case WorkerReported(view=view):
                self._fleet.report(view, now_s)
                return []
            case RequestArrived():
                return self._arrive(event, now_s)
            case PrefillFinished() | RequestFinished() | DecodeBegun() | RequestFailed() | RequestDropped():
                return self._progress(event)
            case BlocksStored() | BlocksRemoved() | TokensServed() | RoleSet() | ScaleWanted():
                self._note(event)
                return []
            case Tick(window=window):
                return self._reshape(window, now_s)
            case RequestCancelled(request_id=request_id):
                return self._close(request_id, "cancelled")
            case WorkerJoined(view=view):
                self._fleet.join(view)
                self.reshaping.joined(view.id)
                return [*self._empty_room(), *self.moves.roll()]
            case WorkerLost(worker=worker, reason=reason):
                self.reshaping.lost(worker, now_s)
                return self._lose([worker], reason, is_planned=self.moves.rolling.is_ending(worker))
            case RestartWanted(workers=workers):
                self.moves.rolling.want(workers)
                return self.moves.roll()
            case HostLost(host=host):
                self._prefixes.forget(host)
                self.moves.forget_host(host)
                self.reshaping.workers_max.pop(host, None)
                return self._lose([view.id for view in processes_of(self._fleet) if view.host == host], None)
            case WaitedTooLong(wait_s=wait_s):
                return [end for close in self._room.reject_overdue(wait_s, now_s) for end in self._end(close)]
            case QueuedTooLong():
                return self._reject_overdue(now_s)
            case AheadEnded():
                return self.moves.stop(event)
            case _:
                assert_never(event)

    @property
    def needs_ticks(self) -> bool:
        """True if a policy or an administrator may change the present fleet, requests may move, or a worker drains."""
        is_busy = bool(self.reshaping.pinned) or self.moves.need_ticks()
        return is_busy or need_ticks(self.policies, len(self._fleet.views()))

    @property
    def starting(self) -> Mapping[Role, int]:
        """Number of requested workers that have not joined, by role."""
        return self.reshaping.starting

    @property
    def waiting_since_s(self) -> float | None:
        """Time when the oldest waiting request began to wait for a worker. None: no request waits."""
        return self._room.since_s

    @property
    def live_requests(self) -> int:
        """Number of requests that have arrived and are not closed."""
        return len(self._flights)

    def _note(self, event: BlocksStored | BlocksRemoved | TokensServed | RoleSet | ScaleWanted) -> None:
        match event:
            case BlocksStored() | BlocksRemoved():
                self._prefixes.note(event)
            case TokensServed(requests=served):
                self.turns.count(served, self._flights)
            case RoleSet(worker=worker, role=role):
                self._fleet.set_role(worker, role)
            case ScaleWanted():
                self.reshaping.pin(event)

    def _arrive(self, event: RequestArrived, now_s: float) -> list[CoordinatorCommand]:
        request = event.request
        assert request.id not in self._flights, f"request {request.id} arrived twice"
        flight = Flight(request, tier_hits=event.tier_hits, stage="decode" if request.resumed_tokens else "prefill")
        cluster = self._view(flight)
        key = self.retries.poison.refuse(request, now_s) or self._admit(request, cluster)
        for easier in degraded(request):
            if not isinstance(key, tuple) and key.outcome == "rejected":
                flight.request, key = easier, self._admit(easier, cluster)
        if not isinstance(key, tuple):
            return [key]
        flight.key, self._flights[request.id] = key, flight
        self.retries.admitted()
        return self._enqueue(flight, cluster)

    def _admit(self, request: Request, cluster: ClusterView) -> tuple[float, ...] | CloseRequest:
        fleet = self._fleet
        has_slot, overtaken = self.turns.has_reserved_slot(request, fleet), self.slot_queue.overtaken(request, fleet)
        refused = None if has_slot else self.queue.refuse(request, self._now_s, self.turns, overtaken)
        key = refused or self.policies.admit(request, self.turns.with_queue(cluster, request), self._now_s)
        return self.turns.name_share(request, key) if isinstance(key, CloseRequest) else key

    def _enqueue(self, flight: Flight, cluster: ClusterView) -> list[CoordinatorCommand]:
        """Let a flight wait for its turn if there is a fair queue, else for a decode slot, or dispatch it now."""
        request, has_had_turn = flight.request, flight.request.turn > 0 and not flight.is_paused
        has_to_wait = self.turns.is_used or self.slot_queue.has_to_wait(request, self._fleet)
        if not cluster.workers or has_had_turn or not has_to_wait:
            return self._dispatch(flight, cluster)
        (self.turns if self.turns.is_used else self.slot_queue).put(flight)
        if not flight.is_paused:
            self.queue.enter(request, self._now_s)
        return []

    def _start_waiting(self) -> list[CoordinatorCommand]:
        commands: list[CoordinatorCommand] = []
        while (flight := self.slot_queue.give(self._fleet)) is not None:
            commands += self._dispatch(flight, self._view(flight))
        while (turn := self.turns.give(self._fleet, self._flights.values(), self._now_s)) is not None:
            commands += [*turn.stops, *self._start(turn.flight, turn.candidates, self._view(turn.flight))]
        return commands

    def _dispatch(self, flight: Flight, cluster: ClusterView) -> list[CoordinatorCommand]:
        """Assign the flight to a worker, of another role if need be, or put it into the waiting room."""
        self.slot_queue.begin(flight.request)
        able = self._fleet.having(flight.stage, flight.request.hosts) or cluster.workers
        return self._start(flight, able, cluster)

    def _start(self, flight: Flight, able: Sequence[WorkerView], cluster: ClusterView) -> list[CoordinatorCommand]:
        if not able:
            self._room.enter(flight.request.id, self._now_s)
            return [*self.reshaping.wake(self._cluster(), self.policies, self._fleet, self._now_s)]
        start = self._start_prefill if flight.stage == "prefill" else self._start_decode
        return start(flight, able, cluster)

    def _start_prefill(
        self, flight: Flight, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> list[CoordinatorCommand]:
        request = flight.request
        route = self.policies.route(request, candidates, cluster)
        if isinstance(route, PolicyFailure):
            return self._close(request.id, "failed", route.reason)
        view, hits = self._fleet.view(route.worker), cluster.prefix_hit_tokens
        here = hits.get(view.host, 0)
        there = hits.get(route.fetch, 0) if route.fetch is not None else 0
        fetch = route.fetch if there > here else None
        reads = read_tokens(request, view, cluster, self.policies.cost) if fetch is None and cluster.tier_hits else 0
        flight.worker, flight.host, flight.started_at_s = route.worker, view.host, self._now_s
        flight.queued_tokens = request.prompt_tokens - max(here, there, reads)
        self.reshaping.begun(request.prompt_tokens - flight.queued_tokens)
        tokens, context_tokens = flight.queued_tokens, request.prompt_tokens
        self._fleet.load(route.worker, request.id, self._now_s, queued_tokens=tokens, context_tokens=context_tokens)
        until = self.policies.until(request, route.until or ("first_token" if view.role == "prefill" else "end"))
        ahead = self.bound.send_ahead(flight, view.host, cluster, self._fleet, self.policies) if until != "end" else []
        groups = self.policies.layer_groups(request, view) if ahead and until == "first_token" else 1
        flight.until, flight.routed_at_s, flight.predicted = until, self._now_s, route.predicted
        start = StartPrefill(request, flight.attempt, route.worker, until, fetch, reads, groups, route.predicted)
        return [start, *ahead]

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
        self._fleet.load(worker, request.id, self._now_s, queued_tokens=0, context_tokens=request.prompt_tokens)
        return [StartDecode(request, flight.attempt, worker, source)]

    def _progress(
        self, event: PrefillFinished | DecodeBegun | RequestFinished | RequestFailed | RequestDropped
    ) -> list[CoordinatorCommand]:
        flight = self._flights.get(event.request_id)
        if flight is None or flight.attempt != event.attempt or flight.worker != event.worker:
            return []  # an event of an abandoned attempt
        if isinstance(event, RequestDropped):
            return self._dropped(flight)
        self._meter.note(flight, event, self._now_s)
        self.queue.leave(event.request_id)
        if isinstance(event, PrefillFinished):
            if flight.stage == "decode":
                return []  # a repeated event: the request decodes already
            self._unload(flight)
            flight.stage = "decode"
            return self._enqueue(flight, self._view(flight))  # a paused one waits for its turn
        if isinstance(event, RequestFinished):
            self.policies.learn(flight.request, event.output_tokens)
            return self._close(event.request_id, "finished")
        if isinstance(event, RequestFailed):
            self._unload(flight)
            return self._close(event.request_id, "failed", event.reason)
        flight.stage = "decode"
        return []

    def _reject_overdue(self, now_s: float) -> list[CoordinatorCommand]:
        """Reject requests that have waited too long for a step. Those with blocks end once their worker drops them."""
        ends = [command for close in self.queue.reject_overdue(now_s) for command in self._end(close)]
        return [*ends, *self.queue.stop_overdue(now_s, self._flights)]

    def _close(self, request_id: RequestId, outcome: Outcome, reason: str = "") -> list[CoordinatorCommand]:
        return self._end(CloseRequest(request_id, outcome, reason))

    def _end(self, close: CloseRequest) -> list[CoordinatorCommand]:
        flight = self._flights.pop(close.request_id, None)
        if flight is None:
            return []
        self._room.leave(close.request_id)
        self.queue.leave(close.request_id)
        self.turns.close(flight)
        self.slot_queue.close(close.request_id)
        commands: list[CoordinatorCommand] = []
        if flight.worker is not None and close.outcome != "finished":
            commands.append(StopRequest(close.request_id, flight.attempt, flight.worker))
        self._unload(flight)
        return [*commands, ReleaseBlocks(close.request_id), close]

    def _lose(
        self, workers: Sequence[WorkerId], death: str | None, *, is_planned: bool = False
    ) -> list[CoordinatorCommand]:
        """Continue the requests of lost workers on others. `death`: why a worker died. None: its host was lost."""
        orphans = [flight for flight in self._flights.values() if flight.worker in workers]
        for worker in workers:
            self._fleet.leave(worker)
        commands = list[CoordinatorCommand]()
        for flight in orphans:
            self._unload(flight)
            flight.moving_to = None
            self.queue.leave(flight.request.id)
            refusal = (
                None if is_planned else self.retries.refuse(flight, death, self._now_s, is_alone=len(orphans) == 1)
            )
            if refusal is not None:
                commands += self._end(refusal)
                continue
            flight.attempt += 1
            commands += self._enqueue(flight, self._view(flight))
        for flight in [] if self._fleet.views() else [*self.turns.drain(), *self.slot_queue.drain()]:
            self.queue.leave(flight.request.id)
            self._room.enter(flight.request.id, self._now_s)
        return commands

    def _empty_room(self) -> list[CoordinatorCommand]:
        waiting = sorted((self._flights[request_id] for request_id in self._room), key=in_order)
        self._room.clear()
        return [command for flight in waiting for command in self._enqueue(flight, self._view(flight))]

    def _reshape(self, window: LoadWindow, now_s: float) -> list[CoordinatorCommand]:
        """Apply the fleet's policies, and begin moves: those that a policy chose, and those off draining workers."""
        commands = self.moves.roll()
        commands += self.reshaping.tick(window, self._cluster(), self.policies, self._fleet, now_s)
        commands += self.moves.leave_draining(self.policies, self._cluster())
        if not isinstance(self.policies.moves, NoMoves) and (flights := self.moves.movable()):
            wanted = self.reshaping.moves(self._cluster(), flights, self.policies, now_s)
            commands += [command for name, target in wanted.items() for command in self.moves.begin(name, target)]
        return commands

    def _dropped(self, flight: Flight) -> list[CoordinatorCommand]:
        """Start a moving or paused request again, or reject an overdue one, after its worker has dropped it."""
        rejection = self.queue.dropped(flight.request.id, self._now_s)
        if rejection is None and flight.moving_to is None and not flight.is_paused:
            return []
        self._unload(flight)
        if rejection is not None:
            return self._end(rejection)
        self.queue.lose_blocks(flight.request.id)
        flight.attempt += 1
        return self._enqueue(flight, self._view(flight))

    def _unload(self, flight: Flight) -> None:
        self.bound.release(flight.request.id)
        if flight.worker is not None:
            request, queued = flight.request, flight.queued_tokens
            self._fleet.unload(flight.worker, request.id, queued_tokens=queued, context_tokens=request.prompt_tokens)
        flight.worker, flight.queued_tokens = None, 0

    def _waiting_requests(self) -> int:
        """Return the number of requests without a worker, and of those on workers that drain."""
        return sum(map(len, (self._room, self.slot_queue.waiting, self.turns.waiting))) + self.moves.draining_requests()

    def _view(self, flight: Flight) -> ClusterView:
        """Return the view of the cluster for a decision about this request."""
        request, policies = flight.request, self.policies
        return ClusterView(
            workers=self._fleet.views(request.hosts), waiting_requests=self._waiting_requests(),
            starting=self.reshaping.starting, bound=self.bound.loads, step_began_s=self._fleet.step_began_s,
            prefix_hit_tokens=self._prefixes.hit_tokens(request, self.block_tokens, self.window),
            expected_output_tokens=policies.expected_tokens(request),
            tier_hits=flight.tier_hits, first_token_by=policies.first_token_by(request),
            is_sent_ahead=policies.run_tokens(request) > 0,
            errors=self._meter.errors(self._now_s) if request.slo else NO_ERRORS,
        )  # fmt: skip

    def _cluster(self) -> ClusterView:
        """Return the view of the cluster for decisions that do not concern a single request."""
        return ClusterView(
            workers=self._fleet.views(), prefix_hit_tokens={}, waiting_requests=self._waiting_requests(),
            starting=self.reshaping.starting, bound=self.bound.loads, step_began_s=self._fleet.step_began_s,
        )  # fmt: skip
