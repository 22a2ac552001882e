"""The side that maps: one connection to a source, and the regions of it that are mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading

from baton.core.errors import TransferError
from baton.transfer.extents import Spread, collate
from baton.transfer.listener import hang_up, limit_waits
from baton.transfer.offers import REFUSALS, SECRET_BYTES, Answer
from baton.transfer.port import Ticket
from baton.transfer.pulling import CLOSED
from baton.transfer.shm_source import digest, is_ours
from baton.transfer.wire import ANSWER_BYTES, BrokenStreamError, Verb, receive_answer, request_of, unpack_answer

_STALL_S = 15.0
"""A source that does not answer for so long hangs."""

_TEST_S = 1.0
"""The first time: there is another way to a source that hangs."""

_F_GET_SEALS = 1034
_SEAL_SHRINK = 2


class ShmPeer:
    """A source on this machine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._stall_s = _STALL_S
        self._closed = False
        self._gone = False
        """Nobody answered the last time."""
        self._epoch: int | None = None
        self._regions: dict[int, memoryview] = {}

    def open(self, ticket: Ticket) -> Spread:
        """Find what is offered in our mapping of the source's memory. Raises TransferError where it is not."""
        with self._lock:
            self._ask(ticket, Verb.CHECK, 0)
            if ticket.epoch != self._epoch:
                self._regions.clear()
                self._epoch = ticket.epoch
            places = [(self._region(ticket, extent.region), extent) for extent in collate(ticket.extents)]
        return Spread(places)

    def check(self, ticket: Ticket) -> None:
        """Raise TransferError where the offer does not stand any more."""
        with self._lock:
            self._ask(ticket, Verb.CHECK, 0)

    def lends(self) -> bool:
        """Tell whether somebody answers who lends us memory: whatever he says to a ticket that nobody gave."""
        nobody = Ticket(transport="shm", address="", epoch=0, number=0, secret=bytes(SECRET_BYTES), extents=())
        try:
            with self._lock:
                self._stall_s = _TEST_S
                return self._exchange(nobody, Verb.CHECK, 0)[0] is not Answer.STRANGER
        except TransferError:
            return False
        finally:
            self._stall_s = _STALL_S
            if self._connection is not None:
                limit_waits(self._connection, receive_s=_STALL_S, send_s=_STALL_S)

    def hang_up(self) -> None:
        """Ask nothing more, and wake up whoever waits for an answer."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    def close(self) -> None:
        """Hang up and unmap. What is borrowed stays mapped until its views are gone."""
        with self._lock:
            self._disconnect()
            self._regions.clear()

    def close_if_gone(self) -> bool:
        """Close a peer whose process has ended. Returns whether it had."""
        with self._lock:
            gone = self._gone if self._connection is None else _hung_up(self._connection)
        if gone:
            self.close()
        return gone

    def _region(self, ticket: Ticket, region: int) -> memoryview:
        if region not in self._regions:
            descriptor = self._ask(ticket, Verb.MAP, region)
            assert descriptor is not None
            try:
                self._regions[region] = _mapped(descriptor)
            finally:
                os.close(descriptor)
        return self._regions[region]

    def _ask(self, ticket: Ticket, verb: Verb, region: int) -> int | None:
        """Ask about an offer. Returns a descriptor where one was asked for."""
        answer, epoch, descriptor = self._exchange(ticket, verb, region)
        if answer is not Answer.FINE or epoch != ticket.epoch:
            raise TransferError(
                f"the source {self._name!r} refuses: {REFUSALS.get(answer, REFUSALS[Answer.RESTARTED])}"
            )
        return descriptor

    def _exchange(self, ticket: Ticket, verb: Verb, region: int) -> tuple[Answer, int, int | None]:
        """Ask, over a new connection where the old one is broken."""
        request = request_of(ticket, verb, digest(ticket.extents), region).packed()
        for fresh in (False, True):
            if self._closed:
                break
            try:
                if fresh or self._connection is None:
                    self._connect()
                assert self._connection is not None
                self._connection.sendall(request)
                return _receive(self._connection, verb)
            except OSError as error:
                self._disconnect()
                self._gone = fresh
                if fresh:
                    raise TransferError(
                        f"the source {self._name!r} on this machine does not answer: {error}; see whether it runs"
                    ) from error
        raise TransferError(CLOSED)

    def _connect(self) -> None:
        self._disconnect()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        limit_waits(connection, receive_s=self._stall_s, send_s=self._stall_s)
        try:
            connection.connect("\0" + self._name)
            if not is_ours(connection):
                raise BrokenStreamError("it belongs to another user")
        except OSError:
            connection.close()
            raise
        self._connection = connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _receive(connection: socket.socket, verb: Verb) -> tuple[Answer, int, int | None]:
    if verb is not Verb.MAP:
        answer, epoch, _ = receive_answer(connection)
        return answer, epoch, None
    raw, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    answer, epoch, _ = unpack_answer(raw)
    if answer is Answer.FINE and not descriptors:
        raise BrokenStreamError("an answer without its descriptor")
    return answer, epoch, descriptors[0] if descriptors else None


def _mapped(descriptor: int) -> memoryview:
    """Map a source's memory for reading. A file that could shrink under us would kill this process: it is refused."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        seals = 0  # no memfd at all
    if not seals & _SEAL_SHRINK:
        raise TransferError("the source's memory file is not sealed against shrinking; register a sealed memfd")
    size_bytes = os.fstat(descriptor).st_size
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))


def _hung_up(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
