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
"""Planned: the source still writes the KV into a pool. Landing: the target has not granted blocks yet. Copying: a wire
or a store is at work. Landed, failed: over."""

ROUNDS_MAX = 8
"""Most copies before a request that moves is stopped: each brings the blocks sealed during the one before."""


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
    """One request's KV on its way to a host."""

    number: int
    """Differs from the number of every other transfer and copy of the cluster."""
    request: Request
    source: HostId
    """The target itself where its tiers are read."""
    target: HostId
    tokens: int
    """Leading tokens whose KV is to be at the target."""
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
    """Set where the end of the prompt is copied by layer. Such a transfer has several copies, each with a number."""

    @property
    def is_read_ahead(self) -> bool:
        """The transfer reads from the target's tiers, and no start waits for it yet."""
        return self.start is None and self.source == self.target


@dataclass(slots=True, kw_only=True)
class Stream:
    """A running request whose sealed blocks are copied to the host where it will probably go on."""

    request: Request
    attempt: int
    source: HostId
    target: HostId
    run_tokens: int
    """Shortest run that is worth a copy."""
    report: bool
    """The coordinator waits for `AheadEnded`, to stop the request when little is missing."""
    sent_tokens: int = 0
    rounds: int = 0
    transfer: Transfer | None = None
    """The transfer that is under way."""
    chunk: Chunk | None = None
    """Set while the end of the prompt is computed, where it can be copied by layer."""


@dataclass(slots=True, kw_only=True)
class PoolRead:
    """Progress of one request's blocks through a remote pool: how many are in it, how many the target has read.

    The runs that were read lie in the target's arena as cached blocks, so a start there finds them.
    """

    request: Request
    attempt: int
    target: HostId
    tier: Tier
    names: tuple[BlockHash, ...]
    """Hashes of the blocks that are to get to the target, from the first one on."""
    run_blocks: int = 1
    """Fewest blocks that are worth a read."""
    pooled_blocks: int
    """Leading blocks that the target has or that the pool was seen to have."""
    taken_blocks: int
    """Leading blocks that the target has or has asked for."""
    is_over: bool = False
    """No more is read ahead: the target has no room, the pool lacks blocks, or the request goes on."""


@dataclass(slots=True, kw_only=True)
class PlannedHandoff:
    """A planned transfer: a start that waits until the source has written the request's blocks into a pool."""

    number: int
    start: StartDecode
    source: HostId
    read: PoolRead
    is_put: bool = False
    """The source is done: the start waits for a read only."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Give the request's blocks to the worker and start it, before anything else that follows from it."""

    start: Start
    host: HostId
    layer_groups: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A worker has computed a prompt, and its pool does not know it yet."""

    host: HostId
    event: PrefillFinished


@dataclass(frozen=True, slots=True)
class Settle:
    """The coordinator knows that a prompt is computed: a chunk of it that has landed is over."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A transfer that has ended. Both ends have been told."""

    transfer: Transfer
    is_awaited: bool
    is_whole: bool
    """All tokens that were wanted are at the target."""


TransferCommand = ToPool | ToWorker | CopyBlocks | Begin | AheadEnded | RequestDropped | WayChosen | HostLost
Outcome = TypeVar("Outcome")
Steps = Generator[TransferCommand, None, Outcome]
"""Commands of a transfer, one by one. A step is resumed once its command was carried out with all its consequences, so
the code behind a `yield` sees them. The cluster resumes every step to its end before it takes another event."""


@dataclass(slots=True)
class TransferTable:
    """All transfers under way: per request at most one that a start waits for.

    Bounded by live requests and their attempts.
    """

    streams: dict[RequestId, Stream] = field(default_factory=dict[RequestId, Stream])
    reads_ahead: dict[tuple[RequestId, HostId], Transfer] = field(
        default_factory=dict[tuple[RequestId, HostId], Transfer]
    )
    """Reads from tiers that no start waits for. A start there waits until such a read is over."""
    _awaited: dict[RequestId, Transfer] = field(default_factory=dict[RequestId, Transfer])
    _unawaited: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    """Transfers sent or read ahead, and those that were given up while a wire or a store was at work."""
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
        """Find the transfer that a start of this request waits for."""
        return self._awaited.get(request_id)

    def has(self, number: int, request_id: RequestId) -> bool:
        """Tell whether this number is of a transfer under way."""
        awaited = self._awaited.get(request_id)
        return number in self._unawaited or (awaited is not None and awaited.number == number)

    def find_landing(self, request_id: RequestId, target: HostId) -> Transfer | None:
        """Find the transfer that waits for blocks of this host."""
        stream = self.streams.get(request_id)
        sent = stream.transfer if stream is not None else None
        for transfer in (self._awaited.get(request_id), sent, self.reads_ahead.get((request_id, target))):
            if transfer is not None and transfer.target == target and transfer.state == "landing":
                return transfer
        return None

    def revive(self, request_id: RequestId, target: HostId) -> Transfer | None:
        """Await again a transfer that still writes blocks of this request on this host."""
        for transfer in self._unawaited.values():
            if transfer.request.id == request_id and transfer.target == target and not transfer.is_read_ahead:
                self._awaited[request_id] = self._unawaited.pop(transfer.number)
                return transfer
        return None

    def give_up(self, transfer: Transfer) -> None:
        """Await a transfer no longer. It is over now, or when its wire or read has ended."""
        del self._awaited[transfer.request.id]
        if transfer.state == "copying":
            self._unawaited[transfer.number] = transfer
        else:
            transfer.state = "failed"

    def drop(self, transfer: Transfer) -> None:
        """Forget a transfer sent or read ahead that was refused blocks."""
        del self._unawaited[transfer.number]
        transfer.state = "failed"
        self._forget_read(transfer)

    def lose_host(self, host: HostId) -> tuple[Stream, ...]:
        """Give up transfers to a lost host. Return the streams from it and to it, which are removed."""
        for transfer in [transfer for transfer in self._awaited.values() if transfer.target == host]:
            self.give_up(transfer)
        lost = tuple(stream for stream in self.streams.values() if host in (stream.source, stream.target))
        for stream in lost:
            del self.streams[stream.request.id]
        return lost

    def end(self, number: int, request_id: RequestId) -> tuple[Transfer, bool]:
        """Remove a transfer whose copies, or read, have ended. Return it, and whether a start waits for it."""
        transfer = self._unawaited.pop(number, None)
        if transfer is not None:
            self._forget_read(transfer)
            return transfer, False
        return self._awaited.pop(request_id), True

    def _forget_read(self, transfer: Transfer) -> None:
        if transfer.is_read_ahead:
            del self.reads_ahead[transfer.request.id, transfer.target]
