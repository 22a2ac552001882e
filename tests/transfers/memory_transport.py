"""Transport within one process, for tests. It checks everything that the other transports check."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from baton.core.errors import TransferError
from baton.move.copies import Copy, fastest_copy
from baton.move.transport.copier import Copier, no_interrupt
from baton.move.transport.extents import Spread
from baton.move.transport.offers import REFUSALS, Offers, OfferStatus, Source
from baton.move.transport.piecewise_pull import CLOSED, PiecewisePull
from baton.move.transport.port import Extent, Memory, Ticket


class MemoryExchange:
    """The transports of one process, by address."""

    def __init__(self) -> None:
        self.sources: dict[str, MemoryTransport] = {}


class MemoryTransport:
    """Implements `Transport`."""

    name = "memory"

    def __init__(
        self,
        exchange: MemoryExchange,
        *,
        threads: int = 2,
        copy: Copy | None = None,
        source: Source | None = None,
    ) -> None:
        self._exchange = exchange
        self._owned = source is None
        self._source = source or Source()
        self.offers = self._source.offers
        self._copier = Copier(threads, copy or fastest_copy())
        self._changed = threading.Condition()
        self._readers = 0
        self._closed = False
        self.address = secrets.token_hex(8)
        exchange.sources[self.address] = self

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """Offer extents. `checksum` has no effect, because no byte travels."""
        return self.offers.add(extents, lease_s=lease_s, checksum=checksum, transport=self.name, address=self.address)

    def withdraw(self, ticket: Ticket) -> None:
        self.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        if self._closed:
            raise TransferError(CLOSED)
        target = self._source.memories.target_of(ticket, into, name=self.name)
        pull = PiecewisePull(ticket, target, interrupt=no_interrupt, check=lambda: self._check(ticket))
        self._copier.start(pull, lambda: self._copier.from_spread(pull, self._open(ticket, pull)))
        return pull

    def close(self) -> None:
        """End every pull and offer. Wait for consumers that are reading this transport's memory."""
        self._exchange.sources.pop(self.address, None)
        self.offers.close()
        self._copier.close()
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._readers)
        if self._owned:
            self._source.close()

    def _open(self, ticket: Ticket, pull: PiecewisePull) -> Spread:
        source = self._exchange.sources.get(ticket.address)
        if source is None or not source.enter():
            raise TransferError(f"there is no source at {ticket.address} in this process; it may have been closed")
        pull.then(source.leave)
        return offered_bytes(source.offers, ticket)

    def _check(self, ticket: Ticket) -> None:
        source = self._exchange.sources.get(ticket.address)
        if source is None:
            raise TransferError(f"the source was closed during the pull: {REFUSALS[OfferStatus.ENDED]}")
        offered_bytes(source.offers, ticket)

    def enter(self) -> bool:
        """Register a reader of this transport's memory. Return False if the transport is closed."""
        with self._changed:
            self._readers += not self._closed
            return not self._closed

    def leave(self) -> None:
        """Unregister a reader."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()


def offered_bytes(offers: Offers, ticket: Ticket) -> Spread:
    """Return the bytes that a ticket offers. Raises TransferError if the offer is not valid."""
    offer = offers.find(ticket.epoch, ticket.number, ticket.secret)
    status = offer if isinstance(offer, OfferStatus) else offer.check_extents(ticket.extents)
    if isinstance(offer, OfferStatus) or status is not OfferStatus.VALID:
        raise TransferError(f"the source refuses: {REFUSALS[status]}")
    return offer.spread
