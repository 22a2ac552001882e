"""The side that sends: reads offered memory straight into the kernel."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing

import xxhash

from baton.core.errors import TransferError
from baton.move.ipc.connections import limit_waits
from baton.move.transport.listener import fit_buffers
from baton.move.transport.offers import Answer, Offer, Offers
from baton.move.transport.wire import (
    BrokenStreamError,
    Request,
    answer_head,
    receive_request,
    send_views,
    trailer,
)

log = logging.getLogger("baton.transfer")

FIRST_REQUEST_S = 5.0
"""Whoever connects and says nothing for so long is hung up on."""

_IDLE_S = 120.0
"""Between two requests."""

_STALL_S = 30.0
"""Without a byte that the consumer takes."""

_SUMMED_BYTES = 256 * 1024
"""Checksummed and sent while it is in the cache."""


def serve_reads(offers: Offers, connection: socket.socket) -> None:
    """Answer one consumer until it hangs up. Raises OSError where it breaks off, stalls or talks nonsense."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fit_buffers(connection)
    limit_waits(connection, receive_s=FIRST_REQUEST_S, send_s=_STALL_S)
    request = receive_request(connection)
    limit_waits(connection, receive_s=_IDLE_S, send_s=_STALL_S)
    while request is not None:
        offer = offers.find(request.epoch, request.number, request.secret)
        answer = offer if isinstance(offer, Answer) else _range_answer(request, offer)
        if isinstance(offer, Answer) or answer is not Answer.FINE:
            connection.sendall(answer_head(answer, offers.epoch, 0))
        else:
            _send(offers, offer, request, connection)
        request = receive_request(connection)


def _range_answer(request: Request, offer: Offer) -> Answer:
    held_bytes = offer.spread.size_bytes
    fits = request.size_bytes > 0 and request.start + request.size_bytes <= held_bytes
    return Answer.FINE if fits and request.total_bytes == held_bytes else Answer.RANGE


def _send(offers: Offers, offer: Offer, request: Request, connection: socket.socket) -> None:
    state = xxhash.xxh3_64()
    try:
        _send_bytes(offer, request, answer_head(Answer.FINE, offers.epoch, request.size_bytes), state, connection)
    except TransferError as error:
        log.warning("offered KV cannot be read, whoever pulls it is hung up on: %s", error)
        raise BrokenStreamError(str(error)) from error
    stood = offers.stands(request.number)  # now: the kernel has read the last byte
    connection.sendall(trailer(Answer.FINE if stood else Answer.ENDED, state.intdigest()))


def _send_bytes(offer: Offer, request: Request, head: bytes, state: xxhash.xxh3_64, connection: socket.socket) -> None:
    """Send what is asked for behind its head, which is sent once the first bytes can be."""
    size_bytes, spread = request.size_bytes, offer.spread
    first = [memoryview(head)]
    with closing(spread.read(request.start, size_bytes, spread.portion_bytes(size_bytes))) as portions:
        for views in portions:
            if not offer.checksum:
                send_views(connection, [*first, *views])
            else:
                for view in first:
                    connection.sendall(view, socket.MSG_MORE)
                for view in _pieces(views, _SUMMED_BYTES):
                    state.update(view)
                    connection.sendall(view)
            first = []


def _pieces(views: Sequence[memoryview], size_bytes: int) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, view.nbytes, size_bytes):
            yield view[start : start + size_bytes]
