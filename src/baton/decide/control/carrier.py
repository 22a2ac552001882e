"""Carries events and commands between the coordinator, the host pools, the workers and the wires between hosts.

The live server and the simulator both drive this object: what differs between them stands behind `Outside`. It decides
nothing; it keeps the order. A pool hears of an assignment before the worker does, and of what a worker has said before
the coordinator does; everything that follows from an event is carried out before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from baton.core.copies import CopyBlocks, LandingGranted, LandingRefused, LayersDone
from baton.core.keeping import DropBlocks, LoadBlocks, PutEnded, ReadBackWanted, StoreBlocks
from baton.core.messages import (
    AheadEnded,
    BlocksSealed,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    DecodeBegun,
    HostLost,
    PoolCommand,
    PoolEvent,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    RetireWorker,
    RoleSet,
    SendAhead,
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
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.ticking import Tick, WaitedTooLong
from baton.core.types import HostId, LoadWindow, Request, RequestId, TokenBytes, WorkerId, WorkerView
from baton.core.ways import WayChosen
from baton.decide.control.central import Central, PoolDesk
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.crossings import Crossings, Desk
from baton.decide.control.decision_log import Decision, PoolDecision, decided
from baton.decide.control.handoffs import Move, Start
from baton.decide.control.keeping import Keeping
from baton.decide.control.outside import Outside
from baton.decide.control.survey import Survey
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout

_ENDS = (PrefillFinished, RequestFinished)
"""Who says this goes on elsewhere, or not at all."""


class Carrier:
    """The machines of one cluster, wired together. Calls must not be nested, except through `Outside.close`."""

    def __init__(self, coordinator: Coordinator, outside: Outside) -> None:
        self.coordinator = coordinator
        self.pools: dict[HostId, HostPool] = {}
        self.log: Callable[[Decision | PoolDecision], None] | None = None
        """Called with every decision of the coordinator and of a pool."""
        self._outside = outside
        self.hosts: dict[WorkerId, HostId] = {}
        """Where each worker that has joined runs."""
        self._homes: dict[RequestId, set[HostId]] = {}
        """Hosts whose pool knows the request."""
        self._now_s = 0.0
        desk = Desk(
            tell=self._tell,
            tell_pool=self._tell_pool,
            begin=self._begin,
            copy=self._copy,
            read_ahead=lambda move, landed: self.central.read_over(move, landed=landed),
        )
        self._crossings = Crossings(desk, self.pools, self._homes)
        self.survey = Survey(pools=self.pools, cost=coordinator.policies.cost, now_s=lambda: self._now_s)
        """What every way is measured to take."""
        self.central = Central(
            PoolDesk(
                crossings=self._crossings,
                ask=self._ask,
                tell_pool=self._tell_pool,
                begin=self._begin_with_tiers,
                place=self._place,
                hosts=self.hosts,
                survey=self.survey,
            )
        )
        """Handoffs by a pool that hosts share."""
        self.keeping = Keeping(
            cost=coordinator.policies.cost,
            crossings=self._crossings,
            tell_pool=self._tell_pool,
            outside=outside,
            surveyor=self.survey,
            written=self.central.kept,
            at=self._at,
        )
        """What stores answer goes there."""

    @property
    def handoffs(self) -> tuple[Move, ...]:
        """Handoffs between hosts that are under way."""
        return tuple(self._crossings.handoffs)

    # ---- what clients and operators do

    def arrive(self, request: Request, now_s: float) -> None:
        self._now_s = now_s
        self._tell(RequestArrived(request, self.keeping.reach(request)))

    def cancel(self, request_id: RequestId, now_s: float) -> None:
        self._now_s = now_s
        self._tell(RequestCancelled(request_id))

    def tell(self, event: RoleSet | WaitedTooLong, now_s: float) -> None:
        """Pass on what an operator has done, or a timer has found."""
        self._now_s = now_s
        self._tell(event)

    def tick(self, window: LoadWindow, now_s: float) -> None:
        self._now_s = now_s
        self._tell(Tick(window))

    # ---- what happens to hosts and workers

    def add_host(self, pool: HostPool, layout: KVLayout) -> None:
        """Know of a host's arena, and of how KV lies there. Its workers may join from now on."""
        self.pools[pool.host] = pool
        self._crossings.layering.layouts[pool.host] = layout

    def join(self, view: WorkerView, now_s: float) -> None:
        self._now_s = now_s
        self.hosts[view.id] = view.host
        self.keeping.kinds[view.id] = view.kind
        self.survey.joined(view)
        self._tell(WorkerJoined(view))

    def lose(self, worker: WorkerId, reason: str, now_s: float) -> None:
        """A worker's process is certainly dead: first its pool hears of it, then the coordinator.

        Also of one that scaling has asked for, and that will not come.
        """
        self._now_s = now_s
        lost = WorkerLost(worker, reason)
        host = self.hosts.pop(worker, None)
        self.keeping.kinds.pop(worker, None)
        if host is not None:
            self._tell_pool(host, lost)
        self._crossings.layering.lose(worker)
        self._tell(lost)

    def lose_host(self, host: HostId, reason: str, now_s: float) -> None:
        """A host is gone with its KV and its workers. Their requests go on elsewhere, from their tokens."""
        self._now_s = now_s
        pool = self.pools.pop(host, None)
        if pool is not None and pool.tiers is not None:
            pool.tiers.abandon()
        given_up = self._crossings.handoffs.lose_host(host)
        self.survey.lose_host(host)
        for homes in self._homes.values():
            homes.discard(host)
        for worker in [worker for worker, where in self.hosts.items() if where == host]:
            del self.hosts[worker]
            self.keeping.kinds.pop(worker, None)
        self._crossings.layering.lose(host)
        self._crossings.layering.layouts.pop(host, None)
        self._tell(HostLost(host, reason))
        for ahead in given_up:
            if ahead.report:  # otherwise the request counts as one that is about to move until it ends
                self._tell(AheadEnded(ahead.request.id, ahead.attempt, landed=False))
        self.central.lose_host(host)

    def hear(self, report: StepReport | LayersDone, now_s: float) -> None:
        """Take a worker's news, in their order, then its load. Its tokens are the caller's, before this."""
        self._now_s = now_s
        host, layering = self.hosts.get(report.worker), self._crossings.layering
        if not isinstance(report, StepReport):
            if host is not None:
                layering.told(host, report)
            return
        if report.tokens:
            self._note_first_tokens(report)
        for event in report.events:
            if host is not None:
                if isinstance(event, PrefillFinished):
                    layering.computed(host, event)
                self._tell_pool(host, event)
            match event:
                case PrefillFinished(request_id=request_id):
                    self._tell(event)
                    layering.settle(request_id)
                case RequestFinished() | RequestFailed() | RequestDropped(preempted=False):
                    self._tell(event)
                case BlocksSealed(request_id=request_id):
                    self._crossings.sealed(request_id)
                    self.central.sealed(request_id)
                case _:
                    pass
        if report.is_load_new:
            self._tell(WorkerReported(report.view))

    def _note_first_tokens(self, report: StepReport) -> None:
        """Tell of those that have begun to decode and stay where they are."""
        begun = [token for token in report.tokens if token.index == 0]
        if begun:
            gone = {event.request_id for event in report.events if isinstance(event, _ENDS)}
            for token in begun:
                if token.request_id not in gone:
                    self._tell(DecodeBegun(token.request_id, token.attempt, report.worker))

    def copied(self, copy: CopyBlocks, *, landed: bool, now_s: float) -> None:
        """A copy is over: nothing reads its source or writes its target any more."""
        self._now_s = now_s
        self.survey.ended(copy, landed=landed)
        self._crossings.ended(copy, blocks=len(copy.write) if landed else 0)

    # ---- events in, commands out

    def _at(self, now_s: float) -> None:
        self._now_s = now_s

    def _tell(self, event: CoordinatorEvent) -> None:
        for command in self._ask(event):
            self._execute(command)

    def _ask(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        commands = self.coordinator.handle(event, self._now_s)
        if self.log is not None:
            self.log(decided(self._now_s, event, commands))
        return commands

    def _execute(self, command: CoordinatorCommand) -> None:
        match command:
            case StartPrefill() | StartDecode():
                self._start(command)
            case ReleaseBlocks(request_id=request_id):
                self._release(request_id)
            case CloseRequest():
                self._outside.close(command)
            case SendAhead():
                self._send_ahead(command)
            case StopRequest():
                self._stop(command)
            case SetRole() | StartWorker() | RetireWorker():
                self._outside.reshape(command)
            case WayChosen():
                pass  # whoever has asked takes it
            case _:
                assert_never(command)

    def _tell_pool(self, host: HostId, event: PoolEvent) -> None:
        commands = self._ask_pool(host, event)
        if commands:
            self._carry(host, commands)

    def _ask_pool(self, host: HostId, event: PoolEvent) -> list[PoolCommand]:
        commands = self.pools[host].handle(event)
        if self.log is not None:
            self.log(PoolDecision(self._now_s, host, event, tuple(commands)))
        return commands

    def _carry(self, host: HostId, commands: Iterable[PoolCommand]) -> None:
        for command in commands:
            match command:
                case ToWorker(worker=worker, command=inner):
                    self._outside.send(worker, inner)
                case BlocksStored() | BlocksRemoved():
                    self._tell(command)
                case LandingGranted():
                    self._crossings.granted(host, command)
                case LandingRefused(request_id=request_id):
                    self._crossings.refused(host, request_id)
                case StoreBlocks() | DropBlocks() | LoadBlocks() | ReadBackWanted():
                    self.keeping.keep(command)
                case PutEnded():
                    self.central.put_ended(command)
                case _:
                    assert_never(command)

    def _release(self, request_id: RequestId) -> None:
        """The request is over: tell every host that knows it, and wait for no handoff of it."""
        handoffs = self._crossings.handoffs
        if not handoffs.is_empty:
            handoffs.ahead.pop(request_id, None)
            self._crossings.layering.call_off(request_id)
        self.central.forget(request_id)
        move = handoffs.find(request_id)
        if move is not None:
            handoffs.stop(move)
        for host in sorted(self._homes.pop(request_id, ())):
            self._tell_pool(host, ReleaseBlocks(request_id))

    # ---- a request starts on a worker, with its KV or without

    def _start(self, command: Start) -> None:
        """Start a request where it is told to, after its KV has come over from where it is, if it is elsewhere."""
        tokens_so_far = self._outside.assign(command)
        request_id, target = command.request.id, self.hosts[command.worker]
        self._homes.setdefault(request_id, set())
        self.central.forget(request_id)  # of an attempt that was given up
        if not self._crossings.redirect(command, target, tokens_so_far):
            self._place(command, tokens_so_far)

    def _place(self, command: Start, tokens_so_far: TokenBytes) -> None:
        """Start a request that nothing is on its way for. Called again where it first waits for what is read there."""
        request_id, target = command.request.id, self.hosts.get(command.worker)
        if target is None:
            return  # it died while the request waited: the coordinator has been told
        if self.central.hold(command, tokens_so_far, target):
            return
        homes, crossings = self._homes[request_id], self._crossings
        source = command.fetch if isinstance(command, StartPrefill) else crossings.best_source(command, target)
        homes.add(target)
        if self.keeping.read(command, tokens_so_far, target=target, source=source):
            return
        tokens = crossings.tokens_at(source, command) if source != target else 0
        if source is None or tokens == 0:
            self._begin(command, tokens_so_far)
            return
        if isinstance(command, StartDecode) and self.central.take(command, tokens_so_far, source=source, target=target):
            return
        homes.add(source)
        crossings.fetch(command, tokens_so_far, source=source, target=target, tokens=tokens)

    def _begin_with_tiers(self, command: Start, tokens_so_far: TokenBytes, target: HostId) -> None:
        """Start a request with what the tiers of its host have of it, where that pays."""
        if not self.keeping.read(command, tokens_so_far, target=target, source=None):
            self._begin(command, tokens_so_far)

    def _copy(self, copy: CopyBlocks) -> None:
        self.survey.begun(copy)
        self._outside.copy(copy)

    def _begin(self, command: Start, tokens_so_far: TokenBytes) -> None:
        """Give the request's blocks to the worker and tell it so, before anything else that follows from it."""
        host = self.hosts.get(command.worker)
        if host is None:
            return  # it died while the KV was on its way: the coordinator has been told
        self._leave_others(command.request.id, host)
        follow_up = self._ask_pool(host, command)
        table, computed_tokens = self.pools[host].table(command.request.id)
        start = StartRequest(
            request=command.request,
            attempt=command.attempt,
            tokens=tokens_so_far,
            until=command.until if isinstance(command, StartPrefill) else "end",
            block_table=table,
            computed_tokens=computed_tokens,
            layer_groups=self._groups(command, host),
        )
        self._outside.send(command.worker, start)
        self._carry(host, follow_up)

    def _groups(self, command: Start, host: HostId) -> int:
        if isinstance(command, StartDecode) or command.layer_groups == 1:
            return 1
        return self._crossings.layering.groups(host, command.layer_groups)

    def _leave_others(self, request_id: RequestId, host: HostId) -> None:
        """The request goes on here: nobody will go on with what it holds on other hosts."""
        homes = self._homes[request_id]
        for home in sorted(homes - {host}) if homes != {host} else ():
            homes.discard(home)
            self._tell_pool(home, ReleaseBlocks(request_id))

    def _send_ahead(self, command: SendAhead) -> None:
        """Send a request's blocks ahead, from where it runs now."""
        target = self.hosts[command.worker]
        if command.source == target:
            return
        if command.report or not self.central.send_ahead(command, target):
            self._crossings.send_ahead(command, target)

    def _stop(self, command: StopRequest) -> None:
        """Stop a request on its worker, or on its way there."""
        request_id = command.request_id
        waiting = self.central.find(request_id)
        if waiting is not None and waiting.attempt == command.attempt:
            self.central.forget(request_id)
            self._tell(RequestDropped(request_id, command.attempt, command.worker, preempted=False))
            return
        move = self._crossings.handoffs.find(request_id)
        if move is None or move.start is None or move.start.attempt != command.attempt:
            self._outside.send(command.worker, command)
            return
        self._crossings.give_up(move)
        self._tell(RequestDropped(command.request_id, command.attempt, command.worker, preempted=False))
