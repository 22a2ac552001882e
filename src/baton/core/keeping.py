"""What is said about the tiers below an arena: to a host's pool, and to what moves bytes between arena and stores.

Blocks are written when nobody needs them at once, and read when that is cheaper than computing them. Both take as long
as they take: no step and no request waits for a write, and a read that fails is a miss.
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
    """In the order of their chain, where they are of one."""
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
    """Blocks were granted to a request to be read into from the tiers: what of this the tiers have shall be read."""

    request_id: RequestId
    number: int
    hashes: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    """Where the bytes of each shall be."""
    back: bool = False
    """It has had them before, and was preempted."""


class LoadBlocks(Struct, frozen=True, tag=True):
    """Read blocks into the arena. Answered by LoadEnded, whatever happens, within the time that the driver states."""

    request_id: RequestId
    number: int
    host: HostId
    tiers: tuple[str, ...]
    """Of each block, the tier that has it."""
    hashes: tuple[BlockHash, ...]
    write: tuple[BlockId, ...]
    """Where the bytes of each shall be."""
    back: bool = False
    """See `LoadWanted`: nobody hands it over."""


class LoadEnded(Struct, frozen=True, tag=True):
    """Nothing is read into these blocks any more."""

    request_id: RequestId
    number: int
    whole: tuple[bool, ...]
    """Of each block, whether its bytes are there and verified."""
    took_s: dict[str, float] = {}
    """By tier: from asking to the last of its bytes, what was read before it included."""
    damaged: dict[str, int] = {}
    """By tier: blocks that it has found damaged since it last said so."""


class ReadBackWanted(Struct, frozen=True, tag=True):
    """A preempted request has blocks again, and tiers have some of its KV: shall that be read, or computed?

    Answered at once, with ReadBack. Until then its worker is not told of the blocks.
    """

    request_id: RequestId
    host: HostId
    worker: WorkerId
    hashes: tuple[BlockHash, ...]
    """Of the leading full blocks that it had, as far as there is room for them now."""
    beside: int = 0
    """Other requests of its worker that have blocks."""


class ReadBack(Struct, frozen=True, tag=True):
    """So much of a preempted request shall be read; the rest is computed."""

    request_id: RequestId
    number: int
    """Of the read. See `LoadBlocks`."""
    tokens: int
    """Leading ones, those in the arena included. No more than those: nothing is read."""


class PutWanted(Struct, frozen=True, tag=True):
    """A request is to go on elsewhere from what a tier has of it: write these blocks there before all that waits."""

    request_id: RequestId
    number: int | None
    """Answered by PutEnded with it. None: nobody waits for that yet."""
    tier: str
    hashes: tuple[BlockHash, ...]
    """In the order of their chain."""
    run_blocks: int
    """Most blocks of one write: what was written can be taken while the next run is."""


class PutEnded(Struct, frozen=True, tag=True):
    """What a put has asked for is in the tier, or will not get there."""

    request_id: RequestId
    number: int


class TierOpened(Struct, frozen=True, tag=True):
    """A tier has blocks that an earlier run has left, or that others have put there."""

    tier: str
    hashes: tuple[BlockHash, ...]
    """Oldest first."""
    more: bool = False
    """Of this list. What is long comes in pieces, so that nobody is held up by it."""


class TierRests(Struct, frozen=True, tag=True):
    """A tier's store has failed again and again, or is not open: this host leaves it alone for a while."""

    tier: str
    rests: bool
    """False: it is over."""


class TierView(Struct, frozen=True, kw_only=True):
    """One tier's blocks, and what became of those that were written and read. Counts since the start."""

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
    """Not written: too much was under way or waiting, or every place was in use."""


class TierShrunk(Struct, frozen=True, tag=True):
    """A tier's store has room for fewer blocks than it was to have: its disk is full, or it was opened only now."""

    tier: str
    blocks_max: int


TierEvent = BlocksKept | LoadWanted | LoadEnded | PutWanted | TierOpened | TierRests | TierShrunk
"""What a host's tiers hear."""
TierNews = BlocksKept | LoadEnded | TierOpened | TierRests | TierShrunk
"""Events of a tier's store, from the driver."""
KeepingCommand = StoreBlocks | DropBlocks | LoadBlocks | PutEnded
"""What they say."""


class FromTier(Struct, frozen=True, tag=True):
    """An event of a tier's store on a host."""

    host: HostId
    news: TierNews
