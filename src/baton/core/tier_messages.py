"""Events and commands about the tiers below an arena: between a host's pool and the mover of bytes to its stores.

Cached blocks are written behind, and read when that is cheaper than computing them. No step and no request waits for a
write, and a read that fails is a miss.
"""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, BlockId, HostId, RequestId, WorkerId


class StoreBlocks(Struct, frozen=True, tag=True):
    """Write blocks of the arena into a tier. They stay where they are until BlocksKept answers."""

    number: int
    """Tells this write from every other of the host's pool."""
    host: HostId
    tier: str
    hashes: tuple[BlockHash, ...]
    """In the order of their chain, if they belong to one."""
    blocks: tuple[BlockId, ...]


class BlocksKept(Struct, frozen=True, tag=True):
    """A write is over: nothing reads its blocks any more."""

    number: int
    kept: tuple[bool, ...]
    """Of each block, whether the tier has it now."""


class DropBlocks(Struct, frozen=True, tag=True):
    """Forget blocks of a tier: it is full, or they were damaged."""

    host: HostId
    tier: str
    hashes: tuple[BlockHash, ...]


class LoadWanted(Struct, frozen=True, tag=True):
    """Blocks were granted to a request: read into them what the tiers have."""

    request_id: RequestId
    number: int
    hashes: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    """Where the bytes of each shall be."""
    back: bool = False
    """The request has had them before, and was preempted."""


class LoadBlocks(Struct, frozen=True, tag=True):
    """Read blocks into the arena. LoadEnded answers, whatever happens, within the time that the driver states."""

    request_id: RequestId
    number: int
    host: HostId
    tiers: tuple[str, ...]
    """Of each block, the tier that has it."""
    hashes: tuple[BlockHash, ...]
    write: tuple[BlockId, ...]
    """Where the bytes of each shall be."""
    back: bool = False
    """As in `LoadWanted`: the read belongs to no transfer."""


class LoadEnded(Struct, frozen=True, tag=True):
    """Nothing is read into these blocks any more."""

    request_id: RequestId
    number: int
    whole: tuple[bool, ...]
    """Of each block, whether its bytes are there and verified."""
    took_s: dict[str, float] = {}
    """By tier: time from the request to the last byte, earlier reads in the queue included."""
    damaged: dict[str, int] = {}
    """By tier: damaged blocks found since the last report."""


class ReadBackWanted(Struct, frozen=True, tag=True):
    """A preempted request has blocks again, and tiers have some of its KV: it is to be read, or computed.

    ReadBack answers in the same turn. Until then its worker gets no grant.
    """

    request_id: RequestId
    host: HostId
    worker: WorkerId
    hashes: tuple[BlockHash, ...]
    """Of the leading full blocks that it had, as far as there is room for them now."""
    beside: int = 0
    """How many other requests of its worker have blocks."""


class ReadBack(Struct, frozen=True, tag=True):
    """Read so much of a preempted request; the rest is computed."""

    request_id: RequestId
    number: int
    """The number of the read, as in `LoadBlocks`."""
    tokens: int
    """Leading tokens, those in the arena included. Nothing is read if these are no more than the arena has."""


class PutWanted(Struct, frozen=True, tag=True):
    """A request is to go on elsewhere from a tier: write these blocks there before all others that wait."""

    request_id: RequestId
    number: int | None
    """PutEnded answers with it. None: no answer is needed."""
    tier: str
    hashes: tuple[BlockHash, ...]
    """In the order of their chain."""
    run_blocks: int
    """Most blocks of one write: a run that was written can be read while the next one is written."""


class PutEnded(Struct, frozen=True, tag=True):
    """The blocks of a put are in the tier, or will not get there."""

    request_id: RequestId
    number: int


class TierOpened(Struct, frozen=True, tag=True):
    """A tier has blocks from an earlier run, or from other hosts."""

    tier: str
    hashes: tuple[BlockHash, ...]
    """Oldest first."""
    more: bool = False
    """Further events follow: a long list comes in pieces, so that no other event waits long."""


class TierRests(Struct, frozen=True, tag=True):
    """A tier's store has failed repeatedly, or is not open: this host does not use it for a while."""

    tier: str
    rests: bool
    """False: this host uses it again."""


class TierView(Struct, frozen=True, kw_only=True):
    """Counts of one tier's blocks by state, and of writes and reads since the start."""

    tier: str
    blocks_total: int
    blocks_cached: int
    """Readable."""
    blocks_writing: int
    stored_blocks: int = 0
    refused_blocks: int = 0
    """The store did not keep them."""
    loaded_blocks: int = 0
    missed_blocks: int = 0
    """They were to be read, and were gone or damaged."""
    skipped_blocks: int = 0
    """Not written: too many were under way or waiting, or every place was in use."""


class TierShrunk(Struct, frozen=True, tag=True):
    """A tier's store has room for fewer blocks than it was to have: its disk is full, or it was opened only now."""

    tier: str
    blocks_max: int


TierEvent = BlocksKept | LoadWanted | LoadEnded | PutWanted | TierOpened | TierRests | TierShrunk
"""Events for a host's tiers."""
TierNews = BlocksKept | LoadEnded | TierOpened | TierRests | TierShrunk
"""Events of a tier's store, from the driver."""
TierCommand = StoreBlocks | DropBlocks | LoadBlocks | PutEnded
"""Commands of a host's tiers."""


class FromTier(Struct, frozen=True, tag=True):
    """An event of a tier's store on a host."""

    host: HostId
    news: TierNews
