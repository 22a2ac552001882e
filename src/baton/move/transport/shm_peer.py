"""The side that maps: one connection to a source, and what of it is mapped: memories, and the board of its offers."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import TransferError
from baton.move.ipc.board import PostedRows
from baton.move.ipc.connections import limit_waits
from baton.move.ipc.lending import is_ours, mapped
from baton.move.transport.asker import Asker, Inquiry
from baton.move.transport.clock import now_s
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.offers import BOARD, POSTED, Answer
from baton.move.transport.wire import ANSWER_BYTES, BrokenStreamError, Verb, receive_answer, unpack_answer


class ShmPeer:
    """A source on this machine."""

    def __init__(self, name: str) -> None:
        self.asker = Asker(f"{name!r} on this machine", lambda stall_s: _connected(name, stall_s))
        self._lock = threading.Lock()
        """Of whoever maps more."""
        self._mapping: _Mapping | None = None
        """Replaced, never changed: read without the lock."""

    def open(self, inquiry: Inquiry) -> Spread:
        """Find what is offered in our mapping of the source's memory. Raises TransferError where it is not."""
        self.check(inquiry)
        ticket = inquiry.ticket
        with self._lock:
            if self._mapping is None or self._mapping.epoch != ticket.epoch:
                self._mapping = _Mapping(ticket.epoch, self._board(inquiry), {})
            missing = {extent.region for extent in ticket.extents} - self._mapping.regions.keys()
            if missing:
                more = {region: self._map(inquiry, region) for region in missing}
                self._mapping = _Mapping(ticket.epoch, self._mapping.board, {**self._mapping.regions, **more})
            return Spread(rows_of(ticket.extents), self._mapping.regions)

    def at_hand(self, inquiry: Inquiry) -> Spread | None:
        """As `open`, but never waits. None: the source must be asked whether it stands, or where it lies."""
        mapping, extents = self._mapping, inquiry.ticket.extents
        if mapping is None or not {extent.region for extent in extents} <= mapping.regions.keys():
            return None
        return Spread(rows_of(extents), mapping.regions) if self._is_posted(inquiry, mapping) else None

    def check(self, inquiry: Inquiry) -> None:
        """Raise TransferError where the offer does not stand any more. Asks the source where its board is no help."""
        mapping = self._mapping
        if mapping is None or not self._is_posted(inquiry, mapping):
            self.asker.ask(inquiry, Verb.CHECK, _receive)

    def lends(self) -> bool:
        """Tell whether somebody answers who lends us memory."""
        return self.asker.answers(_receive)

    def close(self) -> None:
        """Hang up and unmap. What is borrowed stays mapped until its views are gone."""
        self.asker.close()
        with self._lock:
            self._mapping = None

    def _is_posted(self, inquiry: Inquiry, mapping: _Mapping) -> bool:
        """The offer stood when this was called, and the source lived.

        The row comes first: a process whose connection is still open has not ended, so what its board has shown until
        then it has meant. Whoever gives a dead source's memory to others waits for its end, which comes after that.
        """
        ticket = inquiry.ticket
        row = mapping.board.row(ticket.number) if mapping.epoch == ticket.epoch else None
        if row is None:
            return False
        number, secret, digest, until_s = POSTED.unpack(row)
        is_this = (number, secret, digest) == (ticket.number, ticket.secret, inquiry.digest)
        return is_this and now_s() < until_s and self.asker.is_connected()

    def _board(self, inquiry: Inquiry) -> PostedRows:
        try:
            return PostedRows(self._map(inquiry, BOARD), POSTED.size)
        except ValueError as error:
            raise TransferError(str(error)) from None

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
    board: PostedRows
    regions: Mapping[int, memoryview]


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
