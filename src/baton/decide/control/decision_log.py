"""The log of a cluster's decisions, and its replay, which applies the same events to a new cluster (INV-7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from baton.core.config import PolicyConfig
from baton.core.copies import CopyEnded, LandingWanted, LayersDone, LeaseWanted
from baton.core.handoff_paths import PathChosen
from baton.core.launching import ScalingRules
from baton.core.leaving import HostLeaving
from baton.core.messages import (
    CoordinatorEvent,
    DecodeBegun,
    PrefillFinished,
    RequestArrived,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    SendAhead,
    StartDecode,
    StartPrefill,
    WorkerReported,
)
from baton.core.prefixes import EngineCacheChanged
from baton.core.tier_messages import FromTier
from baton.core.types import BlockHash, Request
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import ClusterEvent, HostAdded, LoggedCommand, ToPool, WorkerSaid
from baton.decide.control.retries import RetryRules
from baton.decide.kv.window import PromptRules

LOG_VERSION = 22
"""Version of the log's format; a test fails if the format changes without it. Since version 4 there is one entry per
event from outside, with all commands. Earlier versions held the coordinator's decisions only. Version 5 adds the
deadline of the queue. Version 6 names a chosen path `PathChosen.path` (`WayChosen.way` before) and a store's event
`FromTier.event` (`news` before). Version 7 adds the limit of workers of a host, the host of a started worker, the
learned prices of steps in the view of a worker, and `StopRequest.only_unstarted`. Version 8 adds the turns of a fair
queue, `TokensServed`, service classes, predicted latencies in `StartPrefill`, and hosts that leave. Version 9 adds
`Request.deferred_s`. Version 10 adds `Request.resumed_tokens`, rolling restarts, and the bounds of retries and of
prefixes that are handed over. Version 11 adds `Request.client`. Version 12 adds
`ServiceClass.urgent_ttft_s`. Version 13 adds `EngineCacheChanged`. Version 14
adds the rules of scaling, `ServiceClass.copy_tokens` and `HostAdded.kept`. Version 15 adds the reason of a role change,
and cached tokens to windows of load. Version 16 adds `Request.hosts`, `WorkerView.others` and
`ScaleWanted`. Version 17 adds `Request.traceparent`. Version 18 adds `LogPart`. Version 19 adds KV in 4 bits. Version
20 adds the spill space: `SpillBlocks` and `BlocksSpilled`. Version 21 adds `WorkerView.queued_pairs`. Version 22
adds `WorkerView.pace`."""


class LogHeader(Struct, frozen=True, kw_only=True, tag=True):
    """The header of a server's log: everything that a replay needs to build the same cluster."""

    version: int = LOG_VERSION
    policy: PolicyConfig
    block_tokens: int
    cost: dict[str, Any] = {}
    """The section `cost` of the configuration, which policies use."""
    prompts: PromptRules = PromptRules()
    queue_s: float | None = None
    """Deadline of the queue in seconds, for `StartQueue.wait_s_max`."""
    retries: RetryRules = RetryRules()
    handover_bytes: int = 0
    """As in `PoolRules`."""
    scaling: ScalingRules = ScalingRules()
    sources: dict[str, str] = {}
    """The digest of the source of each user-defined policy, by its `module:Class`. See `source_digests`."""


class SimHeader(Struct, frozen=True, kw_only=True, tag=True):
    """The header of a simulation's log: the cluster, and the policies or the name of their set."""

    version: int = LOG_VERSION
    cluster: str
    """The simulator's `ClusterSpec` as JSON."""
    policy: PolicyConfig | str
    sources: dict[str, str] = {}
    """As in `LogHeader`."""


class LogPart(Struct, frozen=True, kw_only=True, tag=True):
    """The first entry of every further file of a log."""

    earlier: str
    """Name of the file with the entries before, in the same folder."""
    earlier_bytes: int


class Decision(Struct, frozen=True, tag=True):
    """A log entry: one event from outside, and all resulting commands."""

    now_s: float
    event: ClusterEvent
    commands: tuple[LoggedCommand, ...]


_PROGRESS = (PrefillFinished, RequestFinished, RequestFailed)


def decided(now_s: float, event: ClusterEvent, commands: Iterable[LoggedCommand]) -> Decision:
    """Return a log entry without `cache_salt`, which is a tenant's secret.

    Decisions depend on block hashes only, so a replay is not affected. Commands in the log omit the block hashes of
    requests and of landings, because the entries of the request's arrival and of its worker contain them.
    """
    if isinstance(event, RequestArrived) and event.request.cache_salt:
        event = replace(event, request=replace(event.request, cache_salt=""))
    return Decision(now_s, event, tuple(map(_brief, commands)))


def _brief(command: LoggedCommand) -> LoggedCommand:
    """Return a command without the parts of its request that the log has already."""
    match command:
        case StartPrefill() | StartDecode() | SendAhead():
            return replace(command, request=_known(command.request))
        case PathChosen(handoff=handoff):
            return replace(command, handoff=replace(handoff, request=_known(handoff.request)))
        case ToPool(event=LandingWanted() | LeaseWanted() as event):
            return replace(command, event=replace(event, request=_known(event.request), prefix=()))
        case ToPool(event=StartPrefill() | StartDecode() as event):
            return replace(command, event=replace(event, request=_known(event.request)))
        case _:
            return command


def _known(request: Request) -> Request:
    """Return the request without the fields that only the entry of its arrival holds."""
    return replace(request, block_hashes=(), prompt_hash=BlockHash(b""), cache_salt="")


def coordinator_events(event: ClusterEvent) -> Iterator[CoordinatorEvent]:
    """Yield the coordinator's events that an event from outside contains, in order."""
    match event:
        case WorkerSaid():
            yield from (DecodeBegun(request_id, attempt, event.worker) for request_id, attempt in event.begun)
            for each in event.events:
                if isinstance(each, _PROGRESS) or (isinstance(each, RequestDropped) and not each.preempted):
                    yield each
            if event.view is not None:
                yield WorkerReported(event.view)
        case HostAdded() | HostLeaving() | LayersDone() | CopyEnded() | FromTier() | EngineCacheChanged():
            return
        case _:
            yield event


LogEntry = LogHeader | SimHeader | LogPart | Decision


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry whose replay resulted in different commands."""

    index: int
    recorded: Decision
    replayed: tuple[LoggedCommand, ...]


def replay(cluster: Cluster, decisions: Iterable[Decision]) -> tuple[int, Difference | None]:
    """Apply recorded events to `cluster`. Return the number of equal entries, and the first difference if any."""
    index = 0
    for index, recorded in enumerate(decisions, 1):
        cluster.handle(recorded.event, recorded.now_s)
        replayed = decided(recorded.now_s, recorded.event, cluster.decided).commands
        if replayed != recorded.commands:
            return index - 1, Difference(index - 1, recorded, replayed)
    return index, None
