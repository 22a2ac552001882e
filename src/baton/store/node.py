"""A pool node: memory of one machine in which the hosts of a cluster keep blocks for each other, over TCP."""

from __future__ import annotations

import logging
import mmap
import socket
import threading
from collections.abc import Sequence

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.store.checksum import CHECKSUM_BYTES
from baton.store.node_wire import (
    DROP,
    GET,
    HELD,
    HELLO,
    MAGIC,
    NAMES_MAX,
    NUMBER,
    OTHER_LAYOUT,
    PUT,
    REQUEST,
    WELCOME,
    bound_waits,
    receive,
    receive_into,
    receive_names,
    send_all,
)
from baton.store.slot_table import SlotTable

log = logging.getLogger("baton.store")

CONNECTIONS_MAX = 256
SLOTS_MAX = 1 << 24
"""However small the blocks are that the first client announces: a slot takes memory of its own beside its block."""
IDLE_S = 600.0
"""A connection that says nothing for so long is closed: its host is gone, or connects again."""


class StoreNode:
    """Serves slots of one piece of memory. The first client says what layout its blocks are of; others must agree.

    One thread per connection: they spend their time in the kernel, copying. Blocks are received straight into their
    slots and sent straight from them; the checksum is the client's, kept beside the block and checked by who gets it.
    """

    def __init__(self, *, host: str, port: int, capacity_bytes: int) -> None:
        """Take the memory, and listen. Raises StoreError where either cannot be had."""
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        try:
            self._memory = memoryview(mmap.mmap(-1, capacity_bytes, flags=flags))
            self._listener = socket.create_server((host, port), backlog=64)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot serve {capacity_bytes} bytes at {host}:{port} ({error}): give less memory, or another port"
            ) from None
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._lock = threading.Lock()
        self._layout: tuple[bytes, int] | None = None
        self._table = SlotTable()
        self._checksums: list[bytes] = []
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="baton-node")
        self._accepting.start()

    def close(self) -> None:
        """End every connection. What was kept is gone."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            connections, threads = list(self._connections), self._threads
        for connection in connections:
            _shut(connection)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                if len(self._threads) >= CONNECTIONS_MAX:
                    connection.close()
                    continue
                self._connections.add(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), name="baton-node"))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            bound_waits(connection, IDLE_S)
            if not self._greet(connection):
                return
            while True:
                verb, count = REQUEST.unpack(receive(connection, REQUEST.size))
                if count > NAMES_MAX:
                    return
                self._answer(connection, verb, receive_names(connection, count))
        except OSError:
            return  # the client ended, or hangs: nothing of a block that was coming is named
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> bool:
        magic, digest, block_bytes = HELLO.unpack(receive(connection, HELLO.size))
        if magic != MAGIC:
            return False
        with self._lock:
            if self._layout is None and 0 < block_bytes <= len(self._memory):
                self._layout = (digest, block_bytes)
                slots = min(len(self._memory) // block_bytes, SLOTS_MAX)
                self._table.add_free(range(slots))
                self._checksums = [b""] * slots
            agrees = self._layout == (digest, block_bytes)
            _, ours = self._layout or (b"", 0)
        send_all(connection, [WELCOME if agrees else OTHER_LAYOUT, HELLO.pack(MAGIC, digest, ours)])
        return agrees

    def _answer(self, connection: socket.socket, verb: bytes, names: list[BlockHash]) -> None:
        if verb == PUT:
            self._put(connection, names)
        elif verb == GET:
            self._get(connection, names)
        elif verb == DROP:
            with self._lock:
                dropped = sum([self._table.forget(name) for name in names])
            send_all(connection, [NUMBER.pack(dropped)])
        elif verb == HELD:
            with self._lock:
                held = [name for name, _ in self._table.items()]
            send_all(connection, [NUMBER.pack(len(held)), *held])
        else:
            raise ConnectionAbortedError(f"nobody knows the verb {verb!r}")

    def _slot(self, slot: int) -> memoryview:
        _, block_bytes = self._layout or (b"", 0)
        return self._memory[slot * block_bytes : (slot + 1) * block_bytes]

    def _put(self, connection: socket.socket, names: list[BlockHash]) -> None:
        with self._lock:
            new = [name for name in dict.fromkeys(names) if not self._table.refresh(name)]
            slots, _ = self._table.reserve(len(new))
        wanted = dict(zip(new, slots, strict=False))
        received = False
        sums = [memoryview(bytearray(CHECKSUM_BYTES)) for _ in slots]
        try:
            send_all(connection, [_flags(names, wanted)])
            places = [part for slot, total in zip(slots, sums, strict=True) for part in (total, self._slot(slot))]
            receive_into(connection, places)
            received = True
        finally:
            with self._lock:
                for (name, slot), total in zip(wanted.items(), sums, strict=True):
                    self._checksums[slot] = bytes(total)
                    if received:
                        self._table.keep(name, slot)
                    else:
                        self._table.add_free([slot])
                kept = {name for name in names if self._table.holds(name)}
        send_all(connection, [_flags(names, kept)])

    def _get(self, connection: socket.socket, names: list[BlockHash]) -> None:
        with self._lock:
            found = [(name, self._table.begin_read(name)) for name in names]
            slots = [slot for _, slot in found if slot is not None]
            parts = [part for slot in slots for part in (self._checksums[slot], self._slot(slot))]
        try:
            send_all(connection, [bytes(slot is not None for _, slot in found), *parts])
        finally:
            with self._lock:
                for slot in slots:
                    self._table.end_read(slot)


def _flags(names: Sequence[BlockHash], chosen: dict[BlockHash, int] | set[BlockHash]) -> bytes:
    """One byte a name; of a name that comes twice only the first counts."""
    seen: set[BlockHash] = set()
    flags = bytearray()
    for name in names:
        flags.append(name in chosen and name not in seen)
        seen.add(name)
    return bytes(flags)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # its client was faster
