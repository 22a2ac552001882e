"""The port that every transport implements: a consumer pulls bytes from a source's memory, under a lease.

The source offers extents of its memory and gets a ticket, which is sent to the consumer by other means. The consumer
pulls them into extents of its own memory. The transport checks that the offer is valid before bytes are read and again
after: bytes of an offer that has ended meanwhile, or of a source that has restarted, are never accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from baton.move.transport.staged import StagedMemory

Memory = memoryview | StagedMemory
"""Memory that transports read and write: host memory, or device memory through staging buffers."""


class Extent(Struct, frozen=True, array_like=True):
    """A run of bytes in one registered memory."""

    offset_bytes: int
    size_bytes: int
    region: int = 0
    """Number of the registered memory, as returned by `register`."""


class Ticket(Struct, frozen=True, kw_only=True):
    """Permission to pull the extents of an offer, until it is withdrawn or its lease ends."""

    transport: str
    """Name of the transport that can pull it."""
    address: str
    """Address of the source, in that transport's format."""
    epoch: int
    """Epoch of the source. It changes with each restart."""
    number: int
    """Number of the offer, unique within the epoch."""
    secret: bytes
    """Known to the source and the ticket holder only."""
    extents: tuple[Extent, ...]
    """Offered bytes, in order."""
    checksum: bool = False
    """The source sends a checksum of the bytes, and the consumer compares it."""


class Pull(Protocol):
    """One pull under way. Its bytes arrive in the background."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end. Return the number of bytes moved.

        Raises TransferError if the pull failed, was cancelled, or takes longer than `timeout_s`. Except after a
        timeout, no thread writes into the target's extents any more.
        """
        ...

    def cancel(self) -> None:
        """Cancel the pull. When this returns, no thread writes into the target's extents any more."""
        ...

    def then(self, call: Callable[[], None]) -> None:
        """Call a function once at the end of the pull, from any thread; at once if the pull has ended.

        The function must neither block nor raise, because a thread of the transport calls it. `wait` does not block
        inside it.
        """
        ...


class Transport(Protocol):
    """Moves bytes between registered memories of two processes. Any thread may call every method."""

    name: str

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        """Register a writable memory until `close`. Return its region number, counted from 0.

        `descriptor` belongs to the file that the memory maps (an arena's memfd), so that other processes of this
        machine can map it. The caller keeps it.
        """
        ...

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """Let the ticket holder read these extents for at most `lease_s` seconds.

        Raises TransferError if an extent lies outside of its region, or if there are too many offers.
        """
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """End an offer. Its memory may be written afterwards: no pull accepts bytes that it reads later.

        Harmless for an offer that has ended.
        """
        ...

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> Pull:
        """Begin to fill extents of local memory, in order, with the ticket's bytes.

        The extents of both sides may be cut differently, but must have the same total size. Raises TransferError if the
        sizes differ, or if extents of the target overlap or lie outside of their regions.
        """
        ...

    def close(self) -> None:
        """End every pull and offer, and release the memories. No thread, socket or file is left."""
        ...
