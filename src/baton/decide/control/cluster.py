"""The cluster: the coordinator, and the transfers with the pools of all hosts, as one state machine.

An event from outside is routed to one of these parts, and the commands of that part to others, until none remains.
Each command is carried out with all its consequences before the next one (depth first). So a pool gets an assignment
before the worker does, and a worker's event before the coordinator does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from baton.core.copies import CopyBlocks, CopyEnded, LandingGranted, LandingRefused, LayersDone
from baton.core.handoff_paths import PathChosen
from baton.core.leaving import DismissHost, HostLeaving, RestartWanted, RestartWorker
from baton.core.messages import (
    AheadEnded,
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    DecodeBegun,
    HostLost,
    PoolCommand,
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
    StartWorker,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.prefixes import BlocksRemoved, BlocksStored, EngineCacheChanged
from baton.core.spill import BlocksSpilled
from baton.core.ticking import QueuedTooLong, ScaleWanted, Tick, TokensServed, WaitedTooLong
from baton.core.tier_messages import DropBlocks, FromTier, LoadBlocks, LoadEnded, PutEnded, ReadBackWanted, StoreBlocks
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.control.cluster_messages import (
    BeginRequest,
    ClusterCommand,
    ClusterEvent,
    CoordinatorDecision,
    HostAdded,
    LoggedCommand,
    MachineSteps,
    RequestQueued,
    ToPool,
    WorkerSaid,
)
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.host_pools import PoolRules
from baton.decide.control.transfer import TransferCommand
from baton.decide.control.transfers import Transfers
from baton.decide.kv.host_pool import HostPool

_Command = CoordinatorCommand | PoolCommand | TransferCommand


class Cluster:
    """Owns the coordinator and the transfers. `handle` is the only way in."""

    def __init__(self, coordinator: Coordinator, rules: PoolRules, steps: MachineSteps | None = None) -> None:
        """`steps`: a list that records the events and commands of the coordinator and the pools, for tests."""
        self.coordinator = coordinator
        self.transfers = Transfers(coordinator.policies, rules, steps)
        self.decided: list[LoggedCommand] = []
        """All commands that resulted from the last event, in order, as written to the decision log."""
        self._steps = steps
        self._out: list[ClusterCommand] = []
        self._dismissed: set[HostId] = set()
        """Leaving hosts that got a DismissHost and are not lost yet."""
        self._cold: set[HostId] = set()
        """Hosts that were added and have no worker yet. With the first one, they get hot prefixes of another host."""

    @property
    def pools(self) -> dict[HostId, HostPool]:
        """The pool of every host."""
        return self.transfers.hosts.pools

    @property
    def workers(self) -> dict[WorkerId, WorkerView]:
        """Workers that have joined, with their views at that time."""
        return self.transfers.hosts.workers

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterCommand]:
        """Apply one event from outside. Return the commands for the driver, in order."""
        self.decided, self._out = [], []
        match event:
            case WorkerSaid():
                self._apply_report(event, now_s)
            case RequestArrived(request=request):
                hits = self.transfers.tier_reads.hits(request)
                self._ask_coordinator(RequestArrived(request, hits) if hits else event, now_s)
            case EngineCacheChanged(host=host):
                if host in self.pools:
                    self._carry_out(self.transfers.tell_pool(host, event), now_s)
            case CopyEnded() | FromTier() | LayersDone() | HostLost():
                if isinstance(event, HostLost):
                    self._dismissed.discard(event.host)
                    self._cold.discard(event.host)
                self._carry_out(self.transfers.handle(event, now_s), now_s)
            case (
                Tick()
                | TokensServed()
                | RequestCancelled()
                | RoleSet()
                | RestartWanted()
                | ScaleWanted()
                | WaitedTooLong()
                | QueuedTooLong()
            ):
                self._ask_coordinator(event, now_s)
                self._spread_prefixes(event, now_s)
            case WorkerJoined() | WorkerLost():
                self._carry_out(self.transfers.handle(event, now_s), now_s)
                self._ask_coordinator(event, now_s)
                if isinstance(event, WorkerJoined) and event.view.host in self._cold:
                    self._cold.remove(event.view.host)
                    self._carry_out(self.transfers.handover.warm(event.view.host, now_s), now_s)
            case HostAdded(host=host, workers_max=workers_max):
                self.transfers.hosts.add(event)
                self._cold.add(host)
                self.coordinator.open_host(host, workers_max)
                if event.kept:
                    hashes = tuple(each.block_hash for each in event.kept)
                    self._carry_out([BlocksStored(host, hashes, self.pools[host].block_runs)], now_s)
            case HostLeaving(host=host):
                self.transfers.hosts.leaving.add(host)
                self._carry_out(self.coordinator.leave_host(host), now_s)
                self._carry_out(self.transfers.handover.begin(host, now_s), now_s)
        if self.transfers.hosts.leaving:
            self._dismiss_hosts()
        return self._out

    def _spread_prefixes(self, event: ClusterEvent, now_s: float) -> None:
        """Copy hot prefixes to the other hosts from time to time."""
        if isinstance(event, Tick) and len(self.pools) > 1:
            self._carry_out(self.transfers.handover.spread(now_s), now_s)

    def _dismiss_hosts(self) -> None:
        """Dismiss, once, each leaving host that no request and no transfer needs any more."""
        for host in self.coordinator.moves.left_hosts():
            needed = any(host in (transfer.source, transfer.target) for transfer in self.transfers.table)
            if not needed and not self.transfers.waiting_for_pools and host not in self._dismissed:
                self._dismissed.add(host)
                self._out.append(DismissHost(host))
                self.decided.append(DismissHost(host))

    def _apply_report(self, report: WorkerSaid, now_s: float) -> None:
        """Apply a worker's events in order, then its load. The events of a lost worker are for the coordinator only."""
        for request_id, attempt in report.begun:
            self._ask_coordinator(DecodeBegun(request_id, attempt, report.worker), now_s)
        view = self.workers.get(report.worker)
        for event in report.events:
            if view is not None:
                self._carry_out(self.transfers.handle_batcher_event(view.host, event, now_s), now_s)
            match event:
                case PrefillFinished(request_id=request_id):
                    self._ask_coordinator(event, now_s)
                    self._carry_out(self.transfers.settle(request_id), now_s)
                case RequestFinished() | RequestFailed() | RequestDropped(preempted=False):
                    self._ask_coordinator(event, now_s)
                case BlocksSealed() | BlocksSpilled() | BlocksWanted() | RequestDropped():
                    pass
        if report.view is not None:
            self._ask_coordinator(WorkerReported(report.view), now_s)

    def _ask_coordinator(self, event: CoordinatorEvent, now_s: float) -> None:
        commands = self._coordinate(event, now_s)
        if commands:
            self._carry_out(commands, now_s)

    def _coordinate(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorCommand]:
        commands = self.coordinator.handle(event, now_s)
        if self._steps is not None:
            self._steps.append(CoordinatorDecision(now_s, event, tuple(commands)))
        return commands

    # ---- commands of the machines

    def _carry_out(self, commands: Iterable[_Command], now_s: float) -> None:
        """Carry out commands in order, depth first: all consequences of one command before the next command."""
        for command in commands:
            following = self._carry_out_one(command, now_s)
            if following:
                self._carry_out(following, now_s)

    def _carry_out_one(self, command: _Command, now_s: float) -> Iterable[_Command]:
        following: Iterable[_Command] = ()
        match command:  # in order of frequency: see `Transfers.handle`
            case StartPrefill() | StartDecode():
                self._out.append(command)
                following = self.transfers.handle(command, now_s)
            case BeginRequest() | CloseRequest():
                self._out.append(command)
            case ToPool(host=host, event=event):
                following = self.transfers.tell_pool(host, event)
            case ToWorker(command=given):
                if isinstance(given, BlocksGranted):
                    self.coordinator.queue.start(given.request_id, now_s)
                self._out.append(command)
            case RequestQueued(request=request, has_blocks=has_blocks):
                self.coordinator.queue.enter(request, now_s, has_blocks=has_blocks)
                return following
            case BlocksStored() | BlocksRemoved() | RequestDropped() | AheadEnded():
                following = self._coordinate(command, now_s)
            case (
                ReleaseBlocks()
                | LandingGranted()
                | LandingRefused()
                | SendAhead()
                | StopRequest()
                | PutEnded()
                | ReadBackWanted()
            ):
                following = self.transfers.handle(command, now_s)
            case CopyBlocks():
                self._out.append(command)
                self.transfers.links.copy_begins(command, now_s)
            case StoreBlocks() | LoadBlocks():
                following = self._use_tier(command, now_s)
            case DropBlocks() | SetRole() | StartWorker() | RetireWorker() | RestartWorker():
                self._out.append(command)
            case PathChosen():
                pass  # PathChosen is only for the log, where it explains the commands after it
            case HostLost():
                return self._coordinate(command, now_s)
            case _:
                assert_never(command)
        self.decided.append(command)
        return following

    def _use_tier(self, command: StoreBlocks | LoadBlocks, now_s: float) -> Iterable[_Command]:
        """Pass on a write or read of a tier. A read without blocks ends at once."""
        if isinstance(command, LoadBlocks) and not command.hashes:
            nothing = LoadEnded(command.request_id, command.number, ())
            return self.transfers.handle(FromTier(command.host, nothing), now_s)
        self._out.append(command)
        self.transfers.links.tier_work_begins(command, now_s)
        return ()
