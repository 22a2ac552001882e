"""Drives the coordinator and the host pool in the live server: their events come from HTTP and from the workers.

Everything here runs on one event loop, and no method waits: an event goes in, the commands that follow are carried out
before the next event. So the state machines see the same order of events here as in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, assert_never

import msgspec

from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision
from baton.core.errors import RequestError
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
    RequestFinished,
    RoleSet,
    StartDecode,
    StartPrefill,
    StartRequest,
    StepReport,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.types import HostView, Request, RequestId, Role, Slo, WorkerId, WorkerView, pack_tokens
from baton.engine.card import ModelCard
from baton.kv.host_pool import HostPool
from baton.kv.layout import KVLayout
from baton.link.log_file import LogWriter
from baton.server.clock import now_s
from baton.server.live_request import LiveRequest
from baton.server.port import ClusterStatus, Finish, HostStatus, WorkerStatus
from baton.server.recorder import Recorder


class WorkerLink(Protocol):
    """A worker as the gateway sees it: somebody to send to."""

    view: WorkerView
    state: str
    pid: int

    def send(self, message: StartRequest | StopRequest | BlocksGranted | PreemptRequest) -> None:
        """Pass a message on. To a worker that has died it goes nowhere: its loss is reported on its own."""
        ...


class LiveGateway:
    """Implements `Gateway` over worker processes of one host."""

    def __init__(
        self,
        card: ModelCard,
        coordinator: Coordinator,
        pool: HostPool,
        layout: KVLayout,
        recorder: Recorder,
        *,
        slo: Slo | None,
    ) -> None:
        self.card = card
        self.state = "loading"
        self.policy_names: dict[str, str] = {}
        self.log: LogWriter | None = None
        """Where every decision is written, if anywhere."""
        self._coordinator = coordinator
        self._pool = pool
        self._layout = layout
        self._recorder = recorder
        self._slo = slo
        self._live: dict[RequestId, LiveRequest] = {}
        self._links: dict[WorkerId, WorkerLink] = {}
        self._on_quiet: Callable[[], None] | None = None

    # ---- what HTTP asks (see `Gateway`)

    @property
    def request_tokens_max(self) -> int:
        """See `Gateway.request_tokens_max`."""
        return min(self.card.context_tokens, self._pool.view().blocks_total * self._layout.block_tokens)

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """See `Gateway.submit`."""
        if request.slo is None and self._slo is not None:
            request = msgspec.structs.replace(request, slo=self._slo)
        live = LiveRequest(request, prompt, end=self._end, sent=self._sent)
        if self.state == "stopping":
            why = "the server is shutting down; send the request again to another one, or later"
            live.close(Finish(outcome="rejected", message=why, reject="shutdown", retry_after_s=1.0))
            return live
        self._live[request.id] = live
        self._tell(RequestArrived(request))
        return live

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """See `Gateway.set_role`."""
        link = self._links.get(worker)
        if link is None:
            known = ", ".join(sorted(self._links)) or "none"
            raise RequestError(f"there is no worker {worker!r}; known: {known}", param="id", status=404)
        if link.view.role == role:
            return
        link.view = msgspec.structs.replace(link.view, role=role)
        self._recorder.role_flipped()
        self._tell(RoleSet(worker, role))

    def cluster(self) -> ClusterStatus:
        """See `Gateway.cluster`."""
        host = self._pool.view()
        return ClusterStatus(
            workers=tuple(self._status(link, host.blocks_total) for link in self._links.values()),
            hosts=(
                HostStatus(
                    id=host.id,
                    kv_blocks_total=host.blocks_total,
                    kv_blocks_free=host.blocks_free,
                    kv_blocks_used=host.blocks_used,
                    kv_blocks_cached=host.blocks_cached,
                    kv_block_tokens=self._layout.block_tokens,
                    kv_block_bytes=self._layout.block_bytes,
                ),
            ),
            policy=self.policy_names,
        )

    def views(self) -> tuple[WorkerView, ...]:
        """Describe the load of every worker."""
        return tuple(link.view for link in self._links.values())

    def host_view(self) -> HostView:
        """Count this host's blocks."""
        return self._pool.view()

    def _status(self, link: WorkerLink, blocks_total: int) -> WorkerStatus:
        view = link.view
        return WorkerStatus(
            id=view.id,
            role=view.role,
            pid=link.pid,
            state=link.state,
            running=view.running_requests,
            waiting=view.waiting_requests,
            kv_blocks_used=self._pool.blocks_of(view.id),
            kv_blocks_total=blocks_total,
        )

    # ---- what the supervisor tells

    def add(self, link: WorkerLink) -> None:
        """Know of a worker that is being started."""
        self._links[link.view.id] = link

    def join(self, link: WorkerLink) -> None:
        """A worker is ready for work."""
        self._tell(WorkerJoined(link.view))

    def lose(self, worker: WorkerId, reason: str) -> None:
        """A worker's process is certainly dead. Its requests go on elsewhere."""
        link = self._links[worker]
        link.view = WorkerView(id=worker, host=link.view.host, role=link.view.role)
        lost = WorkerLost(worker, reason)
        self._carry(self._pool.handle(lost))
        self._tell(lost)

    def hear(self, report: StepReport) -> None:
        """Take a worker's report in: tokens to their clients, news to the pool and the coordinator, in that order."""
        moment_s, link = now_s(), self._links[report.worker]
        link.view = msgspec.structs.replace(report.view, role=link.view.role)
        self._recorder.step(report, link.view.role)
        for request_id in report.started:
            self._started(request_id, report.worker, moment_s)
        for token in report.tokens:
            live = self._live.get(token.request_id)
            if live is not None:
                live.push(token, report.worker, moment_s)
        for event in report.events:
            self._carry(self._pool.handle(event))
            match event:
                case RequestFinished(request_id=request_id, reason=reason):
                    if request_id in self._live:
                        self._live[request_id].finish_reason = reason
                    self._tell(event)
                case PrefillFinished():
                    self._tell(event)
                case RequestDropped(preempted=True):
                    self._recorder.preempted()
                case _:
                    pass
        self._tell(WorkerReported(link.view))

    def _started(self, request_id: RequestId, worker: WorkerId, moment_s: float) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        if live.stamps.started_s is None:
            self._recorder.started(live)
        live.stamps.start(worker, moment_s)

    # ---- shutdown

    def stop(self, on_quiet: Callable[[], None]) -> None:
        """Refuse what comes from now on; call back once nothing is running any more."""
        self.state = "stopping"
        self._on_quiet = on_quiet
        self._check_quiet()

    def cancel_all(self) -> None:
        """Give up what is still running."""
        for live in list(self._live.values()):
            live.cancel()

    def check(self) -> None:
        """Assert that no block is lost (INV-2, INV-4)."""
        self._pool.check()

    def _check_quiet(self) -> None:
        if self._on_quiet is not None and not self._live:
            self._on_quiet()

    # ---- state machines and their commands

    def _end(self, live: LiveRequest) -> None:
        if live.request.id in self._live:
            self._tell(RequestCancelled(live.request.id))

    def _sent(self, live: LiveRequest, tokens: int) -> None:
        moment_s = now_s()
        self._recorder.sent(live, tokens, moment_s)
        live.stamps.sent(tokens, moment_s)

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
                    self._links[worker].send(command)
                case ReleaseBlocks():
                    self._carry(self._pool.handle(command))
                case CloseRequest():
                    self._close(command)
                case _:
                    assert_never(command)

    def _start(self, command: StartPrefill | StartDecode) -> None:
        """Hand a request to a worker. Where it has blocks on this host, their ids go along: no byte of KV moves."""
        request, live = command.request, self._live[command.request.id]
        if command.attempt > live.attempt:
            self._recorder.failed_over()
        live.attempt = command.attempt
        follow_up = self._pool.handle(command)
        table, computed_tokens = self._pool.table(request.id)
        message = StartRequest(
            request=request,
            attempt=command.attempt,
            tokens=pack_tokens(live.tokens),
            until=command.until if isinstance(command, StartPrefill) else "end",
            block_table=table,
            computed_tokens=computed_tokens,
        )
        self._links[command.worker].send(message)
        self._carry(follow_up)

    def _carry(self, commands: Iterable[PoolCommand]) -> None:
        for command in commands:
            match command:
                case ToWorker(worker=worker, command=inner):
                    if isinstance(inner, BlocksGranted):
                        self._note_hit(inner)
                    self._links[worker].send(inner)
                case BlocksStored() | BlocksRemoved():
                    self._tell(command)
                case _:
                    assert_never(command)

    def _note_hit(self, granted: BlocksGranted) -> None:
        live = self._live.get(granted.request_id)
        if live is not None and live.stamps.started_s is None and granted.cached_blocks:
            live.stamps.cached_tokens = granted.cached_blocks * self._layout.block_tokens

    def _close(self, command: CloseRequest) -> None:
        live = self._live.pop(command.request_id)
        finish = Finish(
            outcome="finished" if live.stopped and command.outcome == "cancelled" else command.outcome,
            reason="stop" if live.stopped else live.finish_reason,
            message=command.reason,
            reject=command.reject,
            retry_after_s=command.retry_after_s,
        )
        self._recorder.closed(live, command, now_s())
        live.close(finish)
        self._check_quiet()
