"""The log of a cluster's decisions, and its replay: the same events into a fresh cluster (INV-7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from baton.core.config import PolicyConfig
from baton.core.copies import CopyEnded, LandingWanted, LayersDone, LeaseWanted
from baton.core.keeping import FromTier
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
from baton.core.ways import WayChosen
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import ClusterEvent, HostAdded, LoggedCommand, ToPool, WorkerSaid
from baton.decide.kv.window import PromptRules

LOG_VERSION = 4
"""Raised with every change of the log's format, which a test notices. 4: every event from outside is an entry, with the
commands of the coordinator, the pools and the transfers; versions up to 3 held the coordinator's decisions only."""


class LogHeader(Struct, frozen=True, kw_only=True, tag=True):
    """What a replay needs to build the same cluster."""

    version: int = LOG_VERSION
    policy: PolicyConfig
    block_tokens: int
    attempts_max: int
    cost: dict[str, Any] = {}
    """The configuration's section: policies choose by it."""
    prompts: PromptRules = PromptRules()
    sources: dict[str, str] = {}
    """The digest of the source of each user-defined policy, by its `module:Class`. See `source_digests`."""


class SimHeader(Struct, frozen=True, kw_only=True, tag=True):
    """The header of a simulation's log: its cluster and its policies, or their name."""

    version: int = LOG_VERSION
    cluster: str
    """The simulator's `ClusterSpec` as JSON."""
    policy: PolicyConfig | str
    sources: dict[str, str] = {}
    """As in `LogHeader`."""


class Decision(Struct, frozen=True, tag=True):
    """One event from outside, and everything that was decided because of it."""

    now_s: float
    event: ClusterEvent
    commands: tuple[LoggedCommand, ...]


_PROGRESS = (PrefillFinished, RequestFinished, RequestFailed)
_Said = TypeVar("_Said", bound=ClusterEvent | LoggedCommand)


def decided(now_s: float, event: ClusterEvent, commands: Iterable[LoggedCommand]) -> Decision:
    """Make a log entry without any `cache_salt`: that is its tenant's secret, and the log has other readers.

    Decisions depend on block hashes only, so the replay of the entry decides the same.
    """
    return Decision(now_s, _unsalted(event), tuple(map(_unsalted, commands)))


def _unsalted(said: _Said) -> _Said:
    if isinstance(said, RequestArrived | StartPrefill | StartDecode | SendAhead):
        return replace(said, request=replace(said.request, cache_salt="")) if said.request.cache_salt else said
    if isinstance(said, WayChosen) and said.handoff.request.cache_salt:
        return replace(said, handoff=replace(said.handoff, request=replace(said.handoff.request, cache_salt="")))
    if isinstance(said, ToPool):
        event = said.event
        if isinstance(event, LandingWanted | LeaseWanted | StartPrefill | StartDecode) and event.request.cache_salt:
            return replace(said, event=replace(event, request=replace(event.request, cache_salt="")))
    return said


def coordinator_events(event: ClusterEvent) -> Iterator[CoordinatorEvent]:
    """Return what an event from outside tells the coordinator, in order."""
    match event:
        case WorkerSaid():
            yield from (DecodeBegun(request_id, attempt, event.worker) for request_id, attempt in event.begun)
            for each in event.events:
                if isinstance(each, _PROGRESS) or (isinstance(each, RequestDropped) and not each.preempted):
                    yield each
            if event.view is not None:
                yield WorkerReported(event.view)
        case HostAdded() | LayersDone() | CopyEnded() | FromTier():
            return
        case _:
            yield event


LogEntry = LogHeader | SimHeader | Decision


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay decided otherwise."""

    index: int
    recorded: Decision
    replayed: tuple[LoggedCommand, ...]


def replay(cluster: Cluster, decisions: Iterable[Decision]) -> tuple[int, Difference | None]:
    """Feed recorded events into `cluster`. Return how many agreed, and the first that did not."""
    index = 0
    for index, recorded in enumerate(decisions, 1):
        cluster.handle(recorded.event, recorded.now_s)
        replayed = tuple(cluster.decided)
        if replayed != recorded.commands:
            return index - 1, Difference(index - 1, recorded, replayed)
    return index, None
