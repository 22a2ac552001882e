"""How those are answered who come to pull: beyond so many with a no, and on a short way with small buffers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial

from baton.move.ipc.connections import Listener
from baton.move.transport.offers import Answer
from baton.move.transport.wire import answer_head

_ROUND_TRIP_AT = 68
"""Of tcpi_rtt in Linux' struct tcp_info, in bytes. It counts microseconds."""

_SHORT_S = 0.0005
_BUFFER_BYTES = 256 << 10
"""Fills a way of 25 Gb/s that is 0.1 ms long; there are several connections."""


def answering(listening: socket.socket, serve: Callable[[socket.socket], None], connections_max: int) -> Listener:
    """Accept those who pull. One that is too many is told that we are busy."""
    return Listener(listening, serve, connections_max, full=partial(refuse, answer=Answer.BUSY))


def refuse(connection: socket.socket, answer: Answer) -> None:
    """Say no to somebody who may not listen."""
    try:
        connection.send(answer_head(answer, 0, 0), socket.MSG_DONTWAIT)
    except OSError:
        return


def fit_buffers(connection: socket.socket) -> None:
    """Keep the kernel's buffers small on a short way: bytes are read again while the cache has them.

    A tenth less CPU per byte on one machine. On a long way the kernel sizes them itself, as only it can.
    """
    if not hasattr(socket, "TCP_INFO"):
        return
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_AT + 4)
    round_trip_s = int.from_bytes(info[_ROUND_TRIP_AT:], sys.byteorder) / 1e6
    if round_trip_s < _SHORT_S:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
