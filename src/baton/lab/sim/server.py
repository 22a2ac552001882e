"""The simulated server: passes events to the live cluster code and performs its commands on simulated workers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.core.copies import CopyBlocks, LayersDone
from baton.core.leaving import DismissHost, RestartWorker
from baton.core.messages import (
    BlocksGranted,
    CloseRequest,
    HostLost,
    RequestArrived,
    RequestCancelled,
    RetireWorker,
    RoleSet,
    SetRole,
    StartDecode,
    StartPrefill,
    StartRequest,
    StartWorker,
    StepReport,
    ToWorker,
    WorkerCommand,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ticking import QueuedTooLong, Tick, WaitedTooLong
from baton.core.tier_messages import DropBlocks, LoadBlocks, StoreBlocks
from baton.core.types import (
    HostId,
    OutputToken,
    Request,
    RequestId,
    Role,
    TokenBytes,
    WorkerId,
    WorkerView,
)
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import BeginRequest, ClusterCommand, ClusterEvent, strip_tokens
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.decision_log import decided
from baton.decide.control.load_meter import LoadMeter
from baton.decide.control.turn_queue import TokenCount
from baton.decide.kv.host_pool import HostPool
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.worker import DecodedSteps


@dataclass(slots=True, kw_only=True)
class SimServer:
    """Feeds events to a `Cluster` and performs its commands, like the live server without sockets."""

    loop: EventLoop
    cluster: Cluster
    journal: Journal
    wait_s: float
    """Maximum wait of a request while no worker is available."""
    closed: Callable[[Life], None]
    """Called once with each closed request."""
    reshape_fleet: Callable[[SetRole | StartWorker | RetireWorker | RestartWorker | DismissHost], None]
    """Performs commands of roles and scaling."""
    begin_copy: Callable[[CopyBlocks], None]
    """Puts a copy on the wire."""
    use_tier: Callable[[StoreBlocks | DropBlocks | LoadBlocks], None]
    """Makes a tier's store write, read or drop blocks."""
    meter: LoadMeter = field(default_factory=LoadMeter)
    routes: dict[WorkerId, Callable[[WorkerCommand], None]] = field(
        default_factory=dict[WorkerId, Callable[[WorkerCommand], None]]
    )
    """Functions that send a command to a worker, for every worker that has joined and is not lost."""
    _is_watching: bool = False
    """A check of the waiting requests is scheduled."""
    _is_watching_queue: bool = False
    """A check of the queued requests is scheduled."""
    _served: TokenCount = field(init=False)

    def __post_init__(self) -> None:
        self._served = TokenCount(self.coordinator.turns.is_used)

    @property
    def coordinator(self) -> Coordinator:
        return self.cluster.coordinator

    @property
    def pools(self) -> dict[HostId, HostPool]:
        return self.cluster.pools

    # ---- events from clients, operators and processes

    def submit(self, request: Request, prompt: Sequence[int]) -> None:
        self.journal.lives[request.id] = Life(request=request, tokens=array("I", prompt))
        self.meter.arrived(request)
        self.tell(RequestArrived(request))
        self._watch_room()

    def cancel(self, request_id: RequestId) -> None:
        self.tell(RequestCancelled(request_id))

    def set_role(self, worker: WorkerId, role: Role) -> None:
        self.tell(RoleSet(worker, role))

    def tick(self) -> None:
        """Run the periodic policies: roles, scaling and moves."""
        self.tell(Tick(self.meter.take(self.loop.now_s)))

    def join(self, view: WorkerView, send: Callable[[WorkerCommand], None]) -> None:
        self.routes[view.id] = send
        self.tell(WorkerJoined(view))

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Report that a worker died, or that it cannot start."""
        self.routes.pop(worker, None)
        self._detach_requests({worker})
        self.tell(WorkerLost(worker, reason))
        self._watch_room()

    def lose_host(self, host: HostId, reason: str) -> None:
        """Report that a host died, with all its workers."""
        workers = {view.id for view in self.cluster.workers.values() if view.host == host}
        for worker in workers:
            self.routes.pop(worker, None)
        self._detach_requests(workers)
        self.tell(HostLost(host, reason))
        self._watch_room()

    def tell(self, event: ClusterEvent) -> None:
        """Pass an event to the cluster, log its decision, and perform its commands."""
        served = self._served.take()
        if served is not None:
            self._decide(served)
        self._decide(event)
        self._watch_queue()

    def _decide(self, event: ClusterEvent) -> None:
        now_s = self.loop.now_s
        commands = self.cluster.handle(event, now_s)
        if self.journal.is_logging:
            self.journal.log_decision(decided(now_s, event, self.cluster.decided))
        for command in commands:
            self._perform(command)

    def _perform(self, command: ClusterCommand) -> None:
        match command:
            case ToWorker(worker=worker, command=inner):
                if isinstance(inner, BlocksGranted):
                    block_tokens = self.pools[self.cluster.workers[worker].host].block_tokens
                    self._note_hit(inner.request_id, inner.cached_blocks * block_tokens)
                self._send(worker, inner)
            case BeginRequest():
                self._begin(command)
            case StartPrefill() | StartDecode():
                self._assign(command)
            case CloseRequest():
                self._close(command)
            case CopyBlocks():
                self.begin_copy(command)
            case StoreBlocks() | LoadBlocks() | DropBlocks():
                self.use_tier(command)
            case SetRole() | StartWorker() | RetireWorker() | RestartWorker() | DismissHost():
                self.reshape_fleet(command)
            case _:
                assert_never(command)

    def _send(self, worker: WorkerId, command: WorkerCommand) -> None:
        route = self.routes.get(worker)
        if route is not None:
            route(command)

    def _begin(self, begin: BeginRequest) -> None:
        """Send a request and its tokens so far to its worker."""
        life = self.journal.lives[begin.request_id]
        if begin.block_table:
            self._note_hit(begin.request_id, begin.computed_tokens)
        start = StartRequest(
            request=life.request,
            attempt=begin.attempt,
            tokens=TokenBytes(life.tokens.tobytes()),
            until=begin.until,
            block_table=begin.block_table,
            computed_tokens=begin.computed_tokens,
            layer_groups=begin.layer_groups,
        )
        self._send(begin.worker, start)

    def _assign(self, start: StartPrefill | StartDecode) -> None:
        """Record which worker holds the request now. Tokens of any other worker are dropped."""
        life = self.journal.lives[start.request.id]
        life.request, life.attempt, life.worker = start.request, start.attempt, start.worker
        if isinstance(start, StartDecode):
            life.handoffs_s += (self.loop.now_s,)
        elif start.until == "prompt":
            life.leaves_first_token = True

    def _close(self, close: CloseRequest) -> None:
        life = self.journal.lives[close.request_id]
        life.closes += ((self.loop.now_s, close),)
        times_s = life.token_times_s
        decode_s = times_s[-1] - times_s[0] if times_s else 0.0
        self.meter.closed(close.outcome, output_tokens=len(times_s), decode_s=decode_s)
        self.closed(life)

    def _note_hit(self, request_id: RequestId, tokens: int) -> None:
        life = self.journal.lives.get(request_id)
        if life is not None and life.cached_tokens is None:
            life.cached_tokens = tokens

    def _watch_room(self) -> None:
        """Schedule a check for the time when the longest wait without a worker reaches `wait_s`."""
        since_s = self.coordinator.waiting_since_s
        if since_s is not None and not self._is_watching:
            self._is_watching = True
            self.loop.at(since_s + self.wait_s, self._reject_waiting)

    def _reject_waiting(self) -> None:
        self._is_watching = False
        if self.coordinator.waiting_since_s is not None:
            self.tell(WaitedTooLong(self.wait_s))
            self._watch_room()

    def _watch_queue(self) -> None:
        """Schedule a check for when the oldest request in the queue is overdue."""
        if self._is_watching_queue:
            return
        check_s = self.coordinator.queue.next_check_s(self.loop.now_s)
        if check_s is not None:
            self._is_watching_queue = True
            self.loop.at(check_s, self._reject_overdue)

    def _reject_overdue(self) -> None:
        self._is_watching_queue = False
        if self.coordinator.queue.is_overdue(self.loop.now_s):
            self.tell(QueuedTooLong())
        self._watch_queue()

    def _detach_requests(self, workers: set[WorkerId]) -> None:
        for life in self.journal.lives.values():
            if life.worker in workers:
                life.worker = None

    def receive(self, message: StepReport | LayersDone | DecodedSteps) -> None:
        """Process a worker's message: record its tokens, then pass its events and load to the cluster."""
        if isinstance(message, DecodedSteps):
            self._record_run(message)
            if message.report is None:
                return
            message = message.report
        if not isinstance(message, StepReport):
            self.tell(message)
            return
        for request_id in message.started:
            life = self.journal.lives.get(request_id)
            if life is not None and life.started_at_s is None:
                began_s = message.view.observed_at_s - message.step_s
                life.started_at_s = max(began_s, life.request.arrived_at_s)  # `began_s` may round below the arrival
        for token in message.tokens:
            self._record(token, message.worker)
        said = strip_tokens(message, message.view)
        if said is not None:
            self.tell(said)

    def _record_run(self, decoded: DecodedSteps) -> None:
        """Record the tokens of many steps, with the same checks as `_record`."""
        times_s, worker, lives = decoded.times_s, decoded.worker, self.journal.lives
        for request_id, attempt, token in decoded.parts:
            life = lives.get(request_id)
            if life is not None and not life.closes and life.attempt == attempt and life.worker == worker:
                life.tokens.extend(token * len(times_s))
                life.token_times_s.extend(times_s)

    def _record(self, token: OutputToken, worker: WorkerId) -> None:
        """Record a token, unless its attempt was abandoned, its worker is lost, or the token is a duplicate.

        A lost worker's last report may arrive while no worker holds the request. If its final token were recorded, the
        coordinator would still ignore the request's end, and the next worker would append to a finished text.
        """
        life = self.journal.lives.get(token.request_id)
        if life is None or life.closes:
            return
        abandoned = (token.attempt, worker) != (life.attempt, life.worker)
        if abandoned or token.index != len(life.token_times_s):
            return
        if token.index == 0:
            life.prompt_logprobs = len(token.prompt_logprobs)
            self.meter.prefilled(self.loop.now_s - life.request.arrived_at_s)
        life.tokens.append(token.token)
        life.token_times_s.append(self.loop.now_s)
        self._served.add(token.request_id)
