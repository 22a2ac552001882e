"""Events and commands about the tiers below an arena: between a host's pool and the mover of bytes to its stores.

Cached blocks are written in the background, and read when that is cheaper than a recompute. No step and no request
waits for such a write, and a read that fails is a miss.
"""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, BlockId, HostId, RequestId, WorkerId


class StoreBlocks(Struct, frozen=True, tag=True):
    """Write blocks of the arena into a tier. They stay in the arena until BlocksKept answers."""

    number: int
    """Unique among the writes of the host's pool."""
    host: HostId
    tier: str
    hashes: tuple[BlockHash, ...]
    """In the order of the prompt, if the blocks belong to one."""
    blocks: tuple[BlockId, ...]


class BlocksKept(Struct, frozen=True, tag=True):
    """Answer to StoreBlocks: the write has ended, and no thread reads its blocks any more."""

    number: int
    kept: tuple[bool, ...]
    """For each block, whether the tier has stored it."""


class DropBlocks(Struct, frozen=True, tag=True):
    """Forget blocks of a tier: it is full, or they were damaged."""

    host: HostId
    tier: str
    hashes: tuple[BlockHash, ...]


class LoadWanted(Struct, frozen=True, tag=True):
    """Read KV from the tiers into blocks that were granted to a request."""

    request_id: RequestId
    number: int
    hashes: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    """Destination of each block."""
    back: bool = False
    """True for the swap-in of a preempted request."""


class LoadBlocks(Struct, frozen=True, tag=True):
    """Read blocks into the arena. LoadEnded always answers, at the latest after the driver's time limit."""

    request_id: RequestId
    number: int
    host: HostId
    tiers: tuple[str, ...]
    """The tier of each block."""
    hashes: tuple[BlockHash, ...]
    write: tuple[BlockId, ...]
    """Destination of each block."""
    back: bool = False
    """As in `LoadWanted`. Such a read belongs to no transfer."""


class LoadEnded(Struct, frozen=True, tag=True):
    """Answer to LoadBlocks: the read has ended, and no thread writes into its blocks any more."""

    request_id: RequestId
    number: int
    whole: tuple[bool, ...]
    """For each block, whether its bytes are complete and verified."""
    took_s: dict[str, float] = {}
    """By tier: time from the command to the last byte, including the wait for earlier reads."""
    damaged: dict[str, int] = {}
    """By tier: damaged blocks found since the last report."""


class ReadBackWanted(Struct, frozen=True, tag=True):
    """A preempted request has blocks again, and tiers have some of its KV: decide whether to read or recompute it.

    ReadBack answers while the same event is handled. The worker gets its grant only after that.
    """

    request_id: RequestId
    host: HostId
    worker: WorkerId
    hashes: tuple[BlockHash, ...]
    """Hashes of the leading full blocks that it had, as far as its new blocks have room for them."""
    beside: int = 0
    """Number of other requests with blocks on the same worker."""


class ReadBack(Struct, frozen=True, tag=True):
    """Read the leading `tokens` of a preempted request; the worker recomputes the rest."""

    request_id: RequestId
    number: int
    """Number of the read, as in `LoadBlocks`."""
    tokens: int
    """Leading tokens, including those in the arena. Nothing is read if the arena has all of them."""


class PutWanted(Struct, frozen=True, tag=True):
    """Write these blocks into a tier before all other waiting blocks: another host continues the request from there."""

    request_id: RequestId
    number: int | None
    """Number of the put, repeated in PutEnded. None: no answer is needed."""
    tier: str
    hashes: tuple[BlockHash, ...]
    """In the order of the prompt."""
    run_blocks: int
    """Maximum blocks per write: the target can read one run while the next one is written."""


class PutEnded(Struct, frozen=True, tag=True):
    """Each block of a put is either in the tier or was given up."""

    request_id: RequestId
    number: int


class TierOpened(Struct, frozen=True, tag=True):
    """A tier has blocks from an earlier run, or from other hosts."""

    tier: str
    hashes: tuple[BlockHash, ...]
    """Oldest first."""
    more: bool = False
    """Further events follow: a long list is sent in pieces, so that it does not delay other events."""


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
    """Blocks that can be read."""
    blocks_writing: int
    stored_blocks: int = 0
    refused_blocks: int = 0
    """Blocks that the store did not keep."""
    loaded_blocks: int = 0
    missed_blocks: int = 0
    """Blocks that a read found missing or damaged."""
    skipped_blocks: int = 0
    """Blocks that were not written, because too many were waiting or every slot was in use."""


class TierShrunk(Struct, frozen=True, tag=True):
    """A tier's store has room for fewer blocks than announced: its disk is full, or it was opened late."""

    tier: str
    blocks_max: int


TierEvent = BlocksKept | LoadWanted | LoadEnded | PutWanted | TierOpened | TierRests | TierShrunk
"""Events for a host's tiers."""
StoreEvent = BlocksKept | LoadEnded | TierOpened | TierRests | TierShrunk
"""Events of a tier's store, from the driver."""
TierCommand = StoreBlocks | DropBlocks | LoadBlocks | PutEnded
"""Commands of a host's tiers."""


class FromTier(Struct, frozen=True, tag=True):
    """An event of a tier's store on a host."""

    host: HostId
    event: StoreEvent
