"""What a server and a host's mover say to each other about copies of KV blocks."""

from __future__ import annotations

from msgspec import Struct

from baton.core.config import TierConfig
from baton.core.copies import LayerSpan
from baton.core.keeping import DropBlocks, LoadBlocks, StoreBlocks, TierNews
from baton.core.types import BlockId, HostId
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules
from baton.move.transport.port import Ticket
from baton.serve.messages.setup import Ping


class MoverSetup(Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a mover, with the arena's descriptor beside it."""

    host: HostId
    arena_bytes: int
    device: str = "cpu"
    """`cpu`, or `cuda:N`: then the descriptor beside the message holds the arena's CUDA handle."""
    layout: KVLayout
    transports: tuple[str, ...]
    """What it may offer and pull by, the best first."""
    listen: str
    """Address that it serves other hosts on. Without a port, one is chosen."""
    advertise: str
    """Address that they reach it by. Empty: the same."""
    tiers: tuple[TierConfig, ...] = ()
    """Stores below the arena, the fastest first."""
    fingerprint: str = ""
    """What bytes in them depend on, but for their tokens."""


class CopySpec(Struct, frozen=True, kw_only=True):
    """Which KV goes from where to where, and how it lies on both sides. See `CopyBlocks`."""

    read: tuple[BlockId, ...]
    write: tuple[BlockId, ...]
    first_token: int
    tokens: int
    source: KVLayout
    target: KVLayout
    layers: LayerSpan | None = None


class OfferBlocks(Struct, frozen=True, tag=True):
    """Let the target of this copy read what it needs. Answered with BlocksOffered or OfferRefused."""

    number: int
    """Of the copy."""
    spec: CopySpec
    transport: str
    lease_s: float


class PullBlocks(Struct, frozen=True, tag=True):
    """Fill our blocks with what the ticket offers. Answered with PullEnded, whatever happens."""

    number: int
    ticket: Ticket
    spec: CopySpec


class WithdrawBlocks(Struct, frozen=True, tag=True):
    """End the offer. Answered with BlocksWithdrawn once nothing reads the blocks any more, known copy or not."""

    number: int


class CancelPull(Struct, frozen=True, tag=True):
    """End the pull. PullEnded follows, unless it is on its way already."""

    number: int


class ListTiers(Struct, frozen=True, tag=True):
    """Tell what earlier runs have left in the tiers: TierOpened of each."""


class MoverReady(Struct, frozen=True, kw_only=True, tag=True):
    """The mover has mapped the arena and listens."""

    pid: int
    machine: str
    """Tells the machine that it runs on from every other: two movers of one share memory."""
    transports: tuple[str, ...]
    """What it can offer and pull by, the best first."""
    address: str
    tiers: tuple[TierRules, ...] = ()
    """What is below its arena."""


class MoverFailed(Struct, frozen=True, tag=True):
    """The mover cannot go on; it ends after this message."""

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
    """Nothing writes into the blocks any more."""

    number: int
    landed: bool
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class MoverPong(Struct, frozen=True, tag=True):
    """Answers a Ping: a mover that does not in time hangs."""


TierOrder = StoreBlocks | DropBlocks | LoadBlocks | ListTiers
CopyOrder = OfferBlocks | PullBlocks | WithdrawBlocks | CancelPull
MoverOrder = CopyOrder | TierOrder
CopyNews = BlocksOffered | OfferRefused | BlocksWithdrawn | PullEnded
MoverNews = CopyNews | TierNews
ToMoverMessage = MoverSetup | MoverOrder | Ping
FromMoverMessage = MoverReady | MoverFailed | MoverNews | MoverPong
