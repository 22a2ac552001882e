"""What a source has offered, and to whom it says no."""

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


class Answer(IntEnum):
    """What a source says to a request. Goes over wires: numbers stay what they are."""

    FINE = 0
    RESTARTED = 1
    ENDED = 2
    SECRET = 3
    RANGE = 4
    BUSY = 5
    UNSHARED = 6
    STRANGER = 7


REFUSALS = {
    Answer.RESTARTED: "the source has restarted since it gave the ticket; ask for a new one",
    Answer.ENDED: "the offer was withdrawn, or its lease has ended; ask for a new ticket, or for a longer lease",
    Answer.SECRET: "the ticket's secret is wrong; use the ticket as the source gave it",
    Answer.RANGE: "the ticket does not say what the source has offered; use the ticket as the source gave it",
    Answer.BUSY: "the source has as many connections as it may have; raise its connections_max",
    Answer.STRANGER: "it lends memory to processes of its own user only; run both as one user, or pull over tcp",
    Answer.UNSHARED: "the source's memory has no descriptor; register it with one, or pull over tcp",
}


@dataclass(frozen=True, slots=True)
class Offer:
    """Extents that may be read until the lease ends."""

    spread: Spread
    extents: tuple[Extent, ...]
    digest: int
    """Of the extents: by which a ticket's are told to be the same."""
    secret: bytes
    until_s: float
    checksum: bool

    def answer_to(self, extents: Sequence[Extent]) -> Answer:
        """Compare what a ticket says with what was offered."""
        return Answer.FINE if tuple(extents) == self.extents else Answer.RANGE


class Way(Protocol):
    """What a ticket says of the transport that it goes by."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...


class Source:
    """What a host lets others read: its registered memories, and what of them is offered. Transports may share one."""

    def __init__(self, now_s: Callable[[], float] = real_now_s) -> None:
        self.memories = Memories()
        self.descriptors: dict[int, int] = {}
        """Of regions that can be mapped: for reading only, and ours."""
        self.offers = Offers(self.memories, now_s)
        self._lock = threading.Lock()

    def register(self, memory: Memory, *, descriptor: int | None) -> int:
        """See `Transport.register`."""
        with self._lock:
            region = self.memories.register(memory)
            if descriptor is not None and sys.platform == "linux":
                self.descriptors[region] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            return region

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool, way: Way) -> Ticket:
        """See `Transport.offer`; `way` is the transport that serves it."""
        return self.offers.add(extents, lease_s=lease_s, checksum=checksum, transport=way.name, address=way.address)

    def close(self) -> None:
        """End every offer and let the memories go. Nobody may read them any more."""
        self.offers.close()
        self.memories.close()
        with self._lock:
            while self.descriptors:
                os.close(self.descriptors.popitem()[1])


class Offers:
    """The offers of one source, under one epoch."""

    def __init__(self, memories: Memories, now_s: Callable[[], float]) -> None:
        self.epoch = secrets.randbits(63)
        self._memories = memories
        self._now_s = now_s
        self._lock = threading.Lock()
        self._standing: dict[int, Offer] = {}
        self._ends: list[tuple[float, int]] = []
        """Every lease's end, the earliest first. May name offers that are withdrawn."""
        self._number = 0

    def add(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool, transport: str, address: str) -> Ticket:
        """See `Transport.offer`."""
        spread = self._memories.spread(extents)
        secret, until_s = secrets.token_bytes(SECRET_BYTES), self._now_s() + lease_s
        offer = Offer(spread, tuple(extents), digest(extents), secret, until_s, checksum)
        with self._lock:
            self._forget_ended()
            if len(self._standing) >= OFFERS_MAX:
                raise TransferError(f"{OFFERS_MAX} offers stand already; withdraw those that were pulled")
            self._number += 1
            number = self._number
            self._standing[number] = offer
            heapq.heappush(self._ends, (offer.until_s, number))
        return Ticket(
            transport=transport, address=address, epoch=self.epoch, number=number, secret=offer.secret,
            extents=offer.extents, checksum=checksum,
        )  # fmt: skip

    def withdraw(self, ticket: Ticket) -> None:
        """See `Transport.withdraw`. Who is reading learns of it when it looks again after its last byte."""
        with self._lock:
            if ticket.epoch == self.epoch:
                self._standing.pop(ticket.number, None)

    def find(self, epoch: int, number: int, secret: bytes) -> Offer | Answer:
        """Look up an offer that stands, for somebody who proves to have the ticket."""
        if epoch != self.epoch:
            return Answer.RESTARTED
        with self._lock:
            offer = self._standing.get(number)
        if offer is None or offer.until_s <= self._now_s():
            return Answer.ENDED
        return offer if hmac.compare_digest(offer.secret, secret) else Answer.SECRET

    def stands(self, number: int) -> bool:
        """Tell whether what was read up to now was still offered."""
        with self._lock:
            offer = self._standing.get(number)
        return offer is not None and offer.until_s > self._now_s()

    def close(self) -> None:
        """End all."""
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
