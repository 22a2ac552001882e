"""Events into the deciding half of a server, and the commands that come out of it. See `Cluster`."""

from __future__ import annotations

from msgspec import Struct

from baton.core.copies import CopyBlocks, CopyEnded, LayersDone
from baton.core.handoff_paths import WayChosen
from baton.core.messages import (
    AheadEnded,
    BatcherEvent,
    CloseRequest,
    CoordinatorCommand,
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
from baton.core.ticking import Tick, WaitedTooLong
from baton.core.tier_messages import DropBlocks, FromTier, LoadBlocks, StoreBlocks
from baton.core.types import BlockId, HostId, RequestId, Until, WorkerId, WorkerView
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules

_ENDS = (PrefillFinished, RequestFinished)
"""Events after which a worker does not decode a request."""


class HostAdded(Struct, frozen=True, tag=True):
    """A host has an arena of so many blocks, and these tiers below it. Its workers may join from now on."""

    host: HostId
    blocks_total: int
    layout: KVLayout
    tiers: tuple[TierRules, ...] = ()
    """The fastest first."""


class WorkerSaid(Struct, frozen=True, tag=True, gc=False):
    """The events of a worker's report, without its tokens: those go past the deciding half to their clients."""

    worker: WorkerId
    begun: tuple[tuple[RequestId, int], ...] = ()
    """Requests, with attempts, whose first token is out and that the worker goes on with."""
    events: tuple[BatcherEvent, ...] = ()
    """In the order in which they happened."""
    view: WorkerView | None = None
    """None: the worker's load is as the coordinator predicts it."""


class BeginRequest(Struct, frozen=True, tag=True):
    """Send a request to its worker, with its tokens so far, which the driver holds. See `StartRequest`."""

    worker: WorkerId
    request_id: RequestId
    attempt: int
    until: Until
    block_table: tuple[BlockId, ...]
    computed_tokens: int
    layer_groups: int


class ToPool(Struct, frozen=True, tag=True, gc=False):
    """An event for a host's pool, from a transfer."""

    host: HostId
    event: PoolEvent


ClusterEvent = (
    RequestArrived
    | RequestCancelled
    | HostAdded
    | HostLost
    | WorkerJoined
    | WorkerLost
    | WorkerSaid
    | LayersDone
    | CopyEnded
    | FromTier
    | RoleSet
    | Tick
    | WaitedTooLong
)
"""Everything that reaches the deciding half from outside."""

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
)
"""What the driver performs. StartPrefill and StartDecode say which worker has the request from now on; it is sent there
with BeginRequest, once its KV is there."""

LoggedCommand = (
    CoordinatorCommand | PoolCommand | ToPool | CopyBlocks | BeginRequest | RequestDropped | AheadEnded | WayChosen
)
"""What the coordinator, the pools and the transfers decide because of one event."""


def worker_said(report: StepReport, view: WorkerView) -> WorkerSaid | None:
    """Take the events out of a report. None: there is nothing for the deciding half, as in most steps of decoding.

    `view`: the worker's, in the role that it has now.
    """
    begun = [(token.request_id, token.attempt) for token in report.tokens if token.index == 0]
    if begun and report.events:
        gone = {event.request_id for event in report.events if isinstance(event, _ENDS)}
        begun = [(request_id, attempt) for request_id, attempt in begun if request_id not in gone]
    if not (begun or report.events or report.is_load_new):
        return None
    return WorkerSaid(report.worker, tuple(begun), report.events, view if report.is_load_new else None)
