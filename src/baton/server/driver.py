"""Drives the carrier in the live server: its events come from HTTP and from the workers.

Everything here runs on one event loop, and no method waits: an event goes in, the commands that follow are carried out
before the next event. So the state machines see the same order of events here as in the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.control.carrier import Carrier
from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision, PoolDecision
from baton.control.load_meter import LoadMeter
from baton.core.messages import (
    BatcherEvent,
    BlocksGranted,
    CloseRequest,
    CopyBlocks,
    RequestDropped,
    RequestFinished,
    RetireWorker,
    SetRole,
    StartDecode,
    StartPrefill,
    StartWorker,
    StepReport,
    WorkerCommand,
)
from baton.core.types import Request, RequestId, Role, TokenBytes, WorkerId, WorkerView, pack_tokens
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

    def send(self, message: WorkerCommand) -> None:
        """Pass a message on. To a worker that has died it goes nowhere: its loss is reported on its own."""
        ...


class Driver:
    """The carrier of the live server, and what is alive around it. Implements `Outside`."""

    def __init__(self, coordinator: Coordinator, pool: HostPool, layout: KVLayout, recorder: Recorder) -> None:
        self.pool = pool
        self.layout = layout
        self.live: dict[RequestId, LiveRequest] = {}
        self.links: dict[WorkerId, WorkerLink] = {}
        self.log: LogWriter | None = None
        """Where every decision of the coordinator is written, if anywhere."""
        self.on_close: Callable[[], None] | None = None
        """Called after each request that has ended."""
        self.on_resize: Callable[[StartWorker | RetireWorker], None] | None = None
        """Called when a scaling policy asks for a worker more or less."""
        self._recorder = recorder
        self._meter = LoadMeter(taken_s=now_s())
        self._carrier = Carrier(coordinator, self)
        self._carrier.log = self._write
        self._carrier.add_host(pool)

    @property
    def is_restless(self) -> bool:
        """Some policy wants to be asked at ticks."""
        return self._carrier.coordinator.policies.is_restless

    # ---- requests

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """Let a request arrive."""
        live = self._open(request, prompt)
        self._meter.arrived(request)
        self._carrier.arrive(request, now_s())
        return live

    def refuse(self, request: Request, prompt: Sequence[int], close: CloseRequest) -> LiveRequest:
        """Close a request that the coordinator is not to see."""
        live = self._open(request, prompt)
        self.close(close)
        return live

    def _open(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        live = self.live[request.id] = LiveRequest(request, prompt, end=self._end, sent=self._sent)
        return live

    def set_role(self, link: WorkerLink, role: Role) -> None:
        """Change a worker's role: from the next request on."""
        self._flip(link, role)
        self._carrier.set_role(link.view.id, role, now_s())

    def tick(self) -> None:
        """Let roles, scaling and moves be looked at, with what went through since the last time."""
        moment_s = now_s()
        before = self._carrier.coordinator.reshaping_failure
        self._carrier.tick(self._meter.take(moment_s), moment_s)
        failure = self._carrier.coordinator.reshaping_failure
        if failure != before:
            log.error("%s; the shape of the fleet stays as it is", failure)

    # ---- workers: what the supervisor tells

    def add(self, link: WorkerLink) -> None:
        """Know of a worker that is being started."""
        self.links[link.view.id] = link

    def join(self, link: WorkerLink) -> None:
        """A worker is ready for work."""
        self._carrier.join(link.view, now_s())

    def lose(self, worker: WorkerId, reason: str) -> None:
        """A worker's process is certainly dead. Its requests go on elsewhere."""
        link = self.links[worker]
        link.view = WorkerView(id=worker, host=link.view.host, role=link.view.role)
        self._carrier.lose(worker, reason, now_s())

    def hear(self, report: StepReport) -> None:
        """Take a worker's report in: tokens to their clients, news to the pool and the coordinator, in that order."""
        moment_s, link = now_s(), self.links[report.worker]
        link.view = msgspec.structs.replace(report.view, role=link.view.role)
        self._recorder.step(report, link.view.role)
        for request_id in report.started:
            self._started(request_id, report.worker, moment_s)
        for token in report.tokens:
            live = self.live.get(token.request_id)
            if live is not None and live.push(token, report.worker, moment_s) and token.index == 0:
                self._meter.prefilled(moment_s - live.request.arrived_at_s)
        for event in report.events:
            self._note(event)
        self._carrier.hear(msgspec.structs.replace(report, view=link.view), moment_s)

    def _note(self, event: BatcherEvent) -> None:
        match event:
            case RequestFinished(request_id=request_id, reason=reason):
                if request_id in self.live:
                    self.live[request_id].finish_reason = reason
            case RequestDropped(preempted=True):
                self._recorder.preempted()
            case _:
                pass

    def _started(self, request_id: RequestId, worker: WorkerId, moment_s: float) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        if live.stamps.started_s is None:
            self._recorder.started(live)
        live.stamps.start(worker, moment_s)

    # ---- what the carrier asks for

    def send(self, worker: WorkerId, command: WorkerCommand) -> None:
        """See `Outside.send`."""
        if isinstance(command, BlocksGranted):
            self._note_hit(command)
        self.links[worker].send(command)

    def copy(self, copy: CopyBlocks) -> None:
        """See `Outside.copy`."""
        raise AssertionError(f"this server has one host, and {copy.request_id} is to be copied to {copy.target}")

    def assign(self, command: StartPrefill | StartDecode) -> TokenBytes:
        """See `Outside.assign`."""
        live = self.live[command.request.id]
        if command.attempt > live.attempt:
            self._recorder.failed_over()
        live.attempt = command.attempt
        return pack_tokens(live.tokens)

    def close(self, command: CloseRequest) -> None:
        """See `Outside.close`."""
        live = self.live.pop(command.request_id)
        finish = Finish(
            outcome="finished" if live.stopped and command.outcome == "cancelled" else command.outcome,
            reason="stop" if live.stopped else live.finish_reason,
            message=command.reason,
            reject=command.reject,
            retry_after_s=command.retry_after_s,
        )
        live.close(finish)
        first_s = live.stamps.prefilled_s
        decode_s = now_s() - first_s if first_s is not None else 0.0
        self._meter.closed(finish.outcome, output_tokens=live.output_tokens, decode_s=decode_s)
        self._recorder.closed(finish)
        if self.on_close is not None:
            self.on_close()

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """See `Outside.reshape`."""
        if isinstance(command, SetRole):
            self._flip(self.links[command.worker], command.role)
        elif self.on_resize is not None:
            self.on_resize(command)

    def _flip(self, link: WorkerLink, role: Role) -> None:
        link.view = msgspec.structs.replace(link.view, role=role)
        self._recorder.role_flipped()

    def _note_hit(self, granted: BlocksGranted) -> None:
        live = self.live.get(granted.request_id)
        if live is not None and live.stamps.started_s is None and granted.cached_blocks:
            live.stamps.cached_tokens = granted.cached_blocks * self.layout.block_tokens

    def _write(self, decision: Decision | PoolDecision) -> None:
        if self.log is not None and isinstance(decision, Decision):
            self.log.append(decision)

    # ---- what clients do

    def _end(self, live: LiveRequest) -> None:
        if live.request.id in self.live:
            self._carrier.cancel(live.request.id, now_s())

    def _sent(self, live: LiveRequest, tokens: int) -> None:
        moment_s = now_s()
        self._recorder.sent(live, tokens, moment_s)
        live.stamps.sent(tokens, moment_s)
        if live.is_taken and live.finish is not None and live.finish.outcome == "finished":
            self._recorder.delivered(live)
