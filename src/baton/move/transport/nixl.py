"""Bytes over NIXL (UCX): RDMA where hosts have it, else shared memory of the kernel's making, or tcp. The extra `nixl`.

NIXL reads the source's memory without asking it. So permission is ours: a connection of our own asks the source before
the first read and after the last, as over shared memory.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.core.errors import TransferError
from baton.move.copies import Moves, copy_one_by_one, paired
from baton.move.ipc.connections import limit_waits
from baton.move.transport.asker import Asker, Inquiry
from baton.move.transport.copying import Copier, Move, no_interrupt
from baton.move.transport.device import Location
from baton.move.transport.extents import Spread, collated, cut_rows, located, location_of, rows_of, runs_of
from baton.move.transport.listener import answering
from baton.move.transport.nixl_agent import NixlAgent, Side
from baton.move.transport.offers import Answer, Offer, Source
from baton.move.transport.peers import Peers
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.pulling import Piece, PiecewisePull
from baton.move.transport.shm_source import answer_of
from baton.move.transport.tcp import joined, listening_on, split
from baton.move.transport.tcp_source import FIRST_REQUEST_S
from baton.move.transport.wire import (
    BrokenStreamError,
    Request,
    Verb,
    answer_head,
    checksum_of,
    receive_answer,
    receive_request,
    receive_views,
)

_CONNECTIONS_MAX = 512
_STALL_S = 30.0
_CARD_BYTES_MAX = 1 << 20


Kind = tuple[Literal["DRAM", "VRAM"], int]
"""Of memory, in NIXL's words, and the number of the device that it is on."""


class _Card(Struct, frozen=True, array_like=True):
    """What a consumer has to know of a source in order to read it."""

    agent: bytes = b""
    locations: list[Location] = []
    """Of each region."""
    checksum: int = 0
    """Of the whole offer, behind its last byte."""


class NixlTransport:
    """Implements `Transport`."""

    name = "nixl"

    def __init__(
        self, listen: str, *, threads: int = 2, devices: str | None = None, source: Source | None = None
    ) -> None:
        """Answer questions about offers on `host:port`; UCX finds its own ways, over `devices` (see `NixlAgent`)."""
        self._owned = source is None
        self._source = source or Source()
        self._agent = NixlAgent(f"baton-{self._source.offers.epoch:x}", devices=devices)
        self._locations: list[Location] = []
        """Of each region."""
        self._copier = Copier(threads, copy_one_by_one, turns=1)  # UCX copies: its threads wait, once a share
        self._peers = Peers(lambda address: _NixlPeer(address, self._agent))
        listening = listening_on(listen)
        self.address = joined(*listening.getsockname()[:2])
        self._listener = answering(listening, self._serve, _CONNECTIONS_MAX)

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        """See `Transport.register`."""
        location = location_of(memory)
        region = self._source.register(memory, descriptor=descriptor)
        self._agent.register(location, memory.nbytes)
        self._locations.append(location)
        return region

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """See `Transport.offer`."""
        return self._source.offer(extents, lease_s=lease_s, checksum=checksum, way=self)

    def withdraw(self, ticket: Ticket) -> None:
        """See `Transport.withdraw`."""
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        """See `Transport.pull`."""
        target = self._source.memories.target_of(ticket, into, name=self.name)
        ours = _kind_of(into, self._locations)
        peer, inquiry = self._peers.at(ticket.address), Inquiry(ticket)
        pull = PiecewisePull(ticket, target, interrupt=no_interrupt, check=lambda: peer.check(inquiry, target))
        self._copier.start(pull, lambda: peer.open(inquiry, ours))
        return pull

    def close(self) -> None:
        """See `Transport.close`."""
        self._peers.hang_up()
        self._copier.close()
        self._listener.close()
        self._peers.close()
        self._agent.close()
        if self._owned:
            self._source.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one consumer. While it reads, our agent has to take part."""
        limit_waits(connection, receive_s=FIRST_REQUEST_S, send_s=_STALL_S)
        reading = 0
        try:
            while (request := receive_request(connection)) is not None:
                limit_waits(connection, receive_s=0, send_s=_STALL_S)
                answer = answer_of(self._source.offers, request)
                card = self._card(request) if answer is Answer.FINE else b""
                change = (1 if answer is Answer.FINE else 0) if request.verb is Verb.CARD else -min(reading, 1)
                self._agent.add_readers(change)
                reading += change
                connection.sendall(answer_head(answer, self._source.offers.epoch, len(card)) + card)
        finally:
            self._agent.add_readers(-reading)

    def _card(self, request: Request) -> bytes:
        offer = self._source.offers.find(request.epoch, request.number, request.secret)
        if request.verb is Verb.CARD:
            card = _Card(self._agent.metadata(), self._locations)
        elif isinstance(offer, Offer) and offer.checksum:
            card = _Card(checksum=_checksum(offer.spread))
        else:
            return b""
        return msgspec.msgpack.encode(card)


class _NixlPeer:
    """A source that our agent has met."""

    def __init__(self, address: str, agent: NixlAgent) -> None:
        host, port = split(address)
        self.asker = Asker(f"at {address}", lambda stall_s: socket.create_connection((host, port), stall_s))
        self._agent = agent
        self._lock = threading.Lock()
        self._met: dict[bytes, str] = {}

    def open(self, inquiry: Inquiry, ours: Kind) -> Move:
        """Get permission. Returns what reads a piece into memory of our kind."""
        card = self.asker.ask(inquiry, Verb.CARD, _receive_card)
        with self._lock:
            if card.agent not in self._met:
                self._met = {card.agent: self._agent.meet(card.agent)}
            name = self._met[card.agent]
        kind = _kind_of(inquiry.ticket.extents, card.locations)
        bases = {region: location.address for region, location in enumerate(card.locations)}
        theirs = located(collated(rows_of(inquiry.ticket.extents)), bases)

        def move(piece: Piece) -> None:
            sources = runs_of(cut_rows(theirs, piece.start, piece.size_bytes))
            moves = paired(sources, piece.pull.target.addresses(piece.start, piece.size_bytes))
            self._agent.read(name, Side(kind[0], _described(moves, 0, kind)), Side(ours[0], _described(moves, 1, ours)))

        return move

    def close(self) -> None:
        self.asker.close()

    def check(self, inquiry: Inquiry, target: Spread) -> None:
        """Raise TransferError where the offer does not stand any more. The source need not take part any longer."""
        card = self.asker.ask(inquiry, Verb.CHECK, _receive_card)
        if not inquiry.ticket.checksum:
            return
        received = _checksum(target)
        if received != card.checksum:
            raise TransferError(
                f"{target.size_bytes} bytes were damaged on the way: {card.checksum:016x} is the checksum of what was"
                f" offered, {received:016x} of what came; pull again, and look at the network and memory"
            )


def _receive_card(connection: socket.socket) -> tuple[Answer, int, _Card]:
    answer, epoch, size_bytes = receive_answer(connection)
    if size_bytes > _CARD_BYTES_MAX:
        raise BrokenStreamError(f"the source describes itself in {size_bytes} bytes")
    raw = bytearray(size_bytes)
    receive_views(connection, [memoryview(raw)] if raw else [])
    try:
        return answer, epoch, msgspec.msgpack.decode(raw, type=_Card) if raw else _Card()
    except msgspec.DecodeError as error:
        raise BrokenStreamError(f"the source describes itself in other words: {error}") from error


def _described(moves: Moves, side: int, kind: Kind) -> npt.NDArray[np.uint64]:
    """Rows of (address, size, device), as NIXL has them, of one side of the moves: 0 theirs, 1 ours."""
    return np.column_stack((moves[:, side], moves[:, 2], np.full(len(moves), kind[1], np.uint64)))


def _kind_of(extents: Sequence[Extent], locations: Sequence[Location]) -> Kind:
    """Tell what kind of memory a side of a transfer is. Raises TransferError where it is of two, or of none."""
    regions = {extent.region for extent in extents}
    if not all(0 <= region < len(locations) for region in regions):
        raise TransferError(
            f"the source describes {len(locations)} regions, the ticket names {max(regions)}; ask again"
        )
    kinds = {(locations[region].kind, locations[region].device) for region in regions}
    if len(kinds) > 1:
        raise TransferError("nixl moves memory of one device, or of the host, at a time; use several pulls")
    return kinds.pop()


def _checksum(spread: Spread) -> int:
    portions = spread.read(0, spread.size_bytes, spread.portion_bytes(spread.size_bytes))
    with closing(portions):
        return checksum_of(chain.from_iterable(portions))
