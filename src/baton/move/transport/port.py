"""The port that every transport implements: the consumer pulls from the source's memory, under a lease.

The source offers extents of its memory and gets a ticket, which travels by any road to the consumer; the consumer pulls
them into extents of its own memory. Whether the offer still stands is asked before bytes are read and again after: what
was read of an offer that has ended meanwhile, or of a source that has restarted, is never taken for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from baton.move.transport.staged import StagedMemory

Memory = memoryview | StagedMemory
"""What transports read and write: memory of the host, or of a device by way of it."""


class Extent(Struct, frozen=True, array_like=True):
    """A run of bytes in one registered memory."""

    offset_bytes: int
    size_bytes: int
    region: int = 0
    """Which registered memory: what `register` has returned."""


class Ticket(Struct, frozen=True, kw_only=True):
    """Permission to pull what a source has offered, until it is withdrawn or its lease ends."""

    transport: str
    """Name of the transport that can pull it."""
    address: str
    """Where the source answers, in that transport's own form."""
    epoch: int
    """Of the source's transport: another one after each restart."""
    number: int
    """Tells this offer from every other of that epoch."""
    secret: bytes
    """Known to the source and to whom it gave the ticket."""
    extents: tuple[Extent, ...]
    """What is offered, in order."""
    checksum: bool = False
    """The source sends a checksum of the bytes, and the consumer refuses them where it does not agree."""


class Pull(Protocol):
    """One pull under way. Its bytes arrive without the caller's help."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it is over. Returns the bytes moved.

        Raises TransferError where it failed, was cancelled, or is not over in time. After any of these but the last,
        nothing writes into the target's extents any more.
        """
        ...

    def cancel(self) -> None:
        """End it. Returns when nothing writes into the target's extents any more. Harmless when it is over."""
        ...

    def then(self, call: Callable[[], None]) -> None:
        """Have this called once when it is over, from whatever thread ends it; at once where it is over already.

        For drivers that must not block: hand over to the event loop there, and `wait` will return or raise at once.
        It must neither block nor raise: a thread of the transport's would stop.
        """
        ...


class Transport(Protocol):
    """Moves bytes between registered memories of two processes. Every method may be called from any thread."""

    name: str

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        """Make a writable memory known. Returns its region number, counted from 0. It stays until `close`.

        `descriptor` is of the file that the memory maps from its first byte on (an arena's memfd): other processes of
        this machine can then map it. It stays the caller's.
        """
        ...

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """Let whoever has the ticket read these extents, for at most `lease_s` seconds.

        Raises TransferError where an extent lies outside of its region, or too many offers stand.
        """
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """End an offer. When this returns its memory may be written again: no pull takes bytes that it read later.

        Harmless for one that has ended.
        """
        ...

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> Pull:
        """Begin to fill extents of our memory, in order, with what the ticket offers.

        The two lists may be cut differently, but must hold the same number of bytes; ours must not overlap, nor leave
        their regions. Raises TransferError otherwise.
        """
        ...

    def close(self) -> None:
        """End every pull and offer, and let the memories go. No thread, socket or file is left when this returns."""
        ...
