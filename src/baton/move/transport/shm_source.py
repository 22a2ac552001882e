"""The side whose memory is mapped: says whether an offer stands, and lends the descriptor of a region."""

from __future__ import annotations

import socket

from baton.move.ipc.connections import limit_waits
from baton.move.ipc.lending import is_ours
from baton.move.transport.offers import Answer, Offers, Source
from baton.move.transport.wire import Request, Verb, answer_head, receive_request

_STALL_S = 30.0


def serve_maps(source: Source, connection: socket.socket) -> None:
    """Answer one process until it hangs up. Strangers are refused."""
    ours = is_ours(connection)
    limit_waits(connection, receive_s=0 if ours else _STALL_S, send_s=_STALL_S)
    while (request := receive_request(connection)) is not None:
        if not ours:
            connection.sendall(answer_head(Answer.STRANGER, 0, 0))
            continue
        answer = answer_of(source.offers, request)
        head = answer_head(answer, source.offers.epoch, 0)
        if answer is Answer.FINE and request.verb is Verb.MAP:
            region = request.size_bytes
            if region in source.descriptors:
                socket.send_fds(connection, [head], [source.descriptors[region]])
                continue
            head = answer_head(Answer.UNSHARED, source.offers.epoch, 0)
        connection.sendall(head)


def answer_of(offers: Offers, request: Request) -> Answer:
    """Say whether an offer stands, and is what the ticket says."""
    offer = offers.find(request.epoch, request.number, request.secret)
    if isinstance(offer, Answer):
        return offer
    return Answer.FINE if offer.digest == request.start else Answer.RANGE
