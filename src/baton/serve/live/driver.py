"""Drives the carrier in the live server: its events come from HTTP and from the workers.

Everything here runs on one event loop, and no method waits: an event goes in, the commands that follow are carried out
before the next event. So the state machines see the same order of events here as in the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

import msgspec

from baton.core.copies import CopyBlocks, LayersDone
from baton.core.messages import (
    BatcherEvent,
    RequestDropped,
    RequestFinished,
    RoleSet,
    StepReport,
)
from baton.core.types import HostId, Request, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.carrier import Carrier
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.decision_log import Decision, PoolDecision
from baton.decide.control.keeping import Keeping
from baton.decide.control.load_meter import LoadMeter
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout
from baton.move.clock import now_s
from baton.serve.host.worker_link import WorkerLink
from baton.serve.live.copying import CopyEnd
from baton.serve.live.live_request import LiveRequest
from baton.serve.live.log_file import LogWriter
from baton.serve.live.outside import LiveOutside
from baton.serve.live.recorder import Recorder
from baton.serve.live.waiting import RoomWatch

log = logging.getLogger("baton.server")


class Driver:
    """Feeds the carrier of the live server with what clients, operators and workers do."""

    def __init__(
        self, coordinator: Coordinator, layout: KVLayout, recorder: Recorder, *, wait_s: float, start_s: float
    ) -> None:
        """See `RoomWatch` for `wait_s` and `start_s`."""
        self.layout = layout
        """Of the server's own blocks."""
        self._log: LogWriter | None = None
        self.recorder = recorder
        self._meter = LoadMeter(taken_s=now_s())
        self.outside = LiveOutside(recorder, self._meter)
        self.live = self.outside.live
        self.links = self.outside.links
        self._carrier = Carrier(coordinator, self.outside)
        self.room = RoomWatch(self._carrier, self.links, wait_s=wait_s, start_s=start_s)

    @property
    def log(self) -> LogWriter | None:
        """Where every decision of the coordinator is written, if anywhere. Where nowhere, none is put together."""
        return self._log

    @log.setter
    def log(self, log: LogWriter | None) -> None:
        self._log = log
        self._carrier.log = None if log is None else self._write

    @property
    def is_restless(self) -> bool:
        """Some policy wants to be asked at ticks."""
        return self._carrier.coordinator.policies.is_restless

    @property
    def pools(self) -> dict[HostId, HostPool]:
        """The KV blocks of every host, by its name."""
        return self._carrier.pools

    @property
    def keeping(self) -> Keeping:
        """Takes what the stores of tiers answer."""
        return self._carrier.keeping

    # ---- requests

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """Let a request arrive."""
        live = self.live[request.id] = LiveRequest(request, prompt)
        self._meter.arrived(request)
        self._carrier.arrive(request, now_s())
        self.room.look()
        return live

    def set_role(self, link: WorkerLink, role: Role) -> None:
        """Change a worker's role: from the next request on."""
        self.outside.flip(link, role)
        self._carrier.tell(RoleSet(link.view.id, role), now_s())

    def tick(self) -> None:
        """Let roles, scaling and moves be looked at, with what went through since the last time."""
        moment_s = now_s()
        before = self._carrier.coordinator.reshaping_failure
        self._carrier.tick(self._meter.take(moment_s), moment_s)
        failure = self._carrier.coordinator.reshaping_failure
        if failure != before:
            log.error("%s; the shape of the fleet stays as it is", failure)

    # ---- workers: what those who keep them alive tell

    def join(self, link: WorkerLink) -> None:
        """A worker is ready for work."""
        self._carrier.join(link.view, now_s())

    def lose(self, worker: WorkerId, reason: str) -> None:
        """A worker's process is certainly dead, or will never be. Its requests, if any, go on elsewhere."""
        link = self.links.get(worker)
        if link is not None:
            link.view = WorkerView(id=worker, host=link.view.host, role=link.view.role)
        self._orphan({worker})
        self._carrier.lose(worker, reason, now_s())
        self.room.look()

    def add_host(self, pool: HostPool, layout: KVLayout) -> None:
        """Know of a host's arena. Its workers may join from now on."""
        self.outside.layouts[pool.host] = layout
        self._carrier.add_host(pool, layout)

    def lose_host(self, host: HostId, reason: str) -> None:
        """A host is gone, with its KV and its workers. Their requests go on elsewhere."""
        lost = {worker for worker, link in self.links.items() if link.view.host == host}
        for worker in lost:
            del self.links[worker]
        self._orphan(lost)
        self._carrier.lose_host(host, reason, now_s())
        self.outside.layouts.pop(host, None)
        self.room.look()

    def _orphan(self, workers: Set[WorkerId]) -> None:
        """Nobody works on their requests: another process under the same name is not who did."""
        for live in self.live.values():
            if live.worker in workers:
                live.worker = None

    def copied(self, copy: CopyBlocks, end: CopyEnd) -> None:
        """A copy between two hosts is over: nothing reads or writes its blocks any more."""
        if end.landed:
            self.recorder.copied(end.moved_bytes, 0 if copy.layers is None else end.moved_bytes)
            if end.loss and copy.request_id in self.live:
                self.live[copy.request_id].stamps.kv_loss = end.loss
        else:
            log.warning("%s -> %s, KV of %s: %s", copy.source, copy.target, copy.request_id, end.error)
        self._carrier.copied(copy, landed=end.landed, now_s=now_s())

    def hear(self, report: StepReport | LayersDone) -> None:
        """Take a worker's report in: tokens to their clients, news to the pool and the coordinator, in that order."""
        if isinstance(report, LayersDone):
            self._carrier.hear(report, now_s())
            return
        moment_s, link = now_s(), self.links[report.worker]
        link.view = msgspec.structs.replace(report.view, role=link.view.role)
        self.recorder.step(report, link.view.role)
        for request_id in report.started:
            self._started(request_id, report.worker, moment_s - report.step_s)
        for token in report.tokens:
            live = self.live.get(token.request_id)
            if live is None or not live.push(token, report.worker, moment_s, report.step_s):
                continue
            if token.index == 0:
                self._meter.prefilled(moment_s - live.request.arrived_at_s)
        for event in report.events:
            self._note(event)
        self._carrier.hear(msgspec.structs.replace(report, view=link.view), moment_s)

    def _note(self, event: BatcherEvent) -> None:
        match event:
            case RequestFinished(request_id=request_id, reason=reason):
                if request_id in self.live:
                    self.live[request_id].finish_reason = reason
            case RequestDropped(request_id=request_id, preempted=True):
                self.recorder.preempted()
                if request_id in self.live:
                    self.live[request_id].stamps.preemptions += 1
            case _:
                pass

    def _started(self, request_id: RequestId, worker: WorkerId, moment_s: float) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        if live.stamps.started_s is None:
            self.recorder.started(live)
        live.stamps.start(worker, moment_s)

    def _write(self, decision: Decision | PoolDecision) -> None:
        if self._log is not None and isinstance(decision, Decision):
            self._log.append(decision)

    # ---- what clients do

    def cancel(self, live: LiveRequest) -> None:
        """Cancel a request. Does nothing if it has ended."""
        if live.request.id in self.live:
            self._carrier.cancel(live.request.id, now_s())
