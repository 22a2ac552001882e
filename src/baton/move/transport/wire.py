"""What consumers and sources say to each other over a stream socket, and how bytes go from memory to memory.

A request has a fixed size, so nobody can make a source reserve memory; an answer says how many bytes follow, and a
trailer behind them whether they were still offered when the last one was read.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from baton.move.transport.offers import SECRET_BYTES, Answer
from baton.move.transport.port import Ticket

_MAGIC = b"bKV1"
_REQUEST = struct.Struct(f"<4sB3xQQ{SECRET_BYTES}sQQQ")
_ANSWER = struct.Struct("<4sB3xQQ")
_TRAILER = struct.Struct("<B7xQ")
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size
TRAILER_BYTES = _TRAILER.size
_VIEWS_MAX = 1024
"""IOV_MAX of Linux: what one call to the kernel takes."""


class BrokenStreamError(OSError):
    """The other side hung up, stalled, or speaks another language."""


class Verb(IntEnum):
    """What is asked for."""

    READ = 1
    """Send these bytes of the offer."""
    CHECK = 2
    """Say whether it stands. `start` is a digest of its extents."""
    MAP = 3
    """Lend the descriptor of the region `size_bytes`, as for CHECK."""
    CARD = 4
    """Say how your memory can be read over the network, as for CHECK, and take part until the next CHECK."""


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes `start` to `start + size_bytes` of an offer, by somebody who has its ticket."""

    verb: Verb
    epoch: int
    number: int
    secret: bytes
    total_bytes: int
    """What the consumer believes to be offered in all."""
    start: int
    size_bytes: int

    def packed(self) -> bytes:
        return _REQUEST.pack(
            _MAGIC, self.verb, self.epoch, self.number, self.secret, self.total_bytes, self.start, self.size_bytes
        )


def request_of(ticket: Ticket, verb: Verb, total_bytes: int, start: int, size_bytes: int) -> Request:
    """Ask for a part of what a ticket offers, which is `total_bytes` in all."""
    return Request(verb, ticket.epoch, ticket.number, ticket.secret, total_bytes, start, size_bytes)


def receive_request(connection: socket.socket) -> Request | None:
    """Wait for the next request. None: the consumer has hung up. Raises BrokenStreamError for what is no request."""
    raw = bytearray(REQUEST_BYTES)
    if not _fill(connection, memoryview(raw)):
        return None
    magic, verb, epoch, number, secret, total_bytes, start, size_bytes = _REQUEST.unpack(raw)
    if magic != _MAGIC or verb not in set(Verb):
        raise BrokenStreamError("these bytes are no request of ours")
    return Request(Verb(verb), epoch, number, secret, total_bytes, start, size_bytes)


def answer_head(answer: Answer, epoch: int, size_bytes: int) -> bytes:
    return _ANSWER.pack(_MAGIC, answer, epoch, size_bytes)


def receive_answer(connection: socket.socket) -> tuple[Answer, int, int]:
    """Wait for the head of an answer. Returns it, the source's epoch and the bytes that follow."""
    raw = bytearray(ANSWER_BYTES)
    if not _fill(connection, memoryview(raw)):
        raise BrokenStreamError("the source hung up")
    return unpack_answer(raw)


def unpack_answer(raw: bytes | bytearray) -> tuple[Answer, int, int]:
    """Read the head of an answer that has come."""
    if len(raw) != ANSWER_BYTES:
        raise BrokenStreamError("the source hung up")
    magic, answer, epoch, size_bytes = _ANSWER.unpack(raw)
    if magic != _MAGIC or answer not in set(Answer):
        raise BrokenStreamError("these bytes are no answer of ours")
    return Answer(answer), epoch, size_bytes


def trailer(answer: Answer, checksum: int) -> bytes:
    return _TRAILER.pack(answer, checksum)


def read_trailer(raw: bytes | bytearray) -> tuple[Answer, int]:
    """Returns whether the offer stood until the last byte was read, and the checksum."""
    answer, checksum = _TRAILER.unpack(raw)
    if answer not in set(Answer):
        raise BrokenStreamError("these bytes are no trailer of ours")
    return Answer(answer), checksum


def send_views(connection: socket.socket, views: Sequence[bytes | memoryview]) -> None:
    """Send bytes from where they lie."""
    rest = [memoryview(view) for view in views]
    at = 0
    while at < len(rest):
        sent = connection.sendmsg(rest[at : at + _VIEWS_MAX])
        at = _skip(rest, at, sent)


def receive_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Receive bytes into where they belong. Raises BrokenStreamError where the stream ends before."""
    rest = list(views)
    at = 0
    while at < len(rest):
        received = connection.recvmsg_into(rest[at : at + _VIEWS_MAX], 0, socket.MSG_WAITALL)[0]
        if received == 0:
            raise BrokenStreamError("the source hung up in the middle of a piece")
        at = _skip(rest, at, received)


def checksum_of(views: Iterable[memoryview]) -> int:
    """XXH3 of bytes in a row."""
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def _skip(views: list[memoryview], at: int, moved_bytes: int) -> int:
    """Step over what was moved. A view that was moved in part is cut."""
    while at < len(views) and moved_bytes >= views[at].nbytes:
        moved_bytes -= views[at].nbytes
        at += 1
    if moved_bytes:
        views[at] = views[at][moved_bytes:]
    return at


def _fill(connection: socket.socket, view: memoryview) -> bool:
    """Receive exactly this much. False: the stream ended before the first byte."""
    at = 0
    while at < view.nbytes:
        received = connection.recv_into(view[at:])
        if received == 0:
            if at == 0:
                return False
            raise BrokenStreamError("the stream ended in the middle of a message")
        at += received
    return True
