"""What a pool node and its clients say to each other: little frames, then the bytes of blocks, straight into place.

A connection begins with the client's Hello and the node's answer. Then the client asks, one request at a time:

    put   names -> which of them the node wants -> for each of those: checksum, block -> which are kept
    get   names -> which of them the node has, then for each of those: checksum, block
    drop  names -> how many were there
    held  -> how many, then their names, oldest first

The answer names a socket on which processes of the node's own machine and user say the same, and are lent its memory
with the answer, and the board on which its blocks stand. They copy blocks themselves, and ask for those that they do
not find there:

    put   names -> which of them the node wants, then for each of those: where -> their checksums
          -> which are kept, and a spare slot
    fill  name, checksum of what was copied into the spare slot -> whether it is kept, and a spare slot
    get   names -> which of them the node has, then for each of those: checksum, where -> done
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from baton.core.types import BlockHash
from baton.move.ipc.connections import limit_waits

NAME_BYTES = 16
NAMES_MAX = 1 << 16
"""Of one request: what a node reads before it looks at them."""
HELLO = struct.Struct("<8s16sQ")
"""Magic, digest of the layout's fingerprint, bytes of a block."""
MAGIC = b"BATONP03"
ANSWER = struct.Struct("<c8s16sQ128s")
"""WELCOME or OTHER_LAYOUT, the node's Hello, and where it lends its memory: `machine/socket`, or nothing."""
PLACE = struct.Struct("<16sQ")
"""A block's checksum, which is yet to come for one that is put; where its slot begins in the node's memory."""
SPARE = struct.Struct("<Q")
"""Where a slot begins that nobody but this client may write, until it ends. NOWHERE: there is none to spare."""
NOWHERE = (1 << 64) - 1
DONE = b"."
"""What was lent has been read."""
REQUEST = struct.Struct("<cI")
"""Verb, number of names that follow."""
NUMBER = struct.Struct("<I")
PUT, FILL, GET, DROP, HELD = b"p", b"f", b"g", b"d", b"h"
REFUSED, KEPT, THERE = range(3)
"""What became of a block that was put. The last: it was there already, and counts as young again."""
WELCOME, OTHER_LAYOUT = b"+", b"-"
_MEMORIES_MAX = 512
"""Of one call: half of what the system takes."""


def bound_waits(connection: socket.socket, timeout_s: float) -> None:
    """Let the system end a wait of so long with an OSError, inside one call that moves all there is to move.

    Python's own timeout makes every call return with what is there just now, and asks before each whether there is
    something: twice the calls, each for a piece.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    limit_waits(connection, receive_s=timeout_s, send_s=timeout_s)


def send_all(connection: socket.socket, memories: Sequence[bytes | memoryview]) -> None:
    """Send memories one after the other, without putting them together first. Raises OSError."""
    waiting = [memoryview(memory).cast("B") for memory in memories if len(memory)]
    first = 0
    while first < len(waiting):
        sent = connection.sendmsg(waiting[first : first + _MEMORIES_MAX])
        while first < len(waiting) and sent >= len(waiting[first]):
            sent -= len(waiting[first])
            first += 1
        if sent:
            waiting[first] = waiting[first][sent:]


def receive_into(connection: socket.socket, memories: Sequence[memoryview]) -> None:
    """Fill memories one after the other, straight from the socket. Raises OSError, also where the other side ends."""
    waiting = [memory for memory in memories if len(memory)]
    first = 0
    while first < len(waiting):
        try:
            part = waiting[first : first + _MEMORIES_MAX]
            received, _, _, _ = connection.recvmsg_into(part, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing came in time") from None
        if received == 0:
            raise ConnectionResetError("the other side has ended the connection")
        while first < len(waiting) and received >= len(waiting[first]):
            received -= len(waiting[first])
            first += 1
        if received:
            waiting[first] = waiting[first][received:]


def receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Receive so many bytes. Raises OSError."""
    data = bytearray(size_bytes)
    receive_into(connection, [memoryview(data)])
    return bytes(data)


def receive_number(connection: socket.socket) -> int:
    return NUMBER.unpack(receive(connection, NUMBER.size))[0]


def receive_names(connection: socket.socket, count: int) -> list[BlockHash]:
    data = receive(connection, count * NAME_BYTES)
    return [BlockHash(data[start : start + NAME_BYTES]) for start in range(0, len(data), NAME_BYTES)]
