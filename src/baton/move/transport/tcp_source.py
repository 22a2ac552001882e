"""Sending side of the TCP transport: offered memory goes straight into the kernel."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import xxhash

from baton.core.errors import TransferError
from baton.move.ipc.connections import hang_up_after, limit_waits, send_views
from baton.move.transport.offers import Offer, Offers, OfferStatus
from baton.move.transport.protection import Protection
from baton.move.transport.wire import (
    BrokenStreamError,
    SourceRequest,
    Verb,
    answer_head,
    fit_buffers,
    receive_request,
    trailer,
)

log = logging.getLogger("baton.transfer")

FIRST_REQUEST_S = 5.0
"""A client that is not admitted, or sends no request, within this time is disconnected."""

_IDLE_S = 120.0
"""Maximum time between two requests."""

_STALL_S = 30.0
"""Maximum time in which the consumer reads no byte."""

_SUMMED_BYTES = 256 * 1024
"""Bytes that are checksummed and sent at a time, while the cache holds them."""


def serve_reads(offers: Offers, connection: socket.socket, protection: Protection) -> None:
    """Answer one consumer until it hangs up. Raises OSError after a break, a stall or an invalid request."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fit_buffers(connection)
    limit_waits(connection, receive_s=FIRST_REQUEST_S, send_s=_STALL_S)
    with ExitStack() as opened:
        with hang_up_after(connection, FIRST_REQUEST_S):
            protected = opened.enter_context(closing(protection.accept(connection)))
            request = receive_request(protected)
        _answer_requests(offers, protected, request)


def _answer_requests(offers: Offers, connection: socket.socket, request: SourceRequest | None) -> None:
    limit_waits(connection, receive_s=_IDLE_S, send_s=_STALL_S)
    while request is not None:
        offer = offers.find(request.epoch, request.number, request.secret)
        if request.verb in (Verb.PROVE, Verb.ENCRYPT):
            offer = OfferStatus.OTHER_PROTECTION
        status = offer if isinstance(offer, OfferStatus) else _check_range(request, offer)
        if isinstance(offer, OfferStatus) or status is not OfferStatus.VALID:
            connection.sendall(answer_head(status, offers.epoch, 0))
        else:
            _send(offers, offer, request, connection)
        request = receive_request(connection)


def _check_range(request: SourceRequest, offer: Offer) -> OfferStatus:
    held_bytes = offer.spread.size_bytes
    fits = request.size_bytes > 0 and request.start + request.size_bytes <= held_bytes
    return OfferStatus.VALID if fits and request.total_bytes == held_bytes else OfferStatus.OTHER_RANGE


def _send(offers: Offers, offer: Offer, request: SourceRequest, connection: socket.socket) -> None:
    state = xxhash.xxh3_64()
    head = answer_head(OfferStatus.VALID, offers.epoch, request.size_bytes)
    try:
        _send_bytes(offer, request, head, state, connection)
    except TransferError as error:
        log.warning("offered KV cannot be read, its consumer is disconnected: %s", error)
        raise BrokenStreamError(str(error)) from error
    # After the last byte: if the offer ended while the kernel read its memory, the consumer must drop the bytes.
    was_valid = offers.is_valid(request.number)
    connection.sendall(trailer(OfferStatus.VALID if was_valid else OfferStatus.ENDED, state.intdigest()))


def _send_bytes(
    offer: Offer, request: SourceRequest, head: bytes, state: xxhash.xxh3_64, connection: socket.socket
) -> None:
    """Send the head and the requested bytes. The head is sent only after the first bytes were read, which may fail."""
    size_bytes, spread = request.size_bytes, offer.spread
    first = [memoryview(head)]
    with closing(spread.read(request.start, size_bytes, spread.portion_bytes(size_bytes))) as portions:
        for views in portions:
            if not offer.checksum:
                send_views(connection, [*first, *views])
                first = []
                continue
            for view in _pieces(views, _SUMMED_BYTES):
                state.update(view)
                send_views(connection, [*first, view])
                first = []


def _pieces(views: Sequence[memoryview], size_bytes: int) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, view.nbytes, size_bytes):
            yield view[start : start + size_bytes]
