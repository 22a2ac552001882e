"""A pool node: memory of one machine in which the hosts of a cluster keep KV blocks for each other.

Remote clients send and receive blocks over TCP. Processes of the node's machine and user map its memory and copy
blocks themselves.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.ipc.challenge import admit
from baton.move.ipc.cluster_tls import ClusterTls
from baton.move.ipc.connections import ConnectionServer, hang_up_after, receive_views, send_views
from baton.move.ipc.shared_memory import (
    bind_abstract,
    bind_in_folder,
    boot_id,
    create_sealed,
    is_same_user,
    machine_id,
)
from baton.move.store import node_wire as wire
from baton.move.store.checksum import CHECKSUM_BYTES
from baton.move.store.slot_table import SlotTable

log = logging.getLogger("baton.store")

CONNECTIONS_MAX = 256
"""Bound of the TCP connections, and separately of the connections from this machine."""
SLOTS_MAX = 1 << 24
"""Bound of the slots. Without it, a client that chooses a tiny block size would fill this process with bookkeeping."""
FIRST_REQUEST_S = 5.0
"""A client that is not admitted within this time is disconnected."""
IDLE_S = 600.0
"""The node closes a connection that sends no request for this time. A client that is still there connects again."""


class StoreNode:
    """Serve blocks from slots of one shared memory. The first client sets the layout; others must have the same.

    One thread serves each connection and spends its time in the kernel. Blocks are received straight into their slots
    and sent straight from them. The client that puts a block computes its checksum; the client that gets it compares.
    """

    def __init__(
        self, *, host: str, port: int, capacity_bytes: int, secret: bytes = b"", socket_folder: Path | None = None
    ) -> None:
        """Bind the port, then reserve and fault in the memory, which takes a while.

        `secret`: clients must know it, and those of other machines use TLS. Empty: every client may read and write.
        `socket_folder`: lend the memory to containers of this machine that mount this folder. None: to processes of
        this network namespace. Raises StoreError if the port, the folder or the memory is not available.
        """
        name = f"baton-pool-{secrets.token_hex(8)}"
        with ExitStack() as opened:
            try:
                far = opened.enter_context(socket.create_server((host, port)))
                if socket_folder is None:
                    near = opened.enter_context(bind_abstract(name))
                    self._lends_at = f"{machine_id()}/{name}"
                else:
                    near = opened.enter_context(bind_in_folder(name, socket_folder.absolute()))
                    opened.callback((socket_folder.absolute() / name).unlink, missing_ok=True)
                    self._lends_at = f"{boot_id()}/{socket_folder.absolute() / name}"
                self._file = create_sealed("baton-pool", capacity_bytes)
                opened.callback(os.close, self._file)
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._mapping = mmap.mmap(self._file, capacity_bytes, flags=flags)
            except (OSError, ValueError, OverflowError) as error:
                raise StoreError(
                    f"cannot serve {capacity_bytes} bytes at {host}:{port} ({error}): give less memory, another port,"
                    " or another folder for the socket"
                ) from None
            self._opened = opened.pop_all()
        self._memory = memoryview(self._mapping)
        self.address = "{}:{}".format(*far.getsockname()[:2])
        self._secret = secret
        self._tls = ClusterTls(secret) if secret else None
        self._lock = threading.Lock()
        self._layout: tuple[bytes, int] | None = None
        """Digest of the layout and bytes of a block, as the first client has set them."""
        self._table = SlotTable()
        self._checksums: list[bytes] = []
        self._listeners = [ConnectionServer(each, self._serve, CONNECTIONS_MAX, full=_hang_up) for each in (far, near)]

    def close(self) -> None:
        """Close every connection and forget all blocks."""
        for listener in self._listeners:
            listener.close()
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_REMOVE)  # otherwise the pages live until the last client unmaps them
        self._opened.close()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one client until it hangs up, stalls (OSError) or sends an invalid request."""
        wire.bound_waits(connection, FIRST_REQUEST_S)
        with ExitStack() as opened:
            with hang_up_after(connection, FIRST_REQUEST_S):
                hello = wire.receive(connection, wire.HELLO.size)
                if not hello.startswith(wire.MAGIC) or (_is_near(connection) and not is_same_user(connection)):
                    return
                if self._secret:
                    send_views(connection, [wire.ANSWER.pack(wire.PROVE_SECRET, wire.MAGIC, b"", 0, b"")])
                if self._secret and (self._tls is None or _is_near(connection)):
                    admit(connection, self._secret)
                elif self._tls is not None:
                    connection = opened.enter_context(closing(self._tls.accept(connection)))
                    hello = wire.receive(connection, wire.HELLO.size)
            self._serve_admitted(connection, hello)

    def _serve_admitted(self, connection: socket.socket, hello: bytes) -> None:
        wire.bound_waits(connection, IDLE_S)
        if not self._welcome(connection, hello):
            return
        while True:
            verb, count = wire.REQUEST.unpack(wire.receive(connection, wire.REQUEST.size))
            if count > wire.HASHES_MAX:
                return
            self._answer(connection, verb, wire.receive_hashes(connection, count))

    def _welcome(self, connection: socket.socket, hello: bytes) -> bool:
        """Answer a greeting, and lend the memory to a client of this machine. Return whether the layouts agree."""
        _, digest, block_bytes = wire.HELLO.unpack(hello)
        with self._lock:
            if self._layout is None and 0 < block_bytes <= len(self._memory):
                self._layout = (digest, block_bytes)
                slots = min(len(self._memory) // block_bytes, SLOTS_MAX)
                self._table.add_free(range(slots))
                self._checksums = [b""] * slots
            agrees = self._layout == (digest, block_bytes)
        welcome = wire.WELCOME if agrees else wire.OTHER_LAYOUT
        answer = wire.ANSWER.pack(welcome, wire.MAGIC, digest, self._block_bytes, self._lends_at.encode())
        if _is_near(connection) and agrees:
            socket.send_fds(connection, [answer], [self._file])
        else:
            send_views(connection, [answer])
        return agrees

    def _answer(self, connection: socket.socket, verb: bytes, hashes: list[BlockHash]) -> None:
        if verb == wire.PUT:
            self._put(connection, hashes)
        elif verb == wire.GET:
            self._get(connection, hashes)
        elif verb == wire.DROP:
            with self._lock:
                dropped = sum([self._table.forget(block_hash) for block_hash in hashes])
            send_views(connection, [wire.NUMBER.pack(dropped)])
        elif verb == wire.HELD:
            with self._lock:
                held = [block_hash for block_hash, _ in self._table.items()]
            send_views(connection, [wire.NUMBER.pack(len(held)), *held])
        else:
            raise ConnectionAbortedError(f"unknown request {verb!r}")

    @property
    def _block_bytes(self) -> int:
        return 0 if self._layout is None else self._layout[1]

    def _slot(self, slot: int) -> memoryview:
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def _place(self, slot: int) -> bytes:
        return wire.PLACE.pack(self._checksums[slot], slot * self._block_bytes)

    def _put(self, connection: socket.socket, hashes: list[BlockHash]) -> None:
        """Reserve slots for the missing blocks, receive the blocks, and make them readable once all have arrived."""
        with self._lock:
            new = [block_hash for block_hash in dict.fromkeys(hashes) if not self._table.refresh(block_hash)]
            slots, _ = self._table.reserve(len(new))
        wanted = dict(zip(new, slots, strict=False))
        sums = [memoryview(bytearray(CHECKSUM_BYTES)) for _ in slots]
        received = False
        try:
            if _is_near(connection):  # the client writes the slots itself and sends checksums only
                send_views(connection, [_flags(hashes, wanted), *map(self._place, slots)])
                coming = sums
            else:
                send_views(connection, [_flags(hashes, wanted)])
                coming = [part for slot, total in zip(slots, sums, strict=True) for part in (total, self._slot(slot))]
            receive_views(connection, coming)
            received = True
        finally:
            with self._lock:
                for (block_hash, slot), total in zip(wanted.items(), sums, strict=True):
                    self._checksums[slot] = bytes(total)
                    if received:
                        self._table.keep(block_hash, slot)
                    else:
                        self._table.add_free([slot])
                kept = {block_hash for block_hash in hashes if self._table.holds(block_hash)}
        send_views(connection, [_flags(hashes, kept)])

    def _get(self, connection: socket.socket, hashes: list[BlockHash]) -> None:
        """Send the blocks, or their places to a client of this machine. Their slots stay pinned until it is done."""
        with self._lock:
            found = [self._table.begin_read(block_hash) for block_hash in hashes]
            slots = [slot for slot in found if slot is not None]
            lent = [self._place(slot) for slot in slots] if _is_near(connection) else None
            parts = lent or [part for slot in slots for part in (self._checksums[slot], self._slot(slot))]
        try:
            send_views(connection, [bytes(slot is not None for slot in found), *parts])
            if lent:
                wire.receive(connection, len(wire.DONE))
        finally:
            with self._lock:
                for slot in slots:
                    self._table.end_read(slot)


def _is_near(connection: socket.socket) -> bool:
    """Return whether the client runs on this machine: it has mapped the node's memory and copies blocks itself."""
    return connection.family == socket.AF_UNIX


def _flags(hashes: Sequence[BlockHash], chosen: dict[BlockHash, int] | set[BlockHash]) -> bytes:
    """Return one byte per hash: 1 if it is chosen. If a hash is listed twice, only its first byte can be 1."""
    seen: set[BlockHash] = set()
    flags = bytearray()
    for block_hash in hashes:
        flags.append(block_hash in chosen and block_hash not in seen)
        seen.add(block_hash)
    return bytes(flags)


def _hang_up(_connection: socket.socket) -> None:
    """Send nothing to a client beyond the limit: the listener closes the connection, and the client's reads miss."""
