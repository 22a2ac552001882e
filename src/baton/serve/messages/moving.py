"""Messages between a server and the mover of a host: orders for transfers, and their results."""

from __future__ import annotations

from msgspec import Struct

from baton.core.copies import LayerSpan
from baton.core.kv_config import TierConfig
from baton.core.tier_messages import DropBlocks, LoadBlocks, StoreBlocks, StoreEvent
from baton.core.types import BlockId, HostId, RequestId
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules
from baton.move.transport.port import Ticket
from baton.serve.messages.setup import Ping


class MoverSetup(Struct, frozen=True, kw_only=True, tag=True):
    """First message to a mover. The arena's descriptor is attached."""

    host: HostId
    arena_bytes: int
    device: str = "cpu"
    """`cpu`, or `cuda:N`: then the attached descriptor holds the arena's CUDA handles."""
    layout: KVLayout
    transports: tuple[str, ...]
    """Allowed transports, the best first."""
    listen: str
    """Address for other hosts. Without a port, a free one is chosen."""
    advertise: str
    """Address by which other hosts reach the mover. Empty: the address in `listen`."""
    tiers: tuple[TierConfig, ...] = ()
    """Tiers below the arena, the fastest first."""
    secret: bytes = b""
    """Secret of all movers of the cluster. A mover that reads KV must prove that it has the secret. Empty: none."""
    encrypt: bool = True
    """Whether KV between movers is encrypted, by the `secret`."""
    fingerprint: str = ""
    """Digest of everything that a block's bytes depend on, except its tokens."""


class CopySpec(Struct, frozen=True, kw_only=True):
    """Blocks to copy and the layouts on both sides. The fields are those of `CopyBlocks`."""

    read: tuple[BlockId, ...]
    write: tuple[BlockId, ...]
    first_token: int
    tokens: int
    source: KVLayout
    target: KVLayout
    layers: LayerSpan | None = None


class OfferBlocks(Struct, frozen=True, tag=True):
    """Offer the source blocks of a copy. The answer is BlocksOffered or OfferRefused."""

    number: int
    """Number that identifies the copy in all of its messages."""
    spec: CopySpec
    transport: str
    lease_s: float
    request_id: RequestId = RequestId("")
    """Request that owns the KV. A server of another engine finds the KV by this id instead of by block ids."""


class PullBlocks(Struct, frozen=True, tag=True):
    """Pull offered blocks into this arena. The answer is PullEnded in any case."""

    number: int
    ticket: Ticket
    spec: CopySpec


class WithdrawBlocks(Struct, frozen=True, tag=True):
    """End an offer. BlocksWithdrawn is the answer once the blocks may be written again, or if the copy is unknown."""

    number: int


class CancelPull(Struct, frozen=True, tag=True):
    """Cancel a pull. PullEnded follows, unless it was sent already."""

    number: int


class ListTiers(Struct, frozen=True, tag=True):
    """List the blocks that earlier runs have left in the tiers. The answer is TierOpened for each tier."""


class MoverReady(Struct, frozen=True, kw_only=True, tag=True):
    """The mover has mapped the arena and listens."""

    pid: int
    machine: str
    """Id of the machine that the mover runs on. Movers of one machine can share memory."""
    transports: tuple[str, ...]
    """Usable transports, the best first."""
    address: str
    tiers: tuple[TierRules, ...] = ()
    """Tiers below the host's arena."""


class MoverFailed(Struct, frozen=True, tag=True):
    """The mover has failed; it ends after this message."""

    reason: str


class BlocksOffered(Struct, frozen=True, tag=True):
    number: int
    ticket: Ticket


class OfferRefused(Struct, frozen=True, tag=True):
    number: int
    error: str


class BlocksWithdrawn(Struct, frozen=True, tag=True):
    number: int


class PullEnded(Struct, frozen=True, tag=True):
    """A pull is over: no thread writes into its blocks any more."""

    number: int
    landed: bool
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class MoverPong(Struct, frozen=True, tag=True):
    """Answer of a mover to a Ping. A mover that does not answer in time is considered hung and killed."""


TierOrder = StoreBlocks | DropBlocks | LoadBlocks | ListTiers
CopyOrder = OfferBlocks | PullBlocks | WithdrawBlocks | CancelPull
MoverOrder = CopyOrder | TierOrder
CopyEvent = BlocksOffered | OfferRefused | BlocksWithdrawn | PullEnded
MoverEvent = CopyEvent | StoreEvent
ToMoverMessage = MoverSetup | MoverOrder | Ping
FromMoverMessage = MoverReady | MoverFailed | MoverEvent | MoverPong
