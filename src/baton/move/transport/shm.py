"""Transport between processes of one machine: the consumer maps the source's memory and copies from it.

The source lends its memfd, opened again for reading only, to processes of the same user. No byte goes through the
kernel. A pull asks the source whether the offer is valid, before the copy and after it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.core.errors import TransferError
from baton.move.copies import Copy, fastest_copy
from baton.move.ipc.connections import limit_waits
from baton.move.ipc.shared_memory import bind_abstract, is_same_user, machine_id, map_sealed, shares_machine
from baton.move.transport.copier import Copier, no_interrupt
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.offers import OfferStatus, Source
from baton.move.transport.piecewise_pull import PiecewisePull
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.source_client import OfferQuery, Peers, SourceClient
from baton.move.transport.wire import (
    ANSWER_BYTES,
    BrokenStreamError,
    Verb,
    answer_head,
    check_offer,
    listen_for_pulls,
    receive_answer,
    receive_request,
    unpack_answer,
)

_CONNECTIONS_MAX = 512
_STALL_S = 30.0


class ShmTransport:
    """Implements `Transport`. Offered memory must be registered with its descriptor."""

    name = "shm"

    def __init__(
        self,
        listen: str | None = None,
        *,
        threads: int = 2,
        copy: Copy | None = None,
        source: Source | None = None,
    ) -> None:
        """Listen on an abstract Unix socket, which leaves no file. `listen`: its name. None: a random name.

        Raises TransferError if the name is taken.
        """
        self._owned = source is None
        self._source = source or Source()
        self._copier = Copier(threads, copy or fastest_copy())
        self._peers = Peers(self._make_peer)
        name = listen or f"baton-kv-{secrets.token_hex(8)}"
        self.address = f"{machine_id()}/{name}"
        self._listener = listen_for_pulls(_listening(name), self._serve, _CONNECTIONS_MAX)

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """Offer extents. `checksum` has no effect, because no byte travels."""
        ticket = self._source.offer(extents, lease_s=lease_s, checksum=checksum, endpoint=self)
        missing = {extent.region for extent in extents} - self._source.descriptors.keys()
        if missing:
            self._source.offers.withdraw(ticket)
            raise TransferError(
                f"region {min(missing)} was registered without a descriptor, so no process can map it;"
                " register it with one, or offer over tcp"
            )
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        target = self._source.memories.target_of(ticket, into, name=self.name)
        peer, query = self._peers.get_or_create(ticket.address), OfferQuery(ticket)
        pull = PiecewisePull(ticket, target, interrupt=no_interrupt, check=lambda: peer.check(query))
        self._copier.start(pull, lambda: self._copier.from_spread(pull, peer.open(query)))
        return pull

    @contextmanager
    def borrow(self, ticket: Ticket) -> Iterator[list[memoryview]]:
        """Yield views of the source's own memory, without a copy.

        On leaving, raises TransferError if the offer has ended meanwhile: then discard the results. Release the views
        before `close`.
        """
        peer, query = self._peers.get_or_create(ticket.address), OfferQuery(ticket)
        spread = peer.open(query)
        yield spread.cut(0, spread.size_bytes)
        peer.check(query)

    def close(self) -> None:
        self._peers.hang_up()
        self._copier.close()
        self._listener.close()
        self._peers.close()
        if self._owned:
            self._source.close()

    def _make_peer(self, address: str) -> _ShmPeer:
        if not shares_machine(address):
            raise TransferError(f"{address!r} is on another machine than {self.address!r}; pull over tcp")
        return _ShmPeer(address.partition("/")[2])

    def _serve(self, connection: socket.socket) -> None:
        """Answer one consumer until it hangs up. Processes of other users are refused."""
        is_ours = is_same_user(connection)
        limit_waits(connection, receive_s=0 if is_ours else _STALL_S, send_s=_STALL_S)
        while (request := receive_request(connection)) is not None:
            if not is_ours:
                connection.sendall(answer_head(OfferStatus.OTHER_USER, 0, 0))
                continue
            status = check_offer(self._source.offers, request)
            if status is OfferStatus.VALID and request.verb is Verb.MAP:
                descriptor = self._source.descriptors.get(request.size_bytes)
                if descriptor is not None:
                    head = answer_head(status, self._source.offers.epoch, 0)
                    socket.send_fds(connection, [head], [descriptor])
                    continue
                status = OfferStatus.NOT_SHARED
            connection.sendall(answer_head(status, self._source.offers.epoch, 0))


class _ShmPeer:
    """A source on this machine, and the regions of its memory that are mapped here."""

    def __init__(self, name: str) -> None:
        self.client = SourceClient(f"{name!r} on this machine", lambda stall_s: _connected(name, stall_s))
        self._lock = threading.Lock()
        self._epoch = 0
        self._regions: dict[int, memoryview] = {}
        """Mapped memory of the source's process with that epoch."""

    def open(self, query: OfferQuery) -> Spread:
        """Return the offered bytes in the mapped memory. Raises TransferError if the offer is not valid."""
        self.check(query)
        ticket = query.ticket
        with self._lock:
            if self._epoch != ticket.epoch:
                self._epoch, self._regions = ticket.epoch, {}
            for region in {extent.region for extent in ticket.extents} - self._regions.keys():
                self._regions[region] = self._map(query, region)
            return Spread(rows_of(ticket.extents), dict(self._regions))

    def check(self, query: OfferQuery) -> None:
        """Ask the source. Raises TransferError if the offer is not valid."""
        self.client.ask(query, Verb.CHECK, _receive)

    def close(self) -> None:
        """Hang up and unmap. Borrowed memory stays mapped until its views are released."""
        self.client.close()
        with self._lock:
            self._regions = {}

    def _map(self, query: OfferQuery, region: int) -> memoryview:
        descriptor = self.client.ask(query, Verb.MAP, _receive_descriptor, region)
        assert descriptor is not None
        try:
            return map_sealed(descriptor, mmap.PROT_READ)
        except ValueError as error:
            raise TransferError(str(error)) from None
        finally:
            os.close(descriptor)


def _listening(name: str) -> socket.socket:
    try:
        return bind_abstract(name)
    except OSError as error:
        raise TransferError(f"cannot answer under the name {name!r}: {error}; choose another name") from error


def _connected(name: str, stall_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        limit_waits(connection, receive_s=stall_s, send_s=stall_s)
        connection.connect("\0" + name)
        if not is_same_user(connection):
            raise BrokenStreamError("it belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket) -> tuple[OfferStatus, int, None]:
    status, epoch, _ = receive_answer(connection)
    return status, epoch, None


def _receive_descriptor(connection: socket.socket) -> tuple[OfferStatus, int, int | None]:
    raw, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    status, epoch, _ = unpack_answer(raw)
    if status is OfferStatus.VALID and not descriptors:
        raise BrokenStreamError("the answer has no descriptor attached")
    return status, epoch, descriptors[0] if descriptors else None
