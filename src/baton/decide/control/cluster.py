"""The cluster: the coordinator, the transfers and the pools of all hosts as one state machine.

An event from outside is routed to one of these parts, and the commands of that part to others, until none remains.
Each command is carried out with all its consequences before the next one (depth first). So a pool gets an assignment
before the worker does, and a worker's event before the coordinator does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

from msgspec import Struct

from baton.core.copies import CopyBlocks, CopyEnded, LandingGranted, LandingRefused, LayersDone
from baton.core.handoff_paths import WayChosen
from baton.core.messages import (
    AheadEnded,
    BlocksGranted,
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
    StartWorker,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.ticking import QueuedTooLong, Tick, WaitedTooLong
from baton.core.tier_messages import DropBlocks, FromTier, LoadBlocks, LoadEnded, PutEnded, ReadBackWanted, StoreBlocks
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.control.cluster_messages import (
    BeginRequest,
    ClusterCommand,
    ClusterEvent,
    HostAdded,
    LoggedCommand,
    ToPool,
    WorkerSaid,
)
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.transfer import Begin, Computed, Settle, TransferCommand
from baton.decide.control.transfers import Transfers
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier
from baton.decide.kv.window import ONE_HASH_A_BLOCK, PromptRules


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """Rules for the pools of all hosts."""

    eviction: Callable[[], EvictionOrder]
    """Makes an eviction order for an arena or a tier."""
    prompts: PromptRules = ONE_HASH_A_BLOCK


class CoordinatorDecision(Struct, frozen=True, tag=True):
    """An event into the coordinator, and its commands."""

    now_s: float
    event: CoordinatorEvent
    commands: tuple[CoordinatorCommand, ...]


class PoolDecision(Struct, frozen=True, tag=True):
    """An event into a host's pool, and its commands."""

    now_s: float
    host: HostId
    event: PoolEvent
    commands: tuple[PoolCommand, ...]


_Command = CoordinatorCommand | PoolCommand | TransferCommand


class Cluster:
    """Owns the coordinator, the transfers and the pools. `handle` is the only way in."""

    def __init__(
        self, coordinator: Coordinator, rules: PoolRules, steps: list[CoordinatorDecision | PoolDecision] | None = None
    ) -> None:
        """`steps`: a list that records the events and commands of the coordinator and the pools, for tests."""
        self.coordinator = coordinator
        self.pools: dict[HostId, HostPool] = {}
        self.workers: dict[WorkerId, WorkerView] = {}
        """Workers that have joined, with their views at that time."""
        self.transfers = Transfers(coordinator.policies, self.pools, self.workers)
        self.decided: list[LoggedCommand] = []
        """All commands that resulted from the last event, in order, as written to the decision log."""
        self._rules = rules
        self._steps = steps
        self._shared: dict[tuple[str, str, int], Tier] = {}
        """Tiers that hosts share, by name, store and block size. They outlive hosts: the store keeps its blocks."""
        self._out: list[ClusterCommand] = []

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterCommand]:
        """Apply one event from outside. Return the commands for the driver, in order."""
        self.decided, self._out = [], []
        match event:
            case WorkerSaid():
                self._hear(event, now_s)
            case RequestArrived(request=request):
                hits = self.transfers.tier_hits(request)
                self._ask_coordinator(RequestArrived(request, hits) if hits else event, now_s)
            case CopyEnded() | FromTier() | LayersDone():
                self._carry_out(self.transfers.handle(event, now_s), now_s)
            case RequestCancelled() | RoleSet() | Tick() | WaitedTooLong() | QueuedTooLong():
                self._ask_coordinator(event, now_s)
            case WorkerJoined(view=view):
                self.workers[view.id] = view
                self._carry_out(self.transfers.handle(event, now_s), now_s)
                self._ask_coordinator(event, now_s)
            case WorkerLost(worker=worker):
                view = self.workers.pop(worker, None)
                if view is not None:
                    self._carry_out(self._ask_pool(view.host, event, now_s), now_s)
                self._carry_out(self.transfers.handle(event, now_s), now_s)
                self._ask_coordinator(event, now_s)
            case HostAdded():
                self._add_host(event)
            case HostLost():
                self._lose_host(event, now_s)
        return self._out

    def _add_host(self, event: HostAdded) -> None:
        self.pools[event.host] = HostPool(
            host=event.host,
            blocks_total=event.blocks_total,
            block_tokens=event.layout.block_tokens,
            eviction=self._rules.eviction,
            tiers=self._tiers(event),
            prompts=self._rules.prompts,
        )
        self.transfers.add_host(event.host, event.layout)

    def _tiers(self, event: HostAdded) -> list[Tier]:
        """Return a host's tiers. Hosts that share a store share one tier object."""
        tiers: list[Tier] = []
        for rules in event.tiers:
            key = (rules.name, rules.shared_as, event.layout.block_tokens)
            tier = self._shared.get(key) or Tier(rules, self._rules.eviction)
            if rules.shared_as:
                self._shared[key] = tier
            tiers.append(tier)
        return tiers

    def _lose_host(self, event: HostLost, now_s: float) -> None:
        pool = self.pools.pop(event.host, None)
        if pool is not None and pool.tiers is not None:
            pool.tiers.abandon()
        for worker in [view.id for view in self.workers.values() if view.host == event.host]:
            del self.workers[worker]
        self._carry_out(self.transfers.handle(event, now_s), now_s)

    def _hear(self, said: WorkerSaid, now_s: float) -> None:
        """Apply a worker's events in order, then its load."""
        for request_id, attempt in said.begun:
            self._ask_coordinator(DecodeBegun(request_id, attempt, said.worker), now_s)
        view = self.workers.get(said.worker)
        for event in said.events:
            if view is not None:
                if isinstance(event, PrefillFinished) and self.transfers.copies_layers:
                    # Copy the remaining layers first: after this event the pool may release their blocks.
                    self._carry_out(self.transfers.handle(Computed(view.host, event), now_s), now_s)
                commands = self._ask_pool(view.host, event, now_s)
                if commands:
                    self._carry_out(commands, now_s)
            match event:
                case PrefillFinished(request_id=request_id):
                    self._ask_coordinator(event, now_s)
                    if self.transfers.copies_layers:
                        self._carry_out(self.transfers.handle(Settle(request_id), now_s), now_s)
                case RequestFinished() | RequestFailed() | RequestDropped(preempted=False):
                    self._ask_coordinator(event, now_s)
                case BlocksSealed():
                    self._carry_out(self.transfers.handle(event, now_s), now_s)
                case _:
                    pass
        if said.view is not None:
            self._ask_coordinator(WorkerReported(said.view), now_s)

    def _ask_coordinator(self, event: CoordinatorEvent, now_s: float) -> None:
        commands = self._coordinate(event, now_s)
        if commands:
            self._carry_out(commands, now_s)

    def _coordinate(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorCommand]:
        commands = self.coordinator.handle(event, now_s)
        if self._steps is not None:
            self._steps.append(CoordinatorDecision(now_s, event, tuple(commands)))
        return commands

    def _ask_pool(self, host: HostId, event: PoolEvent, now_s: float) -> list[PoolCommand]:
        commands = self.pools[host].handle(event)
        if self._steps is not None:
            self._steps.append(PoolDecision(now_s, host, event, tuple(commands)))
        return commands

    # ---- commands of the machines

    def _carry_out(self, commands: Iterable[_Command], now_s: float) -> None:
        """Carry out commands in order, depth first: all consequences of one command before the next command."""
        stack: list[Iterator[_Command]] = [iter(commands)]
        while stack:
            command = next(stack[-1], None)
            if command is None:
                stack.pop()
                continue
            following = self._carry_out_one(command, now_s)
            if following:
                stack.append(iter(following))

    def _carry_out_one(self, command: _Command, now_s: float) -> Iterable[_Command]:
        following: Iterable[_Command] = ()
        match command:
            case ToWorker(command=BlocksGranted(request_id=request_id)):
                self.coordinator.queue.start(request_id, now_s)
                self._out.append(command)
            case ToWorker() | CloseRequest() | CopyBlocks() | SetRole() | StartWorker() | RetireWorker() | DropBlocks():
                self._out.append(command)
            case BlocksStored() | BlocksRemoved() | RequestDropped() | AheadEnded():
                following = self._coordinate(command, now_s)
            case ToPool(host=host, event=event):
                following = self._ask_pool(host, event, now_s)
            case StartPrefill() | StartDecode():
                self._out.append(command)
                following = self.transfers.handle(command, now_s)
            case Begin():
                return self._begin(command, now_s)
            case ReleaseBlocks() | SendAhead() | StopRequest():
                following = self.transfers.handle(command, now_s)
            case LandingGranted() | LandingRefused() | ReadBackWanted() | PutEnded():
                following = self.transfers.handle(command, now_s)
            case StoreBlocks() | LoadBlocks():
                following = self._use_tier(command, now_s)
            case WayChosen():
                pass  # only for the log: it explains the commands after it
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
        return self.transfers.handle(command, now_s)

    def _begin(self, begin: Begin, now_s: float) -> Iterable[_Command]:
        """Start a request on its worker with its blocks, before the further commands of its pool are carried out."""
        start, host = begin.start, begin.host
        following = self._ask_pool(host, start, now_s)
        table, computed_tokens = self.pools[host].table(start.request.id)
        command = BeginRequest(
            worker=start.worker,
            request_id=start.request.id,
            attempt=start.attempt,
            until=start.until if isinstance(start, StartPrefill) else "end",
            block_table=table,
            computed_tokens=computed_tokens,
            layer_groups=begin.layer_groups,
        )
        self._out.append(command)
        self.decided.append(command)
        if isinstance(start, StartPrefill) and start.attempt == 1 and not table:
            self.coordinator.queue.enter(start.request, now_s)
        return following
