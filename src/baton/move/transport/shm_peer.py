"""The side that maps: one connection to a source, and the regions of its memory that are mapped."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from dataclasses import dataclass

from baton.core.errors import TransferError
from baton.move.ipc.connections import limit_waits
from baton.move.ipc.lending import is_ours, mapped
from baton.move.transport.asker import Asker, Inquiry
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.offers import Answer
from baton.move.transport.wire import ANSWER_BYTES, BrokenStreamError, Verb, receive_answer, unpack_answer


class ShmPeer:
    """A source on this machine."""

    def __init__(self, name: str) -> None:
        self.asker = Asker(f"{name!r} on this machine", lambda stall_s: _connected(name, stall_s))
        self._lock = threading.Lock()
        self._mapping: _Mapping | None = None

    def open(self, inquiry: Inquiry) -> Spread:
        """Find what is offered in our mapping of the source's memory. Raises TransferError where it is not."""
        self.check(inquiry)
        ticket = inquiry.ticket
        with self._lock:
            if self._mapping is None or self._mapping.epoch != ticket.epoch:
                self._mapping = _Mapping(ticket.epoch, {})
            for region in {extent.region for extent in ticket.extents} - self._mapping.regions.keys():
                self._mapping.regions[region] = self._map(inquiry, region)
            return Spread(rows_of(ticket.extents), dict(self._mapping.regions))

    def check(self, inquiry: Inquiry) -> None:
        """Ask the source. Raises TransferError if the offer is not valid any more."""
        self.asker.ask(inquiry, Verb.CHECK, _receive)

    def lends(self) -> bool:
        """Tell whether somebody answers who lends us memory."""
        return self.asker.answers(_receive)

    def close(self) -> None:
        """Hang up and unmap. What is borrowed stays mapped until its views are gone."""
        self.asker.close()
        with self._lock:
            self._mapping = None

    def _map(self, inquiry: Inquiry, region: int) -> memoryview:
        descriptor = self.asker.ask(inquiry, Verb.MAP, _receive_descriptor, region)
        assert descriptor is not None
        try:
            return mapped(descriptor, mmap.PROT_READ)
        except ValueError as error:
            raise TransferError(str(error)) from None
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """What is mapped of one process."""

    epoch: int
    regions: dict[int, memoryview]


def _connected(name: str, stall_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        limit_waits(connection, receive_s=stall_s, send_s=stall_s)
        connection.connect("\0" + name)
        if not is_ours(connection):
            raise BrokenStreamError("it belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket) -> tuple[Answer, int, None]:
    answer, epoch, _ = receive_answer(connection)
    return answer, epoch, None


def _receive_descriptor(connection: socket.socket) -> tuple[Answer, int, int | None]:
    raw, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    answer, epoch, _ = unpack_answer(raw)
    if answer is Answer.FINE and not descriptors:
        raise BrokenStreamError("an answer without its descriptor")
    return answer, epoch, descriptors[0] if descriptors else None
