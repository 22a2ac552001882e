"""Events of the cluster's state machine, and its commands. See `Cluster`."""

from __future__ import annotations

from msgspec import Struct

from baton.core.copies import CopyBlocks, CopyEnded, LayersDone
from baton.core.handoff_paths import PathChosen
from baton.core.leaving import DismissHost, HostLeaving, RestartWanted, RestartWorker
from baton.core.messages import (
    AheadEnded,
    BatcherEvent,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    HostLost,
    PoolCommand,
    PoolEvent,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    RetireWorker,
    RoleSet,
    SetRole,
    StartDecode,
    StartPrefill,
    StartWorker,
    StepReport,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.prefixes import EngineCacheChanged, SealedBlock
from baton.core.ticking import QueuedTooLong, ScaleWanted, Tick, TokensServed, WaitedTooLong
from baton.core.tier_messages import DropBlocks, FromTier, LoadBlocks, StoreBlocks
from baton.core.types import BlockId, HostId, Request, RequestId, Until, WorkerId, WorkerView
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules

_ENDS = (PrefillFinished, RequestFinished)
"""Events after which the worker does not decode the request."""


class HostAdded(Struct, frozen=True, tag=True):
    """A host with its arena and tiers has been added. Its workers may join from now on."""

    host: HostId
    blocks_total: int
    layout: KVLayout
    tiers: tuple[TierRules, ...] = ()
    """Tiers below the arena, the fastest first."""
    workers_max: int | None = None
    """Maximum number of workers that the host's cores, memory and devices can run. None: no limit is known."""
    kept: tuple[SealedBlock, ...] = ()
    """Sealed blocks in the arena, which the host has kept while its server restarted. Each has another hash."""


class WorkerSaid(Struct, frozen=True, tag=True, gc=False):
    """A worker's report. It has no tokens, because the driver sends them to clients directly."""

    worker: WorkerId
    begun: tuple[tuple[RequestId, int], ...] = ()
    """Requests (with attempts) whose first token the worker has sent and that it continues to decode."""
    events: tuple[BatcherEvent, ...] = ()
    """In the order in which they happened."""
    view: WorkerView | None = None
    """The worker's load. None: it is as the coordinator predicts."""


class BeginRequest(Struct, frozen=True, tag=True):
    """Send a request to its worker as a `StartRequest`. The driver adds the tokens so far."""

    worker: WorkerId
    request_id: RequestId
    attempt: int
    until: Until
    block_table: tuple[BlockId, ...]
    computed_tokens: int
    layer_groups: int


class RequestQueued(Struct, frozen=True):
    """A new request was sent to its worker: it waits there until its prompt can begin."""

    request: Request
    has_blocks: bool


class ToPool(Struct, frozen=True, tag=True, gc=False):
    """An event from a transfer for a host's pool."""

    host: HostId
    event: PoolEvent


class CoordinatorDecision(Struct, frozen=True, tag=True):
    """An event for the coordinator, and the commands that it returned."""

    now_s: float
    event: CoordinatorEvent
    commands: tuple[CoordinatorCommand, ...]


class PoolDecision(Struct, frozen=True, tag=True):
    """An event for a host's pool, and the commands that it returned."""

    now_s: float
    host: HostId
    event: PoolEvent
    commands: tuple[PoolCommand, ...]


MachineSteps = list[CoordinatorDecision | PoolDecision]
"""The events and commands of the coordinator and the pools, in order."""

ClusterEvent = (
    RequestArrived
    | RequestCancelled
    | HostAdded
    | HostLost
    | HostLeaving
    | WorkerJoined
    | WorkerLost
    | WorkerSaid
    | LayersDone
    | CopyEnded
    | FromTier
    | EngineCacheChanged
    | RoleSet
    | RestartWanted
    | ScaleWanted
    | TokensServed
    | Tick
    | WaitedTooLong
    | QueuedTooLong
)
"""All events from outside of the cluster's state machine."""

ClusterCommand = (
    StartPrefill
    | StartDecode
    | BeginRequest
    | ToWorker
    | CloseRequest
    | CopyBlocks
    | StoreBlocks
    | LoadBlocks
    | DropBlocks
    | SetRole
    | StartWorker
    | RetireWorker
    | RestartWorker
    | DismissHost
)
"""Commands for the driver. StartPrefill and StartDecode only assign the request to a worker. BeginRequest follows once
its KV is on the worker's host, and sends the request there."""

LoggedCommand = (
    CoordinatorCommand
    | PoolCommand
    | ToPool
    | CopyBlocks
    | BeginRequest
    | RequestDropped
    | AheadEnded
    | PathChosen
    | DismissHost
)
"""Decisions of the coordinator, the pools and the transfers, as written to the decision log."""


def strip_tokens(report: StepReport, view: WorkerView) -> WorkerSaid | None:
    """Return a report without its tokens. None: it has only tokens, as after most decode steps.

    `view`: the view of the worker with its current role.
    """
    begun = [(token.request_id, token.attempt) for token in report.tokens if token.index == 0]
    if begun and report.events:
        gone = {event.request_id for event in report.events if isinstance(event, _ENDS)}
        begun = [(request_id, attempt) for request_id, attempt in begun if request_id not in gone]
    if not (begun or report.events or report.is_load_new):
        return None
    return WorkerSaid(report.worker, tuple(begun), report.events, view if report.is_load_new else None)
