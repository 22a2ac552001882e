"""The offers of a source: extents of its registered memory that ticket holders may read until a lease ends."""

from __future__ import annotations

import heapq
import hmac
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from baton.core.errors import TransferError
from baton.move.clock import now_s as real_now_s
from baton.move.transport.extents import Memories, Spread, digest
from baton.move.transport.port import Extent, Memory, Ticket

OFFERS_MAX = 1 << 16
SECRET_BYTES = 16


class OfferStatus(IntEnum):
    """A source's answer to a request. The numbers are part of the wire format."""

    VALID = 0
    RESTARTED = 1
    ENDED = 2
    OTHER_SECRET = 3
    OTHER_RANGE = 4
    BUSY = 5
    NOT_SHARED = 6
    OTHER_USER = 7
    OTHER_PROTECTION = 8


REFUSALS = {
    OfferStatus.RESTARTED: "the source has restarted since it gave the ticket; ask for a new one",
    OfferStatus.ENDED: "the offer was withdrawn, or its lease has ended; ask for a new ticket, or for a longer lease",
    OfferStatus.OTHER_SECRET: "the ticket's secret is wrong; use the ticket as the source gave it",
    OfferStatus.OTHER_RANGE: "the ticket's extents are not those offered; use the ticket as the source gave it",
    OfferStatus.BUSY: "the source has reached its limit of connections; raise its connections_max",
    OfferStatus.OTHER_USER: "it lends memory to processes of its own user only; run both as one user, or use tcp",
    OfferStatus.OTHER_PROTECTION: "it protects connections in another way; the server sets the secret and"
    " hosts.encrypt_kv of all hosts: let both join the same server",
    OfferStatus.NOT_SHARED: "the source's memory has no descriptor; register it with one, or pull over tcp",
}


@dataclass(frozen=True, slots=True)
class Offer:
    """Extents that may be read until the lease ends."""

    spread: Spread
    extents: tuple[Extent, ...]
    digest: int
    """Digest of the extents, to compare them with a ticket's."""
    secret: bytes
    until_s: float
    checksum: bool

    def check_extents(self, extents: Sequence[Extent]) -> OfferStatus:
        """Return whether a ticket's extents are the offered ones."""
        return OfferStatus.VALID if tuple(extents) == self.extents else OfferStatus.OTHER_RANGE


class Endpoint(Protocol):
    """Name and address of a transport, as tickets carry them."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...


class Source:
    """The registered memories of a host and the offers of them. Several transports may share one source."""

    def __init__(self, now_s: Callable[[], float] = real_now_s) -> None:
        self.memories = Memories()
        self.descriptors: dict[int, int] = {}
        """Own read-only descriptors of the regions that other processes can map."""
        self.offers = Offers(self.memories, now_s)
        self._lock = threading.Lock()

    def register(self, memory: Memory, *, descriptor: int | None) -> int:
        with self._lock:
            region = self.memories.register(memory)
            if descriptor is not None and sys.platform == "linux":
                self.descriptors[region] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            return region

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool, endpoint: Endpoint) -> Ticket:
        """Offer extents over the transport `endpoint`."""
        return self.offers.add(
            extents, lease_s=lease_s, checksum=checksum, transport=endpoint.name, address=endpoint.address
        )

    def close(self) -> None:
        """End every offer and release the memories. All transports must be closed before."""
        self.offers.close()
        self.memories.close()
        with self._lock:
            while self.descriptors:
                os.close(self.descriptors.popitem()[1])


class Offers:
    """The offers of one source. Its epoch is random, so that a restarted source never accepts an old ticket."""

    def __init__(self, memories: Memories, now_s: Callable[[], float]) -> None:
        self.epoch = secrets.randbits(63)
        self._memories = memories
        self._now_s = now_s
        self._lock = threading.Lock()
        self._standing: dict[int, Offer] = {}
        self._ends: list[tuple[float, int]] = []
        """Heap of (end of the lease, number). It may contain withdrawn offers."""
        self._number = 0

    def add(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool, transport: str, address: str) -> Ticket:
        """Add an offer. Raises TransferError if an extent lies outside of its region, or at `OFFERS_MAX`."""
        spread = self._memories.spread(extents)
        secret, until_s = secrets.token_bytes(SECRET_BYTES), self._now_s() + lease_s
        offer = Offer(spread, tuple(extents), digest(extents), secret, until_s, checksum)
        with self._lock:
            self._forget_ended()
            if len(self._standing) >= OFFERS_MAX:
                raise TransferError(f"there are {OFFERS_MAX} offers already; withdraw those that were pulled")
            self._number += 1
            number = self._number
            self._standing[number] = offer
            heapq.heappush(self._ends, (offer.until_s, number))
        return Ticket(
            transport=transport, address=address, epoch=self.epoch, number=number, secret=offer.secret,
            extents=offer.extents, checksum=checksum,
        )  # fmt: skip

    def withdraw(self, ticket: Ticket) -> None:
        """End an offer. A pull under way notices when it checks the offer after its last byte."""
        with self._lock:
            if ticket.epoch == self.epoch:
                self._standing.pop(ticket.number, None)

    def find(self, epoch: int, number: int, secret: bytes) -> Offer | OfferStatus:
        """Return a valid offer to a ticket holder, or the reason of the refusal."""
        if epoch != self.epoch:
            return OfferStatus.RESTARTED
        with self._lock:
            offer = self._standing.get(number)
        if offer is None or offer.until_s <= self._now_s():
            return OfferStatus.ENDED
        return offer if hmac.compare_digest(offer.secret, secret) else OfferStatus.OTHER_SECRET

    def is_valid(self, number: int) -> bool:
        """Return whether the offer is still valid. If it is, all bytes that were read until now are valid."""
        with self._lock:
            offer = self._standing.get(number)
        return offer is not None and offer.until_s > self._now_s()

    def close(self) -> None:
        """End all offers."""
        with self._lock:
            self._standing.clear()
            self._ends.clear()

    def _forget_ended(self) -> None:
        now_s = self._now_s()
        while self._ends and (self._ends[0][0] <= now_s or self._ends[0][1] not in self._standing):
            _, number = heapq.heappop(self._ends)
            self._standing.pop(number, None)
        if len(self._ends) > 2 * OFFERS_MAX:
            self._ends = [end for end in self._ends if end[1] in self._standing]
            heapq.heapify(self._ends)
