"""Wire format between consumers and sources: requests and answers of fixed size, then the bytes of a piece.

A request has a fixed size, so a client cannot make a source reserve memory. An answer says how many bytes follow. A
trailer behind them says whether the offer was still valid when the last byte was read.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import xxhash

from baton.move.ipc.connections import ConnectionServer, receive_views
from baton.move.transport.offers import SECRET_BYTES, Offers, OfferStatus
from baton.move.transport.port import Ticket

_MAGIC = b"bKV1"
_REQUEST = struct.Struct(f"<4sB3xQQ{SECRET_BYTES}sQQQ")
_ANSWER = struct.Struct("<4sB3xQQ")
_TRAILER = struct.Struct("<B7xQ")
ANSWER_BYTES = _ANSWER.size
TRAILER_BYTES = _TRAILER.size

_RTT_OFFSET = 68
"""Offset of `tcpi_rtt` in Linux's `struct tcp_info`; it counts microseconds."""
_SHORT_RTT_S = 0.0005
_BUFFER_BYTES = 256 << 10
"""Socket buffer for short round trips: fills a link of 25 Gb/s at 0.1 ms, and there are several connections."""


class BrokenStreamError(OSError):
    """The other side hung up, stalled, or sent bytes that are no valid message."""


class Verb(IntEnum):
    """Kind of a request."""

    READ = 1
    """Send a range of the offer's bytes."""
    CHECK = 2
    """Say whether the offer is valid. `start` is a digest of its extents."""
    MAP = 3
    """As CHECK, and attach the descriptor of the region whose number is in `size_bytes`."""
    CARD = 4
    """As CHECK, and describe the memory for NIXL. The source polls NIXL until the next CHECK."""
    PROVE = 5
    """First request of a connection: prove the secret of the cluster. The other fields are empty."""
    ENCRYPT = 6
    """First request of a connection: open TLS. The other fields are empty."""


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """A request about one offer; READ asks for its bytes `start` to `start + size_bytes`."""

    verb: Verb
    epoch: int
    number: int
    secret: bytes
    total_bytes: int
    """Size of the whole offer according to the ticket."""
    start: int
    size_bytes: int

    def packed(self) -> bytes:
        return _REQUEST.pack(
            _MAGIC, self.verb, self.epoch, self.number, self.secret, self.total_bytes, self.start, self.size_bytes
        )


def request_of(ticket: Ticket, verb: Verb, total_bytes: int, start: int, size_bytes: int) -> SourceRequest:
    """Return a request about a ticket's offer, which has `total_bytes` in all."""
    return SourceRequest(verb, ticket.epoch, ticket.number, ticket.secret, total_bytes, start, size_bytes)


def receive_request(connection: socket.socket) -> SourceRequest | None:
    """Wait for the next request. Return None if the consumer has hung up. Raises BrokenStreamError for other bytes."""
    raw = bytearray(_REQUEST.size)
    if not _fill(connection, memoryview(raw)):
        return None
    magic, verb, epoch, number, secret, total_bytes, start, size_bytes = _REQUEST.unpack(raw)
    if magic != _MAGIC or verb not in set(Verb):
        raise BrokenStreamError("the consumer sent bytes that are no request")
    return SourceRequest(Verb(verb), epoch, number, secret, total_bytes, start, size_bytes)


def check_offer(offers: Offers, request: SourceRequest) -> OfferStatus:
    """Return whether the offer of a request is valid and has the ticket's extents."""
    offer = offers.find(request.epoch, request.number, request.secret)
    if isinstance(offer, OfferStatus):
        return offer
    return OfferStatus.VALID if offer.digest == request.start else OfferStatus.OTHER_RANGE


def answer_head(status: OfferStatus, epoch: int, size_bytes: int) -> bytes:
    return _ANSWER.pack(_MAGIC, status, epoch, size_bytes)


def receive_answer(connection: socket.socket) -> tuple[OfferStatus, int, int]:
    """Wait for the head of an answer. Return the status, the source's epoch and the number of bytes that follow."""
    raw = bytearray(ANSWER_BYTES)
    if not _fill(connection, memoryview(raw)):
        raise BrokenStreamError("the source hung up")
    return unpack_answer(raw)


def unpack_answer(raw: bytes | bytearray) -> tuple[OfferStatus, int, int]:
    """Decode the head of an answer."""
    if len(raw) != ANSWER_BYTES:
        raise BrokenStreamError("the source hung up")
    magic, status, epoch, size_bytes = _ANSWER.unpack(raw)
    if magic != _MAGIC or status not in set(OfferStatus):
        raise BrokenStreamError("the source sent bytes that are no answer")
    return OfferStatus(status), epoch, size_bytes


def trailer(status: OfferStatus, checksum: int) -> bytes:
    return _TRAILER.pack(status, checksum)


def read_trailer(raw: bytes | bytearray) -> tuple[OfferStatus, int]:
    """Return whether the offer was valid until the last byte was read, and the checksum."""
    status, checksum = _TRAILER.unpack(raw)
    if status not in set(OfferStatus):
        raise BrokenStreamError("the source sent bytes that are no trailer")
    return OfferStatus(status), checksum


def checksum_of(views: Iterable[memoryview]) -> int:
    """Return the XXH3 checksum of consecutive bytes."""
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def listen_for_pulls(
    listening: socket.socket, serve: Callable[[socket.socket], None], connections_max: int
) -> ConnectionServer:
    """Serve consumers. A connection beyond the limit is answered with BUSY and closed."""
    return ConnectionServer(listening, serve, connections_max, full=partial(_refuse, status=OfferStatus.BUSY))


def fit_buffers(connection: socket.socket) -> None:
    """Use small socket buffers if the round trip is short, so that bytes are copied while the cache holds them.

    On one machine this saves a tenth of the CPU time per byte. On longer links the kernel sizes the buffers itself.
    """
    if not hasattr(socket, "TCP_INFO"):
        return
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
    round_trip_s = int.from_bytes(info[_RTT_OFFSET:], sys.byteorder) / 1e6
    if round_trip_s < _SHORT_RTT_S:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _refuse(connection: socket.socket, status: OfferStatus) -> None:
    try:
        connection.send(answer_head(status, 0, 0), socket.MSG_DONTWAIT)
    except OSError:
        return  # the consumer is gone already


def _fill(connection: socket.socket, view: memoryview) -> bool:
    """Fill a view from the stream. Return False if the stream ends before the first byte."""
    received = connection.recv_into(view)
    if received == 0:
        return False
    receive_views(connection, [view[received:]])
    return True
