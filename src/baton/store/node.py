"""A pool node: memory of one machine in which the hosts of a cluster keep blocks for each other.

Over TCP they send it blocks; processes of its own machine and user are lent the memory, and copy for themselves.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.machine.lending import is_ours, listening_as, machine, sealed_file
from baton.store import node_wire as wire
from baton.store.checksum import CHECKSUM_BYTES
from baton.store.slot_table import SlotTable

log = logging.getLogger("baton.store")

CONNECTIONS_MAX = 256
_BACKLOG = 64
_FULL_S = 0.1
"""Until a refused `accept` is tried again."""
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
        name = f"baton-pool-{secrets.token_hex(8)}"
        with ExitStack() as opened:
            try:
                self._file = sealed_file("baton-pool", capacity_bytes)
                opened.callback(os.close, self._file)
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._mapping = mmap.mmap(self._file, capacity_bytes, flags=flags)
                far = opened.enter_context(socket.create_server((host, port), backlog=_BACKLOG))
                near = opened.enter_context(listening_as(name))
                near.listen(_BACKLOG)
            except (OSError, ValueError, OverflowError) as error:
                raise StoreError(
                    f"cannot serve {capacity_bytes} bytes at {host}:{port} ({error}): give less memory, or another port"
                ) from None
            self._opened = opened.pop_all()
        self._memory = memoryview(self._mapping)
        self.address = "{}:{}".format(*far.getsockname()[:2])
        self._listeners = far, near
        self._lends_at = f"{machine()}/{name}"
        self._lock = threading.Lock()
        self._layout: tuple[bytes, int] | None = None
        self._table = SlotTable()
        self._checksums: list[bytes] = []
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="baton-node") for listener in self._listeners
        ]
        for thread in self._accepting:
            thread.start()

    def close(self) -> None:
        """End every connection. What was kept is gone."""
        self._closed.set()
        for listener, thread in zip(self._listeners, self._accepting, strict=True):
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
        with self._lock:
            connections, threads = list(self._connections), self._threads
        for connection in connections:
            _shut(connection)
        for thread in threads:
            thread.join()
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_REMOVE)  # else they stay as long as anybody has them mapped
        self._opened.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                self._closed.wait(_FULL_S)  # the one that wanted to connect is gone, or descriptors have run out
                continue
            if not self._start(connection):
                connection.close()

    def _start(self, connection: socket.socket) -> bool:
        """Serve a connection by a thread. False: there is no room for another."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) >= CONNECTIONS_MAX:
                return False
            thread = threading.Thread(target=self._serve, args=(connection,), name="baton-node")
            try:
                thread.start()
            except RuntimeError:  # the system has no room for another thread
                return False
            self._connections.add(connection)
            self._threads.append(thread)
        return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            wire.bound_waits(connection, IDLE_S)
            if not self._greet(connection):
                return
            while True:
                verb, count = wire.REQUEST.unpack(wire.receive(connection, wire.REQUEST.size))
                if count > wire.NAMES_MAX:
                    return
                self._answer(connection, verb, wire.receive_names(connection, count))
        except OSError:
            return  # the client ended, or hangs: nothing of a block that was coming is named
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> bool:
        magic, digest, block_bytes = wire.HELLO.unpack(wire.receive(connection, wire.HELLO.size))
        if magic != wire.MAGIC or (_is_lent_to(connection) and not is_ours(connection)):
            return False
        with self._lock:
            if self._layout is None and 0 < block_bytes <= len(self._memory):
                self._layout = (digest, block_bytes)
                slots = min(len(self._memory) // block_bytes, SLOTS_MAX)
                self._table.add_free(range(slots))
                self._checksums = [b""] * slots
            agrees = self._layout == (digest, block_bytes)
            _, ours = self._layout or (b"", 0)
        welcome = wire.WELCOME if agrees else wire.OTHER_LAYOUT
        answer = wire.ANSWER.pack(welcome, wire.MAGIC, digest, ours, self._lends_at.encode())
        if _is_lent_to(connection) and agrees:
            socket.send_fds(connection, [answer], [self._file])
        else:
            wire.send_all(connection, [answer])
        return agrees

    def _answer(self, connection: socket.socket, verb: bytes, names: list[BlockHash]) -> None:
        if verb == wire.PUT:
            self._put(connection, names)
        elif verb == wire.GET:
            self._get(connection, names)
        elif verb == wire.DROP:
            with self._lock:
                dropped = sum([self._table.forget(name) for name in names])
            wire.send_all(connection, [wire.NUMBER.pack(dropped)])
        elif verb == wire.HELD:
            with self._lock:
                held = [name for name, _ in self._table.items()]
            wire.send_all(connection, [wire.NUMBER.pack(len(held)), *held])
        else:
            raise ConnectionAbortedError(f"nobody knows the verb {verb!r}")

    def _slot(self, slot: int) -> memoryview:
        _, block_bytes = self._layout or (b"", 0)
        return self._memory[slot * block_bytes : (slot + 1) * block_bytes]

    def _place(self, slot: int) -> bytes:
        _, block_bytes = self._layout or (b"", 0)
        return wire.PLACE.pack(self._checksums[slot], slot * block_bytes)

    def _put(self, connection: socket.socket, names: list[BlockHash]) -> None:
        with self._lock:
            new = [name for name in dict.fromkeys(names) if not self._table.refresh(name)]
            slots, _ = self._table.reserve(len(new))
        wanted = dict(zip(new, slots, strict=False))
        received = False
        sums = [memoryview(bytearray(CHECKSUM_BYTES)) for _ in slots]
        try:
            if _is_lent_to(connection):
                wire.send_all(connection, [_flags(names, wanted), *map(self._place, slots)])
                coming = sums
            else:
                wire.send_all(connection, [_flags(names, wanted)])
                coming = [part for slot, total in zip(slots, sums, strict=True) for part in (total, self._slot(slot))]
            wire.receive_into(connection, coming)
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
        wire.send_all(connection, [_flags(names, kept)])

    def _get(self, connection: socket.socket, names: list[BlockHash]) -> None:
        with self._lock:
            found = [(name, self._table.begin_read(name)) for name in names]
            slots = [slot for _, slot in found if slot is not None]
            lent = [self._place(slot) for slot in slots] if _is_lent_to(connection) else None
            parts = lent or [part for slot in slots for part in (self._checksums[slot], self._slot(slot))]
        try:
            wire.send_all(connection, [bytes(slot is not None for _, slot in found), *parts])
            if lent:
                wire.receive(connection, len(wire.DONE))
        finally:
            with self._lock:
                for slot in slots:
                    self._table.end_read(slot)


def _is_lent_to(connection: socket.socket) -> bool:
    """The client sees our memory: it copies blocks itself."""
    return connection.family == socket.AF_UNIX


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
