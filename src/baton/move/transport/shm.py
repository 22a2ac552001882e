"""Bytes between processes of one machine: the source's memory is mapped once, and copied from like our own.

The source hands out its memfd's descriptor, opened again for reading only, to processes of the same user. No byte goes
through the kernel. A pull asks the source whether the offer is valid, before the copy and after it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.core.errors import TransferError
from baton.move.copies import Copy, fastest_copy
from baton.move.ipc.lending import listening_as, machine, shares_machine
from baton.move.transport.asker import Inquiry
from baton.move.transport.copying import Copier, no_interrupt
from baton.move.transport.listener import answering
from baton.move.transport.offers import Source
from baton.move.transport.peers import Peers
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.pulling import PiecewisePull
from baton.move.transport.shm_peer import ShmPeer
from baton.move.transport.shm_source import serve_maps

_CONNECTIONS_MAX = 512


class ShmTransport:
    """Implements `Transport`. Memory that is offered over it was registered with its descriptor."""

    name = "shm"

    def __init__(
        self,
        listen: str | None = None,
        *,
        threads: int = 2,
        copy: Copy | None = None,
        source: Source | None = None,
    ) -> None:
        """Answer under the name `listen`, or one that nobody else has: an abstract Unix socket, which leaves no file.

        Raises TransferError where the name is taken.
        """
        self._owned = source is None
        self._source = source or Source()
        self._copier = Copier(threads, copy or fastest_copy())
        self._peers = Peers(self._meet)
        name = listen or f"baton-kv-{secrets.token_hex(8)}"
        self.address = f"{machine()}/{name}"
        self._listener = answering(
            _listening(name),
            lambda connection: serve_maps(self._source, connection),
            _CONNECTIONS_MAX,
        )

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        """See `Transport.register`."""
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """See `Transport.offer`. Nothing travels, so there is nothing to check."""
        ticket = self._source.offer(extents, lease_s=lease_s, checksum=checksum, way=self)
        missing = {extent.region for extent in extents} - self._source.descriptors.keys()
        if missing:
            self._source.offers.withdraw(ticket)
            raise TransferError(
                f"region {min(missing)} was registered without a descriptor, so nobody can map it;"
                " register it with one, or offer over tcp"
            )
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """See `Transport.withdraw`."""
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        """See `Transport.pull`."""
        target = self._source.memories.target_of(ticket, into, name=self.name)
        peer, inquiry = self._peers.at(ticket.address), Inquiry(ticket)
        pull = PiecewisePull(ticket, target, interrupt=no_interrupt, check=lambda: peer.check(inquiry))
        self._copier.start(pull, lambda: self._copier.from_spread(pull, peer.open(inquiry)))
        return pull

    @contextmanager
    def borrow(self, ticket: Ticket) -> Iterator[list[memoryview]]:
        """Read an offer where it lies, without a copy: the views are of the source's own memory.

        On leaving, raises TransferError where the offer has ended meanwhile: then forget what was read. Let go of the
        views before `close`.
        """
        peer, inquiry = self._peers.at(ticket.address), Inquiry(ticket)
        spread = peer.open(inquiry)
        yield spread.cut(0, spread.size_bytes)
        peer.check(inquiry)

    def close(self) -> None:
        """See `Transport.close`."""
        self._peers.hang_up()
        self._copier.close()
        self._listener.close()
        self._peers.close()
        if self._owned:
            self._source.close()

    def reaches(self, address: str) -> bool:
        """Tell whether a source at this address is on this machine and lends us its memory."""
        return shares_machine(address) and self._peers.at(address).lends()

    def _meet(self, address: str) -> ShmPeer:
        if not shares_machine(address):
            raise TransferError(f"{address!r} is on another machine than {self.address!r}; pull over tcp")
        return ShmPeer(address.partition("/")[2])


def _listening(name: str) -> socket.socket:
    try:
        return listening_as(name)
    except OSError as error:
        raise TransferError(f"cannot answer under the name {name!r}: {error}; choose another name") from error
