"""Questions to a source about its offers, over one connection that is made again where it broke."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from baton.core.errors import TransferError
from baton.move.ipc.connections import hang_up, limit_waits
from baton.move.ipc.lending import has_ended
from baton.move.transport.extents import digest, total_bytes
from baton.move.transport.offers import REFUSALS, SECRET_BYTES, Answer
from baton.move.transport.port import Ticket
from baton.move.transport.pulling import CLOSED
from baton.move.transport.wire import Verb, request_of

_STALL_S = 15.0
"""A source that does not answer for so long hangs."""

_TEST_S = 1.0
"""The first time: there is another way to a source that hangs."""

Got = TypeVar("Got")
Receive = Callable[[socket.socket], tuple[Answer, int, Got]]
"""Reads an answer: what it says, the source's epoch, and what else came with it."""


class Inquiry:
    """Questions about one ticket. What they say of its extents is worked out once."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.digest = digest(ticket.extents)
        self._check = request_of(ticket, Verb.CHECK, total_bytes(ticket.extents), self.digest, 0)

    def packed(self, verb: Verb, detail: int) -> bytes:
        return replace(self._check, verb=verb, size_bytes=detail).packed()


class Asker:
    """Asks one source, one question at a time."""

    def __init__(self, name: str, connect: Callable[[float], socket.socket]) -> None:
        """`connect` makes a connection whose calls fail after so many seconds without a byte."""
        self._name = name
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self._gone = False
        """Nobody answered the last time."""

    def ask(self, inquiry: Inquiry, verb: Verb, receive: Receive[Got], detail: int = 0) -> Got:
        """Returns what came with a good answer. Raises TransferError for any other, or none."""
        answer, epoch, got = self._exchange(inquiry.packed(verb, detail), receive)
        if answer is not Answer.FINE or epoch != inquiry.ticket.epoch:
            reason = REFUSALS.get(answer, REFUSALS[Answer.RESTARTED])
            raise TransferError(f"the source {self._name} refuses: {reason}")
        return got

    def answers(self, receive: Receive[None]) -> bool:
        """Tell whether somebody answers who would serve us, whatever he says to a ticket that nobody gave."""
        nobody = Ticket(transport="", address="", epoch=0, number=0, secret=bytes(SECRET_BYTES), extents=())
        try:
            request = Inquiry(nobody).packed(Verb.CHECK, 0)
            return self._exchange(request, receive, stall_s=_TEST_S)[0] is not Answer.STRANGER
        except TransferError:
            return False

    def hang_up(self) -> None:
        """Ask nothing more, and wake up whoever waits for an answer."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    def close(self) -> None:
        """Let go of the connection."""
        with self._lock:
            self._disconnect()

    def close_if_gone(self) -> bool:
        """Close where the source's process has ended. Returns whether it has. Never waits: whoever asks it, learns."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            gone = self._gone if self._connection is None else has_ended(self._connection)
            if gone:
                self._disconnect()
            return gone
        finally:
            self._lock.release()

    def _exchange(self, request: bytes, receive: Receive[Got], *, stall_s: float = _STALL_S) -> tuple[Answer, int, Got]:
        with self._lock:
            for fresh in (False, True):
                if self._closed:
                    break
                try:
                    return receive(self._sent(request, stall_s))
                except OSError as error:
                    self._disconnect()
                    self._gone = fresh
                    if fresh:
                        raise TransferError(
                            f"the source {self._name} does not answer: {error}; see whether it runs"
                        ) from error
        raise TransferError(CLOSED)

    def _sent(self, request: bytes, stall_s: float) -> socket.socket:
        if self._connection is None:
            self._connection = self._connect(stall_s)
        limit_waits(self._connection, receive_s=stall_s, send_s=stall_s)
        self._connection.sendall(request)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
