"""The log of a coordinator's decisions, and its replay: the same events into a fresh coordinator (INV-7)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from baton.core.config import PolicyConfig
from baton.core.messages import (
    CoordinatorCommand,
    CoordinatorEvent,
    PoolCommand,
    PoolEvent,
    RequestArrived,
    SendAhead,
    StartDecode,
    StartPrefill,
)
from baton.core.types import HostId
from baton.core.ways import WayWanted
from baton.decide.control.coordinator import Coordinator
from baton.decide.kv.window import Window

LOG_VERSION = 3
"""Raised with every change of what stands in a log, which a test notices. 3: which way KV goes is asked by an entry,
and what the files say that a configuration names stands in the header. 2: whom scaling starts has a name."""


class LogHeader(Struct, frozen=True, kw_only=True, tag=True):
    """What a replay needs to build the same coordinator."""

    version: int = LOG_VERSION
    policy: PolicyConfig
    block_tokens: int
    attempts_max: int
    cost: dict[str, Any] = {}
    """The configuration's section: policies choose by it."""
    window: Window | None = None
    """How far back the model sees, where no layer sees everything."""
    sources: dict[str, str] = {}
    """Of every policy that is not ours, by its `module:Class`: the digest of its source. See `source_digests`."""


class SimHeader(Struct, frozen=True, kw_only=True, tag=True):
    """As `LogHeader`, of a simulated coordinator: its cluster and its policies, or their name, say the same."""

    version: int = LOG_VERSION
    cluster: str
    """The simulator's `ClusterSpec` as JSON."""
    policy: PolicyConfig | str
    sources: dict[str, str] = {}
    """See `LogHeader.sources`."""


class Decision(Struct, frozen=True, tag=True):
    """One event into the coordinator, when, and what came out."""

    now_s: float
    event: CoordinatorEvent
    commands: tuple[CoordinatorCommand, ...]


class PoolDecision(Struct, frozen=True, tag=True):
    """One event into a host's pool, and what came out."""

    now_s: float
    host: HostId
    event: PoolEvent
    commands: tuple[PoolCommand, ...]


_Said = TypeVar("_Said", bound=CoordinatorEvent | CoordinatorCommand)


def decided(now_s: float, event: CoordinatorEvent, commands: Iterable[CoordinatorCommand]) -> Decision:
    """Write down what was decided, without any `cache_salt`: it is its tenant's secret, and the log has other readers.

    The coordinator looks at block hashes only, so the replay of what is written decides the same.
    """
    return Decision(now_s, _unsalted(event), tuple(_unsalted(command) for command in commands))


def _unsalted(said: _Said) -> _Said:
    if isinstance(said, WayWanted) and said.handoff.request.cache_salt:
        return replace(said, handoff=replace(said.handoff, request=replace(said.handoff.request, cache_salt="")))
    if isinstance(said, RequestArrived | StartPrefill | StartDecode | SendAhead) and said.request.cache_salt:
        return replace(said, request=replace(said.request, cache_salt=""))
    return said


LogEntry = LogHeader | SimHeader | Decision


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay decided otherwise."""

    index: int
    recorded: Decision
    replayed: tuple[CoordinatorCommand, ...]


def replay(coordinator: Coordinator, decisions: Iterable[Decision]) -> tuple[int, Difference | None]:
    """Feed recorded events into `coordinator`. Returns how many agreed, and the first that did not."""
    index = 0
    for index, recorded in enumerate(decisions, 1):
        replayed = tuple(coordinator.handle(recorded.event, recorded.now_s))
        if replayed != recorded.commands:
            return index - 1, Difference(index - 1, recorded, replayed)
    return index, None
