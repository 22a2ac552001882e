"""Bytes within one process: for tests, and for several arenas of one host agent. Nothing is checked less."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from baton.core.errors import TransferError
from baton.move.copies import Copy, fastest_copy
from baton.move.transport.copying import Copier, no_interrupt
from baton.move.transport.extents import Spread
from baton.move.transport.offers import REFUSALS, Answer, Offers, Source
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.pulling import CLOSED, PiecewisePull


class MemoryExchange:
    """Where the transports of one process find each other, by address."""

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
        """See `Transport.register`."""
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """See `Transport.offer`. Nothing travels, so there is nothing to check."""
        return self.offers.add(extents, lease_s=lease_s, checksum=checksum, transport=self.name, address=self.address)

    def withdraw(self, ticket: Ticket) -> None:
        """See `Transport.withdraw`."""
        self.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        """See `Transport.pull`."""
        if self._closed:
            raise TransferError(CLOSED)
        target = self._source.memories.target_of(ticket, into, name=self.name)
        pull = PiecewisePull(ticket, target, interrupt=no_interrupt, check=lambda: self._check(ticket))
        self._copier.start(pull, lambda: self._copier.from_spread(pull, self._open(ticket, pull)))
        return pull

    def close(self) -> None:
        """See `Transport.close`. Waits for those who read our memory to come to their end."""
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
            raise TransferError(f"there is no source at {ticket.address} in this process; it was closed, or never was")
        pull.then(source.leave)
        return offered(source.offers, ticket)

    def _check(self, ticket: Ticket) -> None:
        source = self._exchange.sources.get(ticket.address)
        if source is None:
            raise TransferError(f"the source was closed under the pull: {REFUSALS[Answer.ENDED]}")
        offered(source.offers, ticket)

    def enter(self) -> bool:
        """Come in as a reader of our memory. False: it is closed."""
        with self._changed:
            self._readers += not self._closed
            return not self._closed

    def leave(self) -> None:
        """Go as a reader."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()


def offered(offers: Offers, ticket: Ticket) -> Spread:
    """What a ticket stands for, if it does."""
    offer = offers.find(ticket.epoch, ticket.number, ticket.secret)
    answer = offer if isinstance(offer, Answer) else offer.answer_to(ticket.extents)
    if isinstance(offer, Answer) or answer is not Answer.FINE:
        raise TransferError(f"the source refuses: {REFUSALS[answer]}")
    return offer.spread
