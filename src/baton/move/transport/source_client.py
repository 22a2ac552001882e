"""Ask sources about their offers, each over one connection that is made again if it breaks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from baton.core.errors import TransferError
from baton.move.ipc.connections import hang_up, limit_waits
from baton.move.ipc.shared_memory import is_hung_up
from baton.move.transport.extents import digest, total_bytes
from baton.move.transport.offers import REFUSALS, OfferStatus
from baton.move.transport.piecewise_pull import CLOSED
from baton.move.transport.port import Ticket
from baton.move.transport.wire import Verb, request_of

_STALL_S = 15.0
"""A source that does not answer within this time counts as hung."""

T = TypeVar("T")
Receive = Callable[[socket.socket], tuple[OfferStatus, int, T]]
"""Reads an answer: its status, the source's epoch, and a payload."""


class OfferQuery:
    """Questions about the offer of one ticket. The digest of its extents is computed once."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._check = request_of(ticket, Verb.CHECK, total_bytes(ticket.extents), digest(ticket.extents), 0)

    def packed(self, verb: Verb, detail: int) -> bytes:
        return replace(self._check, verb=verb, size_bytes=detail).packed()


class SourceClient:
    """Ask one source, one question at a time."""

    def __init__(self, name: str, connect: Callable[[float], socket.socket]) -> None:
        """`connect(stall_s)` returns a connection whose calls fail after `stall_s` without progress."""
        self._name = name
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self._gone = False
        """True if the last attempt to connect has failed."""

    def ask(self, query: OfferQuery, verb: Verb, receive: Receive[T], detail: int = 0) -> T:
        """Return the payload of a positive answer. Raises TransferError for a negative answer, or if there is none."""
        status, epoch, payload = self._exchange(query.packed(verb, detail), receive)
        if status is not OfferStatus.VALID or epoch != query.ticket.epoch:
            reason = REFUSALS.get(status, REFUSALS[OfferStatus.RESTARTED])
            raise TransferError(f"the source {self._name} refuses: {reason}")
        return payload

    def hang_up(self) -> None:
        """Interrupt a thread that waits for an answer, and refuse all further questions."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def close_if_gone(self) -> bool:
        """Close the connection if the source's process has ended. Return whether it has. Never waits.

        While another thread asks the source, return False: that thread finds out.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            gone = self._gone if self._connection is None else is_hung_up(self._connection)
            if gone:
                self._disconnect()
            return gone
        finally:
            self._lock.release()

    def _exchange(self, request: bytes, receive: Receive[T]) -> tuple[OfferStatus, int, T]:
        with self._lock:
            for fresh in (False, True):  # an idle connection may have broken: try a new one before giving up
                if self._closed:
                    break
                try:
                    return receive(self._sent(request))
                except OSError as error:
                    self._disconnect()
                    self._gone = fresh
                    if fresh:
                        raise TransferError(
                            f"the source {self._name} does not answer: {error}; see whether it runs"
                        ) from error
        raise TransferError(CLOSED)

    def _sent(self, request: bytes) -> socket.socket:
        if self._connection is None:
            self._connection = self._connect(_STALL_S)
        limit_waits(self._connection, receive_s=_STALL_S, send_s=_STALL_S)
        self._connection.sendall(request)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Peer(Protocol):
    """A source, with the state that a transport keeps about it."""

    client: SourceClient

    def close(self) -> None: ...


AnyPeer = TypeVar("AnyPeer", bound=Peer)


class Peers(Generic[AnyPeer]):
    """The sources that a transport knows, one per address. Adding one removes those whose process has ended."""

    def __init__(self, make: Callable[[str], AnyPeer]) -> None:
        """`make` creates the peer of an address, or raises TransferError."""
        self._make = make
        self._lock = threading.Lock()
        self._peers: dict[str, AnyPeer] = {}
        self._closed = False

    def get_or_create(self, address: str) -> AnyPeer:
        """Return the source at an address. Raises TransferError if `make` fails, or after `hang_up`."""
        with self._lock:
            if self._closed:
                raise TransferError(CLOSED)
            if address not in self._peers:
                peer = self._make(address)
                self._peers = {name: known for name, known in self._peers.items() if not known.client.close_if_gone()}
                self._peers[address] = peer
            return self._peers[address]

    def hang_up(self) -> None:
        """Interrupt threads that wait for an answer, and refuse all further questions."""
        with self._lock:
            self._closed = True
        for peer in self._peers.values():
            peer.client.hang_up()

    def close(self) -> None:
        """Close all connections. Call it only after every thread has stopped using its peer."""
        for peer in self._peers.values():
            peer.close()
