"""The server of a simulation: the real carrier with its machines, and the truth about every request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.control.carrier import Carrier
from baton.control.coordinator import Coordinator
from baton.control.handoffs import Start
from baton.control.load_meter import LoadMeter
from baton.core.messages import (
    BlocksGranted,
    CloseRequest,
    CopyBlocks,
    RetireWorker,
    SetRole,
    StartDecode,
    StartRequest,
    StartWorker,
    StepReport,
    WorkerCommand,
)
from baton.core.types import (
    HostId,
    OutputToken,
    Request,
    RequestId,
    Role,
    TokenBytes,
    WorkerId,
    WorkerView,
    pack_tokens,
)
from baton.kv.host_pool import HostPool
from baton.sim.journal import Journal, Life
from baton.sim.loop import EventLoop


@dataclass(slots=True, kw_only=True)
class SimServer:
    """What stands around the carrier in the live server, without sockets. Implements `Outside`."""

    loop: EventLoop
    journal: Journal
    closed: Callable[[Life], None]
    """Called when a request has closed."""
    reshape_fleet: Callable[[SetRole | StartWorker | RetireWorker], None]
    """Changes the fleet as roles and scaling ask."""
    start_copy: Callable[[CopyBlocks], None]
    """Puts a copy on the wire."""
    carrier: Carrier = field(init=False)
    meter: LoadMeter = field(default_factory=LoadMeter)
    routes: dict[WorkerId, Callable[[WorkerCommand], None]] = field(
        default_factory=dict[WorkerId, Callable[[WorkerCommand], None]]
    )
    """The link to every worker that has joined and is not lost."""

    def connect(self, coordinator: Coordinator) -> None:
        """Give it its coordinator."""
        self.carrier = Carrier(coordinator, self)
        self.carrier.log = self.journal.sink

    @property
    def coordinator(self) -> Coordinator:
        return self.carrier.coordinator

    @property
    def pools(self) -> dict[HostId, HostPool]:
        return self.carrier.pools

    # ---- what clients, operators and processes do

    def submit(self, request: Request, prompt: Sequence[int]) -> None:
        self.journal.lives[request.id] = Life(request=request, tokens=list(prompt))
        self.meter.arrived(request)
        self.carrier.arrive(request, self.loop.now_s)

    def cancel(self, request_id: RequestId) -> None:
        self.carrier.cancel(request_id, self.loop.now_s)

    def set_role(self, worker: WorkerId, role: Role) -> None:
        self.carrier.set_role(worker, role, self.loop.now_s)

    def tick(self) -> None:
        """Let roles, scaling and moves be looked at."""
        self.carrier.tick(self.meter.take(self.loop.now_s), self.loop.now_s)

    def join(self, view: WorkerView, send: Callable[[WorkerCommand], None]) -> None:
        self.routes[view.id] = send
        self.carrier.join(view, self.loop.now_s)

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Note a dead worker."""
        self.routes.pop(worker, None)
        self._orphan({worker})
        self.carrier.lose(worker, reason, self.loop.now_s)

    def lose_host(self, host: HostId, workers: set[WorkerId], reason: str) -> None:
        """Note a dead host, with all its workers."""
        for worker in workers:
            self.routes.pop(worker, None)
        self._orphan(workers)
        self.carrier.lose_host(host, reason, self.loop.now_s)

    def _orphan(self, workers: set[WorkerId]) -> None:
        for life in self.journal.lives.values():
            if life.worker in workers:
                life.worker = None

    def receive(self, report: StepReport) -> None:
        """Take a worker's report: its tokens, then its events in their order, then its load."""
        for request_id in report.started:
            life = self.journal.lives.get(request_id)
            if life is not None and life.started_at_s is None:
                life.started_at_s = report.view.observed_at_s
        for token in report.tokens:
            self._record(token, report.worker)
        self.carrier.hear(report, self.loop.now_s)

    def _record(self, token: OutputToken, worker: WorkerId) -> None:
        """Keep a token unless it is of an attempt that was given up, of a lost worker, or is there already.

        A lost worker's last words may come late, while nobody has the request: were its last token taken then, its
        end would be refused by the coordinator, and the next worker would write on past it.
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

    # ---- what the carrier asks for

    def send(self, worker: WorkerId, command: WorkerCommand) -> None:
        """See `Outside.send`."""
        if isinstance(command, BlocksGranted):
            self._note_hit(command.request_id, command.cached_blocks * self.coordinator.block_tokens)
        elif isinstance(command, StartRequest) and command.block_table:
            self._note_hit(command.request.id, command.computed_tokens)
        route = self.routes.get(worker)
        if route is not None:
            route(command)

    def copy(self, copy: CopyBlocks) -> None:
        """See `Outside.copy`."""
        self.start_copy(copy)

    def assign(self, command: Start) -> TokenBytes:
        """See `Outside.assign`."""
        life = self.journal.lives[command.request.id]
        life.attempt, life.worker = command.attempt, command.worker
        if isinstance(command, StartDecode):
            life.handoffs_s.append(self.loop.now_s)
        return pack_tokens(life.tokens)

    def close(self, command: CloseRequest) -> None:
        """See `Outside.close`."""
        life = self.journal.lives[command.request_id]
        life.closes.append((self.loop.now_s, command))
        times_s = life.token_times_s
        decode_s = times_s[-1] - times_s[0] if times_s else 0.0
        self.meter.closed(command.outcome, output_tokens=len(times_s), decode_s=decode_s)
        self.closed(life)

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """See `Outside.reshape`."""
        self.reshape_fleet(command)

    def _note_hit(self, request_id: RequestId, tokens: int) -> None:
        life = self.journal.lives.get(request_id)
        if life is not None and life.cached_tokens is None:
            life.cached_tokens = tokens
