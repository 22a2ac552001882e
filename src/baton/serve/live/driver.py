"""The live driver: pass events of HTTP, workers, movers and stores to the cluster, and perform its commands.

All methods run on one event loop, and none waits. `tell` passes an event to the cluster, logs the decisions, and
performs the commands before it takes the next event. The simulator processes events in the same order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from typing import assert_never

import msgspec

from baton.core.copies import CopyBlocks, CopyEnded, LayersDone
from baton.core.leaving import DismissHost, RestartWorker
from baton.core.messages import (
    BatcherEvent,
    BlocksGranted,
    CloseRequest,
    HostLost,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    RetireWorker,
    RoleSet,
    SetRole,
    StartDecode,
    StartPrefill,
    StartRequest,
    StartWorker,
    StepReport,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ticking import Tick
from baton.core.tier_messages import DropBlocks, LoadBlocks, StoreBlocks
from baton.core.types import HostId, Request, RequestId, Role, WorkerId, WorkerView, pack_tokens
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import (
    BeginRequest,
    ClusterCommand,
    ClusterEvent,
    HostAdded,
    strip_tokens,
)
from baton.decide.control.decision_log import decided
from baton.decide.control.load_meter import LoadMeter
from baton.decide.control.turn_queue import TokenCount
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout
from baton.move.clock import now_s
from baton.serve.host.worker_link import WorkerLink
from baton.serve.live.copying import CopyEnd, Copying
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.log_thread import LogThread
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recent import HostCopies
from baton.serve.live.recorder import Recorder
from baton.serve.live.tiers import LiveTiers
from baton.serve.live.waiting import Arrivals, Waits, WaitTimers

log = logging.getLogger("baton.server")


class Driver:
    """Feeds events to the cluster and performs its commands, for all workers and live requests."""

    def __init__(
        self,
        cluster: Cluster,
        layout: KVLayout,
        metrics: Metrics,
        *,
        waits: Waits,
        copy_s: float,
        log_writer: LogThread | None = None,
    ) -> None:
        """`copy_s`: deadline of a copy between hosts, in seconds. `log_writer`: decision log, or None for no log."""
        self.cluster = cluster
        self.layout = layout
        """KV layout of the server's own host."""
        self.log = log_writer
        self.live: dict[RequestId, LiveRequest] = {}
        self.links: dict[WorkerId, WorkerLink] = {}
        self.layouts: dict[HostId, KVLayout] = {}
        """KV layout of each host."""
        self.role_reasons: dict[WorkerId, str] = {}
        """Why a policy last changed the role of each worker. Empty: an operator changed it."""
        self.quiet = asyncio.Event()
        """Set while no request is live."""
        self.quiet.set()
        self.arrivals = Arrivals()
        self.copying = Copying(copy_s=copy_s, now_s=now_s, later=_later, ended=self._copied)
        self.tiers = LiveTiers(metrics, self)
        self.wait_timers = WaitTimers(self, waits)
        self.recorder = Recorder(metrics)
        self._meter = LoadMeter(taken_s=now_s())
        self._served = TokenCount(cluster.coordinator.turns.is_used)
        self._failures = {""}
        """Failures of policies that were logged last, so that each is logged once."""
        self.resizes: asyncio.Queue[StartWorker | RetireWorker | RestartWorker | DismissHost] = asyncio.Queue()
        """Decisions to start, end and restart workers, and to disconnect hosts. The service carries them out."""

    @property
    def pools(self) -> dict[HostId, HostPool]:
        return self.cluster.pools

    def tell(self, event: ClusterEvent) -> None:
        """Pass an event to the cluster, log the decisions, and perform the commands."""
        served = self._served.take()
        for each in (event,) if served is None else (served, event):
            self._decide(each)
        self.wait_timers.set_queue_timer()

    def _decide(self, event: ClusterEvent) -> None:
        moment_s = now_s()
        commands = self.cluster.handle(event, moment_s)
        if self.log is not None:
            is_logged = not self.log.full and self.log.append(decided(moment_s, event, self.cluster.decided))
            if not is_logged:
                self.recorder.note("unlogged_decisions")
        for command in commands:
            self._perform(command)

    # ---- requests

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """Submit a request. Return its live state, which receives tokens and the result."""
        live = self.live[request.id] = LiveRequest(request, prompt)
        self.quiet.clear()
        self._meter.arrived(request)
        self.tell(RequestArrived(request))
        self.wait_timers.reset_timer()
        return live

    def set_role(self, link: WorkerLink, role: Role) -> None:
        """Change a worker's role, which applies from the next request on."""
        self._flip(link, role, "")
        self.tell(RoleSet(link.view.id, role))

    def tick(self) -> None:
        """Run the policies for roles, scaling and moves, if anything can change the fleet. Log failures of policies."""
        coordinator, window = self.cluster.coordinator, self._meter.take(now_s())
        if coordinator.needs_ticks:  # `take` above always starts a new window, else the next one would cover hours
            self.tell(Tick(window))
        order, fleet = coordinator.turns.failure, coordinator.reshaping.failure
        if order not in self._failures:
            log.error("%s; where it fails, priority and arrival decide the order", order)
        if fleet not in self._failures:
            log.error("%s; the fleet keeps its workers and their roles", fleet)
        self._failures = {order, fleet}

    # ---- workers and hosts

    def join(self, link: WorkerLink) -> None:
        """Add a worker that is ready for requests."""
        self.tell(WorkerJoined(link.view))

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Remove a worker whose process is dead or will never start. Its requests continue on other workers."""
        link = self.links.get(worker)
        if link is not None:
            link.view = WorkerView(id=worker, host=link.view.host, role=link.view.role, kind=link.view.kind)
        self._detach_requests({worker})
        self.tell(WorkerLost(worker, reason))
        self.wait_timers.reset_timer()

    def add_host(self, added: HostAdded) -> None:
        """Add a host. Its workers may join from now on."""
        self.layouts[added.host] = added.layout
        self.tell(added)

    def lose_host(self, host: HostId, reason: str) -> None:
        """Remove a lost host, with its KV and workers. Their requests continue on other hosts."""
        lost = {worker for worker, link in self.links.items() if link.view.host == host}
        for worker in lost:
            del self.links[worker]
        self._detach_requests(lost)
        self.tell(HostLost(host, reason))
        self.layouts.pop(host, None)
        self.wait_timers.reset_timer()

    def _detach_requests(self, workers: Set[WorkerId]) -> None:
        """Detach requests from lost workers: a new process under the same name does not know them."""
        for live in self.live.values():
            if live.worker in workers:
                live.worker = None

    def _copied(self, copy: CopyBlocks, end: CopyEnd) -> None:
        """Handle the end of a copy between two hosts: record it, and pass it to the cluster."""
        if end.landed:
            live, overlap_s = self.live.get(copy.request_id), 0.0
            if live is not None:
                overlap_s = live.stamps.copied(end.took_s, now_s())
                live.stamps.kv_loss = end.loss or live.stamps.kv_loss
            copied = HostCopies(end.moved_bytes, end.took_s, overlap_s)
            self.recorder.copied((copy.source, copy.target), copied, is_by_layer=copy.layers is not None)
        else:
            log.warning("%s -> %s, KV of %s: %s", copy.source, copy.target, copy.request_id, end.error)
        self.tell(CopyEnded(copy.request_id, copy.number, end.landed))

    def apply_report(self, report: StepReport | LayersDone) -> None:
        """Process a worker's report: pass tokens to their requests, then events to the cluster."""
        if isinstance(report, LayersDone):
            self.tell(report)
            return
        moment_s, link = now_s(), self.links[report.worker]
        link.view = msgspec.structs.replace(report.view, role=link.view.role, kind=link.view.kind)
        self.recorder.step(report, link.view.role)
        for request_id in report.started:
            self._started(request_id, report.worker, moment_s - report.step_s)
        for token in report.tokens:
            live = self.live.get(token.request_id)
            if live is None or not live.push(token, report.worker, moment_s, report.step_s):
                continue
            self._served.add(token.request_id)
            if token.index == 0:
                self._meter.prefilled(moment_s - live.request.arrived_at_s)
        for event in report.events:
            self._note(event)
        said = strip_tokens(report, link.view)
        if said is not None:
            self.tell(said)

    def _note(self, event: BatcherEvent) -> None:
        match event:
            case RequestFinished(request_id=request_id, reason=reason):
                if request_id in self.live:
                    self.live[request_id].finish_reason = reason
            case RequestDropped(request_id=request_id, preempted=True):
                self.recorder.note("preemptions")
                if request_id in self.live:
                    self.live[request_id].stamps.preemptions += 1
            case _:
                pass

    def _started(self, request_id: RequestId, worker: WorkerId, moment_s: float) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        if live.stamps.started_s is None:
            self.recorder.started(live, self.links[worker].view.kind)
        live.stamps.start(worker, moment_s)

    # ---- commands of the cluster

    def _perform(self, command: ClusterCommand) -> None:
        match command:
            case ToWorker():
                self._send(command)
            case BeginRequest():
                self._begin(command)
            case StartPrefill() | StartDecode():
                self._assign(command)
            case CloseRequest():
                self._close(command)
            case CopyBlocks():
                self.copying.begin(command)
            case StoreBlocks() | LoadBlocks() | DropBlocks():
                self.tiers.perform(command)
            case SetRole(worker=worker, role=role, reason=reason):
                log.info("%s changes from %s to %s: %s", worker, self.links[worker].view.role, role, reason)
                self._flip(self.links[worker], role, reason)
            case StartWorker() | RetireWorker() | RestartWorker() | DismissHost():
                self.resizes.put_nowait(command)
            case _:
                assert_never(command)

    def _send(self, to: ToWorker) -> None:
        """Send a command to its worker. If the worker is lost, drop it: WorkerLost handles its requests."""
        link = self.links.get(to.worker)
        if link is None:
            return
        if isinstance(to.command, BlocksGranted):
            cached_tokens = to.command.cached_blocks * self.layouts[link.view.host].block_tokens
            self._note_hit(to.command.request_id, cached_tokens, is_granted=True)
        link.send(to.command)

    def _begin(self, begin: BeginRequest) -> None:
        """Send a request to its worker, with the prompt and the output tokens so far."""
        link, live = self.links.get(begin.worker), self.live.get(begin.request_id)
        if link is None or live is None:
            return
        self._note_hit(begin.request_id, begin.computed_tokens, is_granted=bool(begin.block_table))
        link.view = _given(link.view, begin)
        start = StartRequest(
            request=live.request,
            attempt=begin.attempt,
            tokens=pack_tokens(live.tokens),
            until=begin.until,
            block_table=begin.block_table,
            computed_tokens=begin.computed_tokens,
            layer_groups=begin.layer_groups,
        )
        link.send(start)

    def _assign(self, start: StartPrefill | StartDecode) -> None:
        """Set the worker and the attempt of a request. Tokens of earlier attempts are dropped from now on."""
        live = self.live[start.request.id]
        if start.attempt > live.attempt and self._has_moved(live):
            live.stamps.moves += 1
            self.recorder.note("moves")
        elif start.attempt > live.attempt:
            self.recorder.note("failovers")
            live.lost_worker = live.stamps.started_s is not None
        if isinstance(start, StartDecode) and not live.output_tokens:
            live.stamps.leave(live.worker, now_s())
        if isinstance(start, StartPrefill) and start.predicted is not None and start.attempt == 1:
            live.predicted = start.predicted
        live.request, live.attempt, live.worker = start.request, start.attempt, start.worker

    def _close(self, command: CloseRequest) -> None:
        """Give the request its result, and wake its reader."""
        live = self.live.pop(command.request_id)
        finish = Finish(
            outcome="finished" if live.stopped and command.outcome == "cancelled" else command.outcome,
            reason="stop" if live.stopped else live.finish_reason,
            message=command.reason,
            reject=command.reject,
            retry_after_s=command.retry_after_s,
            is_final=live.was_cancelled_by_operator,
        )
        live.close(finish)
        first_s = live.stamps.prefilled_s
        decode_s = now_s() - first_s if first_s is not None else 0.0
        self._meter.closed(finish.outcome, output_tokens=live.output_tokens, decode_s=decode_s)
        self.recorder.closed(live, finish)
        if not self.live:
            self.quiet.set()

    def _flip(self, link: WorkerLink, role: Role, reason: str) -> None:
        link.view = msgspec.structs.replace(link.view, role=role)
        reasons = {worker: said for worker, said in self.role_reasons.items() if worker in self.links}
        self.role_reasons = {**reasons, link.view.id: reason}
        self.recorder.note("role_flips")

    def _note_hit(self, request_id: RequestId, cached_tokens: int, *, is_granted: bool) -> None:
        """Record how many tokens were cached or copied when the first worker began, or one after the loss of another.

        `is_granted`: the worker has blocks.
        """
        live = self.live.get(request_id)
        if live is None:
            return
        if live.stamps.started_s is None and cached_tokens:
            live.stamps.cached_tokens = cached_tokens
        if live.lost_worker and is_granted:
            live.lost_worker = False
            self.recorder.failed_over(live, cached_tokens)

    def _has_moved(self, live: LiveRequest) -> bool:
        """Return whether the request left a live worker. After a failover, its old worker would not be ready."""
        link = self.links.get(live.worker) if live.worker is not None else None
        return link is not None and link.state == "ready"

    # ---- clients

    def cancel(self, live: LiveRequest) -> None:
        """Cancel a request. Does nothing if it has ended."""
        if live.request.id in self.live:
            self.tell(RequestCancelled(live.request.id))


def _given(view: WorkerView, begin: BeginRequest) -> WorkerView:
    """Return the worker's view with one more request, which only the worker's next report will include."""
    if begin.block_table:
        return msgspec.structs.replace(view, running_requests=view.running_requests + 1)
    return msgspec.structs.replace(view, waiting_requests=view.waiting_requests + 1)


def _later(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call)
