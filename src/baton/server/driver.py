"""Drives the coordinator and the host pool in the live server: their events come from HTTP and from the workers.

Everything here runs on one event loop, and no method waits: an event goes in, the commands that follow are carried out
before the next event. So the state machines see the same order of events here as in the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, assert_never

import msgspec

from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision
from baton.core.messages import (
    BlocksGranted,
    BlocksRemoved,
    BlocksStored,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    PoolCommand,
    PreemptRequest,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
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
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.types import Request, RequestId, Role, WorkerId, WorkerView, pack_tokens
from baton.kv.host_pool import HostPool
from baton.kv.layout import KVLayout
from baton.link.log_file import LogWriter
from baton.server.clock import now_s
from baton.server.live_request import LiveRequest
from baton.server.port import Finish
from baton.server.recorder import Recorder

log = logging.getLogger("baton.server")


class WorkerLink(Protocol):
    """A worker as the gateway sees it: somebody to send to."""

    view: WorkerView
    state: str
    pid: int

    def send(self, message: StartRequest | StopRequest | BlocksGranted | PreemptRequest) -> None:
        """Pass a message on. To a worker that has died it goes nowhere: its loss is reported on its own."""
        ...


class Driver:
    """The state machines of one host with everything that is alive around them."""

    def __init__(self, coordinator: Coordinator, pool: HostPool, layout: KVLayout, recorder: Recorder) -> None:
        self.pool = pool
        self.layout = layout
        self.live: dict[RequestId, LiveRequest] = {}
        self.links: dict[WorkerId, WorkerLink] = {}
        self.log: LogWriter | None = None
        """Where every decision is written, if anywhere."""
        self.on_close: Callable[[], None] | None = None
        """Called after each request that has ended."""
        self._coordinator = coordinator
        self._recorder = recorder

    # ---- requests

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """Let a request arrive."""
        live = LiveRequest(request, prompt, end=self._end, sent=self._sent)
        self.live[request.id] = live
        self._tell(RequestArrived(request))
        return live

    def refuse(self, request: Request, prompt: Sequence[int], close: CloseRequest) -> LiveRequest:
        """Close a request that the coordinator is not to see."""
        live = LiveRequest(request, prompt, end=self._end, sent=self._sent)
        self.live[request.id] = live
        self._close(close)
        return live

    def set_role(self, link: WorkerLink, role: Role) -> None:
        """Change a worker's role: from the next request on."""
        self._flip(link, role)
        self._tell(RoleSet(link.view.id, role))

    def _flip(self, link: WorkerLink, role: Role) -> None:
        link.view = msgspec.structs.replace(link.view, role=role)
        self._recorder.role_flipped()

    def resize(self, command: StartWorker | RetireWorker) -> None:
        """A scaling policy asks for a worker more, or less, which this server cannot give yet: it says so once each."""
        log.warning("scaling asks for %s; `baton serve` keeps its workers: start it with more of them", command)

    # ---- workers: what the supervisor tells

    def add(self, link: WorkerLink) -> None:
        """Know of a worker that is being started."""
        self.links[link.view.id] = link

    def join(self, link: WorkerLink) -> None:
        """A worker is ready for work."""
        self._tell(WorkerJoined(link.view))

    def lose(self, worker: WorkerId, reason: str) -> None:
        """A worker's process is certainly dead. Its requests go on elsewhere."""
        link = self.links[worker]
        link.view = WorkerView(id=worker, host=link.view.host, role=link.view.role)
        lost = WorkerLost(worker, reason)
        self._carry(self.pool.handle(lost))
        self._tell(lost)

    def hear(self, report: StepReport) -> None:
        """Take a worker's report in: tokens to their clients, news to the pool and the coordinator, in that order."""
        moment_s, link = now_s(), self.links[report.worker]
        link.view = msgspec.structs.replace(report.view, role=link.view.role)
        self._recorder.step(report, link.view.role)
        for request_id in report.started:
            self._started(request_id, report.worker, moment_s)
        for token in report.tokens:
            live = self.live.get(token.request_id)
            if live is not None:
                live.push(token, report.worker, moment_s)
        for event in report.events:
            self._carry(self.pool.handle(event))
            match event:
                case RequestFinished(request_id=request_id, reason=reason):
                    if request_id in self.live:
                        self.live[request_id].finish_reason = reason
                    self._tell(event)
                case PrefillFinished() | RequestFailed():
                    self._tell(event)
                case RequestDropped(preempted=True):
                    self._recorder.preempted()
                case _:
                    pass
        self._tell(WorkerReported(link.view))

    def _started(self, request_id: RequestId, worker: WorkerId, moment_s: float) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        if live.stamps.started_s is None:
            self._recorder.started(live)
        live.stamps.start(worker, moment_s)

    # ---- state machines and their commands

    def _end(self, live: LiveRequest) -> None:
        if live.request.id in self.live:
            self._tell(RequestCancelled(live.request.id))

    def _sent(self, live: LiveRequest, tokens: int) -> None:
        moment_s = now_s()
        self._recorder.sent(live, tokens, moment_s)
        live.stamps.sent(tokens, moment_s)
        if live.is_taken and live.finish is not None and live.finish.outcome == "finished":
            self._recorder.delivered(live)

    def _tell(self, event: CoordinatorEvent) -> None:
        moment_s = now_s()
        commands = self._coordinator.handle(event, moment_s)
        if self.log is not None:
            self.log.append(Decision(moment_s, event, tuple(commands)))
        self._execute(commands)

    def _execute(self, commands: Iterable[CoordinatorCommand]) -> None:
        for command in commands:
            match command:
                case StartPrefill() | StartDecode():
                    self._start(command)
                case StopRequest(worker=worker):
                    self.links[worker].send(command)
                case ReleaseBlocks():
                    self._carry(self.pool.handle(command))
                case CloseRequest():
                    self._close(command)
                case SetRole(worker=worker, role=role):
                    self._flip(self.links[worker], role)
                case StartWorker() | RetireWorker():
                    self.resize(command)
                case _:
                    assert_never(command)

    def _start(self, command: StartPrefill | StartDecode) -> None:
        """Hand a request to a worker. Where it has blocks on this host, their ids go along: no byte of KV moves."""
        request, live = command.request, self.live[command.request.id]
        if command.attempt > live.attempt:
            self._recorder.failed_over()
        live.attempt = command.attempt
        follow_up = self.pool.handle(command)
        table, computed_tokens = self.pool.table(request.id)
        message = StartRequest(
            request=request,
            attempt=command.attempt,
            tokens=pack_tokens(live.tokens),
            until=command.until if isinstance(command, StartPrefill) else "end",
            block_table=table,
            computed_tokens=computed_tokens,
        )
        self.links[command.worker].send(message)
        self._carry(follow_up)

    def _carry(self, commands: Iterable[PoolCommand]) -> None:
        for command in commands:
            match command:
                case ToWorker(worker=worker, command=inner):
                    if isinstance(inner, BlocksGranted):
                        self._note_hit(inner)
                    self.links[worker].send(inner)
                case BlocksStored() | BlocksRemoved():
                    self._tell(command)
                case _:
                    assert_never(command)

    def _note_hit(self, granted: BlocksGranted) -> None:
        live = self.live.get(granted.request_id)
        if live is not None and live.stamps.started_s is None and granted.cached_blocks:
            live.stamps.cached_tokens = granted.cached_blocks * self.layout.block_tokens

    def _close(self, command: CloseRequest) -> None:
        live = self.live.pop(command.request_id)
        finish = Finish(
            outcome="finished" if live.stopped and command.outcome == "cancelled" else command.outcome,
            reason="stop" if live.stopped else live.finish_reason,
            message=command.reason,
            reject=command.reject,
            retry_after_s=command.retry_after_s,
        )
        live.close(finish)
        self._recorder.closed(finish)
        if self.on_close is not None:
            self.on_close()
