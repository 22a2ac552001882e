"""Records of KV transfers: one per transfer, and the table that finds them.

A transfer brings the KV of one request to a host. Its source is another host, or the tiers of the target itself. It
begins when the target's pool is asked for blocks to land in, and ends when nothing reads or writes its blocks any more.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from baton.core.copies import (
    CopyBlocks,
    CopyEnded,
    LandingGranted,
    LandingRefused,
    LandingWanted,
    LayersDone,
    LayerSpan,
)
from baton.core.handoff_paths import PathChosen
from baton.core.messages import (
    AheadEnded,
    HostLost,
    PoolCommand,
    ReleaseBlocks,
    RequestDropped,
    SendAhead,
    StartDecode,
    StartPrefill,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.tier_messages import FromTier, PutEnded, ReadBackWanted
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId
from baton.decide.control.cluster_messages import BeginRequest, RequestQueued, ToPool

Start = StartPrefill | StartDecode
State = Literal["landing", "copying", "landed", "failed"]
"""`landing`: the target has not granted blocks yet. `copying`: a copy or a tier read is under way. `landed` and
`failed`: the transfer has ended."""


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
    hashes: tuple[BlockHash, ...]
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

    @property
    def is_read_ahead(self) -> bool:
        """The transfer reads from the target's tiers, and no start waits for it yet."""
        return self.start is None and self.source == self.target

    def ask_for_blocks(self, attempt: int, block_tokens: int, first_block: int = 0) -> ToPool:
        """Return the request to the target's pool for blocks. `first_block`: blocks before it are not copied."""
        worker, blocks = self.start.worker if self.start is not None else None, -(-self.tokens // block_tokens)
        return ToPool(self.target, LandingWanted(self.request, attempt, worker, blocks, self.hashes, first_block))

    def copy(
        self,
        number: int,
        tokens: range,
        read: tuple[BlockId, ...],
        write: tuple[BlockId, ...],
        layers: LayerSpan | None = None,
    ) -> CopyBlocks:
        """Return the command to copy tokens from blocks of the source into blocks of the target."""
        return CopyBlocks(
            request_id=self.request.id,
            number=number,
            source=self.source,
            target=self.target,
            read=read,
            write=write,
            first_token=tokens.start,
            tokens=len(tokens),
            layers=layers,
        )


@dataclass(slots=True, kw_only=True)
class ChunkTransfer(Transfer):
    """The transfer of a prompt whose end is copied layer by layer while a worker computes it.

    It has several copies, each with a number of its own.
    """

    worker: WorkerId
    layers_done: int
    layers_sent: int = 0
    """Layers whose copies have begun."""
    is_computed: bool = False
    """The worker has reported the end of its step: the copied layers count."""
    has_failed: bool = False
    """A copy or the worker has failed: no copied layer counts."""
    read: tuple[BlockId, ...] = ()
    """Blocks of the chunk at the source. Empty until the target has granted blocks."""
    write: tuple[BlockId, ...] = ()
    first_token: int = 0
    copies: int = 0
    """Copies under way, of layers of the chunk and of blocks sealed before it."""


TransferEvent = (
    Start
    | SendAhead
    | StopRequest
    | ReleaseBlocks
    | LandingGranted
    | LandingRefused
    | ReadBackWanted
    | PutEnded
    | CopyEnded
    | FromTier
    | LayersDone
    | WorkerJoined
    | WorkerLost
    | HostLost
)
"""Events from outside, commands of the coordinator and commands of the pools."""
TransferCommand = (
    ToPool | ToWorker | CopyBlocks | BeginRequest | RequestQueued | AheadEnded | RequestDropped | PathChosen | HostLost
)
Outcome = TypeVar("Outcome")
Steps = Generator[TransferCommand | PoolCommand, None, Outcome]
"""A generator of commands. The cluster resumes it after a command was carried out with all consequences, so the code
after a `yield` sees them. It runs each generator to its end before the next event."""
Commands = Iterable[TransferCommand | PoolCommand]
"""`Steps`, or the commands of an event that needs no further code after them."""


@dataclass(slots=True)
class TransferTable:
    """All transfers under way. For each request, a start waits for at most one of them.

    Live requests and their attempts bound their number.
    """

    reads_ahead: dict[tuple[RequestId, HostId], Transfer] = field(
        default_factory=dict[tuple[RequestId, HostId], Transfer]
    )
    """Reads from tiers that began before any start. A later start on that host waits for their end."""
    awaited: dict[RequestId, Transfer] = field(default_factory=dict[RequestId, Transfer])
    """The transfer that a start of each request waits for."""
    _unawaited: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    """Transfers that no start waits for: sent or read ahead, or given up during a copy or read."""
    _landing: dict[tuple[RequestId, HostId], Transfer] = field(default_factory=dict[tuple[RequestId, HostId], Transfer])
    """Transfers that wait for blocks, by the request and the target."""
    _numbers: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.awaited or self._unawaited)

    def __iter__(self) -> Iterator[Transfer]:
        yield from self.awaited.values()
        yield from self._unawaited.values()

    def next_number(self) -> int:
        """Return a number for another transfer or copy."""
        self._numbers += 1
        return self._numbers

    def begin(
        self,
        request: Request,
        *,
        source: HostId,
        target: HostId,
        tokens: int,
        hashes: tuple[BlockHash, ...],
        start: Start | None = None,
    ) -> Transfer:
        """Add and return a transfer of the request's leading `tokens`. See `Transfer` for the arguments."""
        number = self.next_number()
        return self.add(
            Transfer(
                number=number, request=request, source=source, target=target, tokens=tokens, hashes=hashes, start=start
            )
        )

    def add(self, transfer: Transfer) -> Transfer:
        """Add a transfer that waits for blocks to land in, and return it."""
        if transfer.start is None:
            self._unawaited[transfer.number] = transfer
        else:
            self.awaited[transfer.request.id] = transfer
        if transfer.is_read_ahead:
            self.reads_ahead[transfer.request.id, transfer.target] = transfer
        self._landing[transfer.request.id, transfer.target] = transfer
        return transfer

    def find(self, number: int, request_id: RequestId) -> Transfer | None:
        """Return the transfer of the request with this number if it is under way, or None."""
        awaited = self.awaited.get(request_id)
        return awaited if awaited is not None and awaited.number == number else self._unawaited.get(number)

    def land(self, request_id: RequestId, target: HostId) -> Transfer:
        """Return the transfer that waited for these blocks of the host, and mark it as copying."""
        transfer = self._landing.pop((request_id, target))
        transfer.state = "copying"
        return transfer

    def refuse(self, request_id: RequestId, target: HostId) -> Transfer:
        """End and return the transfer whose blocks this host has refused: its KV was sent or read ahead."""
        transfer = self._landing.pop((request_id, target))
        self.end(transfer, landed=False)
        return transfer

    def revive(self, request_id: RequestId, target: HostId) -> Transfer | None:
        """Reuse a transfer that still writes blocks of the request on this host: a start waits for it again."""
        for transfer in self._unawaited.values():
            if transfer.request.id == request_id and transfer.target == target and not transfer.is_read_ahead:
                self.awaited[request_id] = self._unawaited.pop(transfer.number)
                return transfer
        return None

    def give_up(self, transfer: Transfer) -> None:
        """Give up a transfer that a start waits for. It ends now, or with its copy or read under way."""
        del self.awaited[transfer.request.id]
        if transfer.state == "copying":
            self._unawaited[transfer.number] = transfer
        else:
            transfer.state = "failed"
            del self._landing[transfer.request.id, transfer.target]

    def lose_host(self, host: HostId) -> None:
        """Give up the transfers to a lost host that a start waits for."""
        for transfer in [transfer for transfer in self.awaited.values() if transfer.target == host]:
            self.give_up(transfer)

    def end(self, transfer: Transfer, *, landed: bool) -> bool:
        """Remove a transfer whose copies or read have ended. Return whether a start waits for it."""
        transfer.state = "landed" if landed else "failed"
        if transfer.is_read_ahead:
            del self.reads_ahead[transfer.request.id, transfer.target]
        if self._unawaited.pop(transfer.number, None) is not None:
            return False
        del self.awaited[transfer.request.id]
        return True
