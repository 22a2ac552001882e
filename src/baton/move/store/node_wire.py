"""Wire format between a pool node and its clients: fixed headers, block hashes, then the bytes of blocks.

A connection begins with the client's HELLO and the node's ANSWER. If the node has a secret, it first answers with
PROVE_SECRET. Over TCP, both open TLS by the secret (move/ipc/cluster_tls.py), and the client repeats its HELLO. Over a
Unix socket, both prove the secret (move/ipc/challenge.py). Then the client sends requests, one at a time:

    put   hashes -> flags of the missing ones -> checksum and bytes of each missing one -> flags of those now kept
    get   hashes -> flags of those present, then checksum and bytes of each
    drop  hashes -> how many were present
    held  -> how many blocks there are, then their hashes, oldest first

ANSWER names a Unix socket: an abstract one, or a path. A process of the node's machine and user connects there with the
same HELLO and receives a descriptor of the node's memory with ANSWER. It copies blocks itself:

    put   hashes -> flags of the missing ones, then a PLACE for each -> their checksums -> flags of those now kept
    get   hashes -> flags of those present, then a PLACE for each -> DONE when they are copied
"""

from __future__ import annotations

import socket
import struct

from baton.core.types import BlockHash
from baton.move.ipc.connections import limit_waits, receive_views

HASH_BYTES = 16
HASHES_MAX = 1 << 16
"""Bound of the hashes in one request."""
HELLO = struct.Struct("<8s16sQ")
"""MAGIC, digest of the layout's fingerprint, bytes per block."""
MAGIC = b"BATONP06"
ANSWER = struct.Struct("<c8s16sQ160s")
"""WELCOME, OTHER_LAYOUT or PROVE_SECRET, the node's own HELLO, and where it lends its memory: `machine/socket`.

The longest place is a boot's id of 36 characters, a slash, and a socket's path, which Linux limits to 107 bytes."""
PLACE = struct.Struct("<16sQ")
"""Checksum of the block in a slot (undefined for a put) and the offset of the slot in the node's memory."""
DONE = b"."
"""Ends a get on the node's machine: the client has copied the blocks, and the node unpins their slots."""
REQUEST = struct.Struct("<cI")
"""Verb, and the number of hashes that follow."""
NUMBER = struct.Struct("<I")
PUT, GET, DROP, HELD = b"p", b"g", b"d", b"h"
WELCOME, OTHER_LAYOUT, PROVE_SECRET = b"+", b"-", b"?"


def bound_waits(connection: socket.socket, timeout_s: float) -> None:
    """Make blocking calls fail with OSError after `timeout_s` without progress, enforced by the kernel.

    Python's own timeouts need a poll before each call, and make calls return early: twice the system calls.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    limit_waits(connection, receive_s=timeout_s, send_s=timeout_s)


def receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Receive `size_bytes` bytes. Raises OSError."""
    data = bytearray(size_bytes)
    receive_views(connection, [memoryview(data)])
    return bytes(data)


def receive_number(connection: socket.socket) -> int:
    return NUMBER.unpack(receive(connection, NUMBER.size))[0]


def receive_hashes(connection: socket.socket, count: int) -> list[BlockHash]:
    data = receive(connection, count * HASH_BYTES)
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]
