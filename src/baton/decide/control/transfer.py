"""Records of KV transfers: one per transfer, and the table that finds them.

A transfer brings the KV of one request to a host. Its source is another host, or the tiers of the target itself. It
begins when the target's pool is asked for blocks to land in, and ends when nothing reads or writes its blocks any more.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from baton.core.copies import CopyBlocks
from baton.core.handoff_paths import WayChosen
from baton.core.messages import (
    AheadEnded,
    HostLost,
    PrefillFinished,
    RequestDropped,
    StartDecode,
    StartPrefill,
    ToWorker,
)
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.kv.tier import Tier

Start = StartPrefill | StartDecode
State = Literal["planned", "landing", "copying", "landed", "failed"]
"""`planned`: the source still writes the KV into a pool. `landing`: the target has not granted blocks yet. `copying`: a
copy or a tier read is under way. `landed` and `failed`: the transfer has ended."""

ROUNDS_MAX = 8
"""Maximum copies before a moving request is stopped. Each one copies the blocks sealed during the one before."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The end of a prompt, which is copied layer by layer while a worker computes it."""

    worker: WorkerId
    layers_done: int = 0
    layers_sent: int = 0
    """Layers whose copies have begun."""
    is_computed: bool = False
    """The worker has reported the end of its step: the copied layers count."""
    has_failed: bool = False
    """A copy or the worker has failed: no copied layer counts."""
    read: tuple[BlockId, ...] = ()
    """Blocks at the source. Empty until the target has granted blocks."""
    write: tuple[BlockId, ...] = ()
    first_token: int = 0
    copies: int = 0
    """Copies under way, of layers of the chunk and of blocks sealed before it."""


@dataclass(slots=True, kw_only=True)
class Transfer:
    """The transfer of one request's KV to a host."""

    number: int
    """Unique among the transfers and copies of the cluster."""
    request: Request
    source: HostId
    """The target itself for a read from its tiers."""
    target: HostId
    tokens: int
    """Leading tokens whose KV the target needs."""
    names: tuple[BlockHash, ...]
    """Hashes of the full blocks that these tokens fill at the target."""
    start: Start | None = None
    """The start that waits for this transfer. None: the KV is sent or read ahead, and no start waits."""
    state: State = "landing"
    cached_tokens: int = 0
    """Leading tokens whose blocks the target holds already: they are not copied."""
    is_leasing: bool = False
    """The source keeps its blocks for this transfer."""
    is_too_late: bool = False
    """The source has released the first blocks: the rest is useless at the target."""
    chunk: Chunk | None = None
    """Set if the end of the prompt is copied by layer. Such a transfer has several copies, each with a number."""

    @property
    def is_read_ahead(self) -> bool:
        """The transfer reads from the target's tiers, and no start waits for it yet."""
        return self.start is None and self.source == self.target


@dataclass(slots=True, kw_only=True)
class Stream:
    """A running request whose sealed blocks are copied to the host that will probably continue it."""

    request: Request
    attempt: int
    source: HostId
    target: HostId
    run_tokens: int
    """Minimum tokens per copy."""
    report: bool
    """The coordinator waits for `AheadEnded`, and then stops the request to move it."""
    sent_tokens: int = 0
    rounds: int = 0
    transfer: Transfer | None = None
    """The transfer that is under way."""
    chunk: Chunk | None = None
    """Set while the end of the prompt is computed, if it can be copied by layer."""


@dataclass(slots=True, kw_only=True)
class PoolRead:
    """Progress of one request's blocks through a remote pool: how many it has, and how many the target has read.

    The blocks that were read are cached in the target's arena, so a start there finds them.
    """

    request: Request
    attempt: int
    target: HostId
    tier: Tier
    names: tuple[BlockHash, ...]
    """Hashes of the leading blocks that the target needs."""
    run_blocks: int = 1
    """Minimum blocks per read."""
    pooled_blocks: int
    """Leading blocks that the target or the pool is known to have."""
    taken_blocks: int
    """Leading blocks that the target has or is reading."""
    is_over: bool = False
    """No further blocks are read ahead: the target has no room, the pool lacks blocks, or the request continues."""


@dataclass(slots=True, kw_only=True)
class PlannedHandoff:
    """A planned transfer: a start that waits until the source has written the request's blocks into a pool."""

    number: int
    start: StartDecode
    source: HostId
    read: PoolRead
    is_put: bool = False
    """The put has ended: the start waits only for a read."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the request on its worker with its blocks, before all other consequences."""

    start: Start
    host: HostId
    layer_groups: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A worker has computed a prompt. Its pool gets the event after the transfers."""

    host: HostId
    event: PrefillFinished


@dataclass(frozen=True, slots=True)
class Settle:
    """The coordinator has handled the end of a prompt: end the transfer of its chunk if no copy is under way."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A transfer that has ended. Both pools have been notified."""

    transfer: Transfer
    is_awaited: bool
    is_whole: bool
    """The target has all tokens of the transfer."""


TransferCommand = ToPool | ToWorker | CopyBlocks | Begin | AheadEnded | RequestDropped | WayChosen | HostLost
Outcome = TypeVar("Outcome")
Steps = Generator[TransferCommand, None, Outcome]
"""A generator of a transfer's commands. The cluster resumes it after a command was carried out with all consequences,
so the code after a `yield` sees them. It runs each generator to its end before the next event."""


@dataclass(slots=True)
class TransferTable:
    """All transfers under way: at most one per request that a start waits for, and others.

    Live requests and their attempts bound their number.
    """

    streams: dict[RequestId, Stream] = field(default_factory=dict[RequestId, Stream])
    reads_ahead: dict[tuple[RequestId, HostId], Transfer] = field(
        default_factory=dict[tuple[RequestId, HostId], Transfer]
    )
    """Reads from tiers that began before any start. A later start on that host waits for their end."""
    _awaited: dict[RequestId, Transfer] = field(default_factory=dict[RequestId, Transfer])
    _unawaited: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    """Transfers that no start waits for: sent or read ahead, or given up during a copy or read."""
    _numbers: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self._awaited or self._unawaited or self.streams)

    def __iter__(self) -> Iterator[Transfer]:
        yield from self._awaited.values()
        yield from self._unawaited.values()

    def next_number(self) -> int:
        """Return a number for another transfer or copy."""
        self._numbers += 1
        return self._numbers

    def add(self, transfer: Transfer) -> None:
        """Add a transfer that waits for blocks to land in."""
        if transfer.start is None:
            self._unawaited[transfer.number] = transfer
        else:
            self._awaited[transfer.request.id] = transfer
        if transfer.is_read_ahead:
            self.reads_ahead[transfer.request.id, transfer.target] = transfer

    def awaited(self, request_id: RequestId) -> Transfer | None:
        """Return the transfer that a start of this request waits for, or None."""
        return self._awaited.get(request_id)

    def has(self, number: int, request_id: RequestId) -> bool:
        """Return whether a transfer with this number is under way."""
        awaited = self._awaited.get(request_id)
        return number in self._unawaited or (awaited is not None and awaited.number == number)

    def find_landing(self, request_id: RequestId, target: HostId) -> Transfer | None:
        """Return the transfer of the request that waits for blocks of this host, or None."""
        stream = self.streams.get(request_id)
        sent = stream.transfer if stream is not None else None
        for transfer in (self._awaited.get(request_id), sent, self.reads_ahead.get((request_id, target))):
            if transfer is not None and transfer.target == target and transfer.state == "landing":
                return transfer
        return None

    def revive(self, request_id: RequestId, target: HostId) -> Transfer | None:
        """Reuse a transfer that still writes blocks of the request on this host: a start waits for it again."""
        for transfer in self._unawaited.values():
            if transfer.request.id == request_id and transfer.target == target and not transfer.is_read_ahead:
                self._awaited[request_id] = self._unawaited.pop(transfer.number)
                return transfer
        return None

    def give_up(self, transfer: Transfer) -> None:
        """Give up a transfer that a start waits for. It ends now, or with its copy or read under way."""
        del self._awaited[transfer.request.id]
        if transfer.state == "copying":
            self._unawaited[transfer.number] = transfer
        else:
            transfer.state = "failed"

    def drop(self, transfer: Transfer) -> None:
        """Remove a transfer sent or read ahead whose target has refused blocks."""
        del self._unawaited[transfer.number]
        transfer.state = "failed"
        self._forget_read(transfer)

    def lose_host(self, host: HostId) -> tuple[Stream, ...]:
        """Give up transfers to a lost host. Remove and return the streams from it and to it."""
        for transfer in [transfer for transfer in self._awaited.values() if transfer.target == host]:
            self.give_up(transfer)
        lost = tuple(stream for stream in self.streams.values() if host in (stream.source, stream.target))
        for stream in lost:
            del self.streams[stream.request.id]
        return lost

    def end(self, number: int, request_id: RequestId) -> tuple[Transfer, bool]:
        """Remove a transfer whose copies or read have ended. Return it, and whether a start waits for it."""
        transfer = self._unawaited.pop(number, None)
        if transfer is not None:
            self._forget_read(transfer)
            return transfer, False
        return self._awaited.pop(request_id), True

    def _forget_read(self, transfer: Transfer) -> None:
        if transfer.is_read_ahead:
            del self.reads_ahead[transfer.request.id, transfer.target]
