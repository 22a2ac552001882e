"""Transport over NIXL (UCX), with the extra `nixl`: RDMA if hosts have it, otherwise shared memory or TCP of UCX.

NIXL reads the source's memory without its knowledge. So the consumer asks the source over a connection of its own,
before the first read and after the last one, whether the offer is valid.
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
from baton.move.ipc.connections import hang_up_after, limit_waits, receive_views
from baton.move.ipc.dialing import Dialer
from baton.move.transport.copier import Copier, Move, no_interrupt
from baton.move.transport.device_memory import Location
from baton.move.transport.extents import Spread, collated, cut_rows, located, location_of, rows_of, runs_of
from baton.move.transport.nixl_agent import NixlAgent, Side
from baton.move.transport.offers import Offer, OfferStatus, Source
from baton.move.transport.piecewise_pull import PiecewisePull, PullPiece
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.source_client import OfferQuery, Peers, SourceClient
from baton.move.transport.tcp import bind_address, join_address, split_address
from baton.move.transport.tcp_source import FIRST_REQUEST_S
from baton.move.transport.wire import (
    BrokenStreamError,
    SourceRequest,
    Verb,
    answer_head,
    check_offer,
    checksum_of,
    listen_for_pulls,
    receive_answer,
    receive_request,
)

_CONNECTIONS_MAX = 512
_STALL_S = 30.0
_CARD_BYTES_MAX = 1 << 20


Kind = tuple[Literal["DRAM", "VRAM"], int]
"""Kind of memory in NIXL's terms, and the number of its device."""


class _Card(Struct, frozen=True, array_like=True):
    """A source's description of its memory for consumers."""

    agent: bytes = b""
    locations: list[Location] = []
    """Location of each region."""
    checksum: int = 0
    """Checksum of all offered bytes. The source sends it after the last read."""


class NixlTransport:
    """Implements `Transport`."""

    name = "nixl"

    def __init__(
        self, listen: str, *, threads: int = 2, devices: str | None = None, source: Source | None = None
    ) -> None:
        """Answer questions about offers on `host:port`. UCX chooses its own connections over `devices`."""
        self._owned = source is None
        self._source = source or Source()
        self._agent = NixlAgent(f"baton-{self._source.offers.epoch:x}", devices=devices)
        self._locations: list[Location] = []
        """Location of each region."""
        self._copier = Copier(threads, copy_one_by_one, turns=1)  # the threads only wait for UCX, so one piece each
        self._peers = Peers(lambda address: _NixlPeer(address, self._agent))
        listening = bind_address(listen)
        self.address = join_address(*listening.getsockname()[:2])
        self._listener = listen_for_pulls(listening, self._serve, _CONNECTIONS_MAX)

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        location = location_of(memory)
        region = self._source.register(memory, descriptor=descriptor)
        self._agent.register(location, memory.nbytes)
        self._locations.append(location)
        return region

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        return self._source.offer(extents, lease_s=lease_s, checksum=checksum, endpoint=self)

    def withdraw(self, ticket: Ticket) -> None:
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        target = self._source.memories.target_of(ticket, into, name=self.name)
        local = _kind_of(into, self._locations)
        peer, query = self._peers.get_or_create(ticket.address), OfferQuery(ticket)
        pull = PiecewisePull(ticket, target, interrupt=no_interrupt, check=lambda: peer.check(query, target))
        self._copier.start(pull, lambda: peer.open(query, local))
        return pull

    def close(self) -> None:
        self._peers.hang_up()
        self._copier.close()
        self._listener.close()
        self._peers.close()
        self._agent.close()
        if self._owned:
            self._source.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one consumer. Between its CARD and CHECK requests the NIXL agent must poll."""
        limit_waits(connection, receive_s=FIRST_REQUEST_S, send_s=_STALL_S)
        with hang_up_after(connection, FIRST_REQUEST_S):
            request = receive_request(connection)
        limit_waits(connection, receive_s=0, send_s=_STALL_S)
        reading = 0
        try:
            while request is not None:
                status = check_offer(self._source.offers, request)
                is_valid = status is OfferStatus.VALID
                card = self._card(request) if is_valid else b""
                change = int(is_valid) if request.verb is Verb.CARD else -min(reading, 1)
                self._agent.add_readers(change)
                reading += change
                connection.sendall(answer_head(status, self._source.offers.epoch, len(card)) + card)
                request = receive_request(connection)
        finally:
            self._agent.add_readers(-reading)

    def _card(self, request: SourceRequest) -> bytes:
        offer = self._source.offers.find(request.epoch, request.number, request.secret)
        if request.verb is Verb.CARD:
            card = _Card(self._agent.metadata(), self._locations)
        elif isinstance(offer, Offer) and offer.checksum:
            card = _Card(checksum=_checksum(offer.spread))
        else:
            return b""
        return msgspec.msgpack.encode(card)


class _NixlPeer:
    """A source, and the name of its agent at this host's NIXL agent."""

    def __init__(self, address: str, agent: NixlAgent) -> None:
        self.client = SourceClient(f"at {address}", Dialer(*split_address(address)).connect)
        self._agent = agent
        self._lock = threading.Lock()
        self._agent_names: dict[bytes, str] = {}

    def open(self, query: OfferQuery, local: Kind) -> Move:
        """Ask for permission. Return the function that reads a piece into local memory of the kind `local`."""
        card = self.client.ask(query, Verb.CARD, _receive_card)
        with self._lock:
            if card.agent not in self._agent_names:
                self._agent_names = {card.agent: self._agent.add_remote_agent(card.agent)}
            name = self._agent_names[card.agent]
        kind = _kind_of(query.ticket.extents, card.locations)
        bases = {region: location.address for region, location in enumerate(card.locations)}
        remote = located(collated(rows_of(query.ticket.extents)), bases)

        def move(piece: PullPiece) -> None:
            sources = runs_of(cut_rows(remote, piece.start, piece.size_bytes))
            moves = paired(sources, piece.pull.target.addresses(piece.start, piece.size_bytes))
            self._agent.read(
                name, Side(kind[0], _described(moves, 0, kind)), Side(local[0], _described(moves, 1, local))
            )

        return move

    def close(self) -> None:
        self.client.close()

    def check(self, query: OfferQuery, target: Spread) -> None:
        """Raise TransferError if the offer is not valid or a checksum differs. The source may stop polling then."""
        card = self.client.ask(query, Verb.CHECK, _receive_card)
        if not query.ticket.checksum:
            return
        received = _checksum(target)
        if received != card.checksum:
            raise TransferError(
                f"{target.size_bytes} bytes were damaged on the way: sent with checksum {card.checksum:016x},"
                f" received with {received:016x}; pull again, and look at the network and memory"
            )


def _receive_card(connection: socket.socket) -> tuple[OfferStatus, int, _Card]:
    status, epoch, size_bytes = receive_answer(connection)
    if size_bytes > _CARD_BYTES_MAX:
        raise BrokenStreamError(
            f"the source's description has {size_bytes} bytes, at most {_CARD_BYTES_MAX} are allowed"
        )
    raw = bytearray(size_bytes)
    receive_views(connection, [memoryview(raw)] if raw else [])
    try:
        return status, epoch, msgspec.msgpack.decode(raw, type=_Card) if raw else _Card()
    except msgspec.DecodeError as error:
        raise BrokenStreamError(f"the source's description cannot be decoded: {error}") from error


def _described(moves: Moves, side: int, kind: Kind) -> npt.NDArray[np.uint64]:
    """Return NIXL's rows of (address, size, device) for one side of the moves: 0 is the source, 1 the target."""
    return np.column_stack((moves[:, side], moves[:, 2], np.full(len(moves), kind[1], np.uint64)))


def _kind_of(extents: Sequence[Extent], locations: Sequence[Location]) -> Kind:
    """Return the kind of memory of one side. Raises TransferError if it has two kinds or an unknown region."""
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
