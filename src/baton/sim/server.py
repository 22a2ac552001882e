"""The server's driver without sockets: the real coordinator, the real host pool, the truth about every request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision
from baton.core.messages import (
    BlocksGranted,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    PoolCommand,
    PoolEvent,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RetireWorker,
    RoleSet,
    SetRole,
    StartDecode,
    StartPrefill,
    StartRequest,
    StartWorker,
    StepReport,
    StopRequest,
    ToWorker,
    WorkerCommand,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.types import OutputToken, Request, RequestId, Role, WorkerId, WorkerView, pack_tokens
from baton.kv.host_pool import HostPool
from baton.sim.journal import Journal, Life, PoolDecision
from baton.sim.loop import EventLoop


@dataclass(slots=True, kw_only=True)
class SimServer:
    """Carries events in and commands out, exactly as the live gateway does."""

    loop: EventLoop
    coordinator: Coordinator
    pool: HostPool
    journal: Journal
    closed: Callable[[Life], None]
    """Called when a request has closed."""
    reshape: Callable[[SetRole | StartWorker | RetireWorker], None]
    """Changes the fleet as roles and scaling ask."""
    routes: dict[WorkerId, Callable[[WorkerCommand], None]] = field(
        default_factory=dict[WorkerId, Callable[[WorkerCommand], None]]
    )
    """The link to every worker that has joined and is not lost."""

    # ---- what clients, operators and processes do

    def submit(self, request: Request, prompt: Sequence[int]) -> None:
        self.journal.lives[request.id] = Life(request=request, tokens=list(prompt))
        self._tell(RequestArrived(request))

    def cancel(self, request_id: RequestId) -> None:
        self._tell(RequestCancelled(request_id))

    def set_role(self, worker: WorkerId, role: Role) -> None:
        self._tell(RoleSet(worker, role))

    def join(self, view: WorkerView, send: Callable[[WorkerCommand], None]) -> None:
        self.routes[view.id] = send
        self._tell(WorkerJoined(view))

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Note a dead worker: first the pool, then the coordinator, who gives its requests to others."""
        lost = WorkerLost(worker, reason)
        del self.routes[worker]
        for life in self.journal.lives.values():
            if life.worker == worker:
                life.worker = None
        self._tell_pool(lost)
        self._tell(lost)

    def receive(self, report: StepReport) -> None:
        """Take a worker's report: its tokens, then its events in their order, then its load."""
        for request_id in report.started:
            life = self.journal.lives.get(request_id)
            if life is not None and life.started_at_s is None:
                life.started_at_s = report.view.observed_at_s
        for token in report.tokens:
            self._record(token, report.worker)
        for event in report.events:
            self._tell_pool(event)
            if isinstance(event, PrefillFinished | RequestFinished | RequestFailed):
                self._tell(event)
        self._tell(WorkerReported(report.view))

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
        life.tokens.append(token.token)
        life.token_times_s.append(self.loop.now_s)

    # ---- events in, commands out

    def _tell(self, event: CoordinatorEvent) -> None:
        commands = self.coordinator.handle(event, self.loop.now_s)
        if self.journal.keep_log:
            self.journal.log.append(Decision(self.loop.now_s, event, tuple(commands)))
        for command in commands:
            self._execute(command)

    def _execute(self, command: CoordinatorCommand) -> None:
        match command:
            case StartPrefill() | StartDecode():
                self._start(command)
            case StopRequest():
                self.routes[command.worker](command)
            case ReleaseBlocks():
                self._tell_pool(command)
            case CloseRequest():
                life = self.journal.lives[command.request_id]
                life.closes.append((self.loop.now_s, command))
                self.closed(life)
            case SetRole() | StartWorker() | RetireWorker():
                self.reshape(command)
            case _:
                assert_never(command)

    def _start(self, command: StartPrefill | StartDecode) -> None:
        """Give the request's blocks to the worker and tell it so, before anything else that follows from it."""
        follow_up = self._ask_pool(command)
        life = self.journal.lives[command.request.id]
        life.attempt, life.worker = command.attempt, command.worker
        if isinstance(command, StartDecode):
            life.handoffs_s.append(self.loop.now_s)
        table, computed_tokens = self.pool.table(command.request.id)
        start = StartRequest(
            request=command.request,
            attempt=command.attempt,
            tokens=pack_tokens(life.tokens),
            until=command.until if isinstance(command, StartPrefill) else "end",
            block_table=table,
            computed_tokens=computed_tokens,
        )
        self.routes[command.worker](start)
        self._carry(follow_up)

    def _tell_pool(self, event: PoolEvent) -> None:
        self._carry(self._ask_pool(event))

    def _ask_pool(self, event: PoolEvent) -> list[PoolCommand]:
        commands = self.pool.handle(event)
        if self.journal.keep_log:
            self.journal.log.append(PoolDecision(self.loop.now_s, event, tuple(commands)))
        return commands

    def _carry(self, commands: Sequence[PoolCommand]) -> None:
        for command in commands:
            if isinstance(command, ToWorker):
                if isinstance(command.command, BlocksGranted):
                    self._note_hit(command.command)
                self.routes[command.worker](command.command)
            else:
                self._tell(command)

    def _note_hit(self, granted: BlocksGranted) -> None:
        life = self.journal.lives.get(granted.request_id)
        if life is not None and life.cached_tokens is None:
            life.cached_tokens = granted.cached_blocks * self.pool.block_tokens
