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
from dataclasses import dataclass, field

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.ipc.connections import Listener
from baton.move.ipc.lending import is_ours, listening_as, machine, sealed_file
from baton.move.store import node_wire as wire
from baton.move.store.checksum import CHECKSUM_BYTES
from baton.move.store.node_slots import NodeSlots, Spare

log = logging.getLogger("baton.move.store")

CONNECTIONS_MAX = 256
"""Over TCP, and as many of our own machine."""
SLOTS_MAX = 1 << 24
"""However small the blocks are that the first client announces: a slot takes memory of its own beside its block."""
IDLE_S = 600.0
"""A connection that says nothing for so long is closed: its host is gone, or connects again."""


@dataclass(slots=True, eq=False)
class _Client:
    """One connection, which has said what its blocks are."""

    connection: socket.socket
    slots: NodeSlots
    spare: Spare = field(default_factory=Spare)

    @property
    def is_near(self) -> bool:
        """It sees our memory, and copies blocks itself."""
        return self.connection.family == socket.AF_UNIX


class StoreNode:
    """Serves slots of one piece of memory. The first client says what layout its blocks are of; others must agree.

    One thread per connection: they spend their time in the kernel, copying. Blocks are received straight into their
    slots and sent straight from them; the checksum is the client's, kept beside the block and checked by who gets it.
    """

    def __init__(self, *, host: str, port: int, capacity_bytes: int) -> None:
        """Take the port, then the memory, which takes a while. Raises StoreError where either cannot be had."""
        name = f"baton-pool-{secrets.token_hex(8)}"
        with ExitStack() as opened:
            try:
                far = opened.enter_context(socket.create_server((host, port)))
                near = opened.enter_context(listening_as(name))
                self._file = sealed_file("baton-pool", capacity_bytes)
                opened.callback(os.close, self._file)
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._mapping = mmap.mmap(self._file, capacity_bytes, flags=flags)
            except (OSError, ValueError, OverflowError) as error:
                raise StoreError(
                    f"cannot serve {capacity_bytes} bytes at {host}:{port} ({error}): give less memory, or another port"
                ) from None
            self._opened = opened.pop_all()
        self._memory = memoryview(self._mapping)
        self.address = "{}:{}".format(*far.getsockname()[:2])
        self._lends_at = f"{machine()}/{name}"
        self._lock = threading.Lock()
        self._layout: bytes | None = None
        self._slots: NodeSlots | None = None
        """For blocks of that layout, which the first client has named."""
        self._listeners = [Listener(each, self._serve, CONNECTIONS_MAX, full=_nothing_said) for each in (far, near)]

    def close(self) -> None:
        """End every connection. What was kept is gone."""
        for listener in self._listeners:
            listener.close()
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_REMOVE)  # else they stay as long as anybody has them mapped
        if self._slots is not None:
            self._slots.board.close()
        self._opened.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer a client until it ends, or hangs (OSError): nothing of a block that was coming is named then."""
        wire.bound_waits(connection, IDLE_S)
        slots = self._greet(connection)
        if slots is not None:
            self._converse(_Client(connection, slots))

    def _greet(self, connection: socket.socket) -> NodeSlots | None:
        """Hear what a client's blocks are. Returns the slots for them; None where it may not have any."""
        is_near = connection.family == socket.AF_UNIX
        magic, digest, block_bytes = wire.HELLO.unpack(wire.receive(connection, wire.HELLO.size))
        if magic != wire.MAGIC or (is_near and not is_ours(connection)):
            return None
        with self._lock:
            if self._slots is None and 0 < block_bytes <= len(self._memory):
                self._slots = NodeSlots(min(len(self._memory) // block_bytes, SLOTS_MAX), block_bytes)
                self._layout = digest
            slots = self._slots
        ours = 0 if slots is None else slots.block_bytes
        agrees = (digest, block_bytes) == (self._layout, ours)
        welcome = wire.WELCOME if agrees else wire.OTHER_LAYOUT
        answer = wire.ANSWER.pack(welcome, wire.MAGIC, digest, ours, self._lends_at.encode())
        if is_near and agrees and slots is not None:
            socket.send_fds(connection, [answer], [self._file, slots.board.descriptor])
        else:
            wire.send_all(connection, [answer])
        return slots if agrees else None

    def _converse(self, client: _Client) -> None:
        """Answer until the client ends, or says what is no request of ours."""
        try:
            while True:
                verb, count = wire.REQUEST.unpack(wire.receive(client.connection, wire.REQUEST.size))
                if count > wire.NAMES_MAX:
                    return
                self._answer(client, verb, wire.receive_names(client.connection, count))
        finally:
            with self._lock:
                client.slots.end_spare(client.spare)

    def _answer(self, client: _Client, verb: bytes, names: list[BlockHash]) -> None:
        connection = client.connection
        if verb == wire.PUT:
            self._put(client, names)
        elif verb == wire.FILL and len(names) == 1:
            self._fill(client, names[0])
        elif verb == wire.GET:
            self._get(client, names)
        elif verb == wire.DROP:
            with self._lock:
                dropped = sum([client.slots.drop(name) for name in names])
            wire.send_all(connection, [wire.NUMBER.pack(dropped)])
        elif verb == wire.HELD:
            with self._lock:
                held = [name for name, _ in client.slots.table.items()]
            wire.send_all(connection, [wire.NUMBER.pack(len(held)), *held])
        else:
            raise ConnectionAbortedError(f"nobody knows {verb!r} with {len(names)} names")

    def _bytes_of(self, client: _Client, slot: int) -> memoryview:
        block_bytes = client.slots.block_bytes
        return self._memory[slot * block_bytes : (slot + 1) * block_bytes]

    def _put(self, client: _Client, names: list[BlockHash]) -> None:
        slots, connection = client.slots, client.connection
        with self._lock:
            wanted = slots.reserve(names, client.spare)
        received = False
        sums = {slot: memoryview(bytearray(CHECKSUM_BYTES)) for slot in wanted.values()}
        try:
            if client.is_near:
                wire.send_all(connection, [_flags(names, wanted), *(_place(client, slot) for slot in sums)])
                coming = list(sums.values())
            else:
                wire.send_all(connection, [_flags(names, wanted)])
                coming = [part for slot, total in sums.items() for part in (total, self._bytes_of(client, slot))]
            wire.receive_into(connection, coming)
            received = True
        finally:
            with self._lock:
                for name, slot in wanted.items():
                    if received:
                        slots.keep(name, slot, bytes(sums[slot]))
                    else:
                        slots.table.add_free([slot])
                kept = {name for name in names if slots.table.holds(name)}
        wire.send_all(connection, [_flags(names, kept), *self._lent_spare(client)])

    def _fill(self, client: _Client, name: BlockHash) -> None:
        """Take a block that a client has copied into its spare slot before it said so."""
        checksum = wire.receive(client.connection, CHECKSUM_BYTES)
        try:
            with self._lock:
                is_new = client.slots.keep_spare(name, client.spare, checksum)
        except ValueError as error:
            raise ConnectionAbortedError(str(error)) from error
        outcome = wire.KEPT if is_new else wire.THERE
        wire.send_all(client.connection, [bytes([outcome]), *self._lent_spare(client)])

    def _lent_spare(self, client: _Client) -> list[bytes]:
        """What a client that copies blocks itself is told with every answer to a put."""
        if not client.is_near:
            return []
        with self._lock:
            client.slots.lend_spare(client.spare)
        slot = client.spare.slot
        return [wire.SPARE.pack(wire.NOWHERE if slot is None else slot * client.slots.block_bytes)]

    def _get(self, client: _Client, names: list[BlockHash]) -> None:
        connection, table = client.connection, client.slots.table
        with self._lock:
            found = [table.begin_read(name) for name in names]
            slots = [slot for slot in found if slot is not None]
            lent = [_place(client, slot) for slot in slots] if client.is_near else None
            sums = client.slots.checksums
            parts = lent or [part for slot in slots for part in (sums[slot], self._bytes_of(client, slot))]
        try:
            wire.send_all(connection, [bytes(slot is not None for slot in found), *parts])
            if lent:
                wire.receive(connection, len(wire.DONE))
        finally:
            with self._lock:
                for slot in slots:
                    table.end_read(slot)


def _place(client: _Client, slot: int) -> bytes:
    return wire.PLACE.pack(client.slots.checksums[slot], slot * client.slots.block_bytes)


def _flags(names: Sequence[BlockHash], chosen: dict[BlockHash, int] | set[BlockHash]) -> bytes:
    """One byte a name; of a name that comes twice only the first counts."""
    seen: set[BlockHash] = set()
    flags = bytearray()
    for name in names:
        flags.append(name in chosen and name not in seen)
        seen.add(name)
    return bytes(flags)


def _nothing_said(_connection: socket.socket) -> None:
    """One client too many is hung up on: it does without us, as without a node that is not there."""
