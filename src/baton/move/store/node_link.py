"""Connections to a pool node: over TCP, or on its own machine, to whose processes it lends its memory."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.ipc.lending import has_ended, is_ours, mapped, shares_machine
from baton.move.store import node_wire as wire
from baton.move.store.checksum import CHECKSUM_BYTES, PART_BYTES, checksum_in_parts, joined
from baton.move.store.node_board import PostedBlocks

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 1.0, 5.0
_HOT_BYTES = 256 << 10
"""Copied, and summed up while a core's own cache has it."""

Block = tuple[BlockHash, memoryview]


class Link(Protocol):
    """One connection. Every method raises OSError where the node fails it; then it is of no use any more."""

    connection: socket.socket

    def put(self, blocks: Sequence[Block]) -> list[int]:
        """Bring the blocks that the node wants. Returns for each REFUSED, KEPT or THERE of the wire."""
        ...

    def get(self, blocks: Sequence[Block]) -> list[bool | None]:
        """Fill the memories of blocks. Returns for each whether it is what was put. None: the node does not have it."""
        ...


class FarLink:
    """Blocks travel: from the arena into the socket, and from the socket into the arena."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def put(self, blocks: Sequence[Block]) -> list[int]:
        """See `Link.put`."""
        wanted = _asked(self.connection, wire.PUT, blocks)
        new = [memory for (_, memory), is_wanted in zip(blocks, wanted, strict=True) if is_wanted]
        wire.send_all(self.connection, [part for memory in new for part in (checksum_in_parts(memory), memory)])
        return _outcomes(wanted, wire.receive(self.connection, len(blocks)))

    def get(self, blocks: Sequence[Block]) -> list[bool | None]:
        """See `Link.get`."""
        flags = _asked(self.connection, wire.GET, blocks)
        coming = [(bytearray(CHECKSUM_BYTES), memory) for (_, memory), flag in zip(blocks, flags, strict=True) if flag]
        wire.receive_into(self.connection, [part for total, memory in coming for part in (memoryview(total), memory)])
        whole = iter([checksum_in_parts(memory) == bytes(total) for total, memory in coming])
        return [next(whole) if flag else None for flag in flags]


@dataclass(frozen=True, slots=True)
class Lent:
    """What a node lends to processes of its machine."""

    name: str
    """Of the node's process: another one lends other memory."""
    memory: memoryview
    """Its slots."""
    blocks: PostedBlocks
    """Which block lies where, for reading."""


class NearLink:
    """The node lends its memory: blocks are copied from where its board shows them, and to where it has a spare slot.

    What is not shown, or was given away under the copy, and all larger puts are asked for.
    """

    def __init__(self, connection: socket.socket, lent: Lent, threads: Executor, shares: int) -> None:
        """Large copies are shared out to so many of the `threads`."""
        self.connection = connection
        self._lent = lent
        self._threads = threads
        self._shares = shares
        self._spare: int | None = None
        """Where the slot begins that we may fill without asking."""

    def put(self, blocks: Sequence[Block]) -> list[int]:
        """See `Link.put`."""
        name, memory = blocks[0]
        if len(blocks) == 1 and self._spare is not None and self._lent.blocks.find(name) is None:
            return [self._filled(name, memory, self._spare)]
        wanted = _asked(self.connection, wire.PUT, blocks)
        new = [memory for (_, memory), is_wanted in zip(blocks, wanted, strict=True) if is_wanted]
        slots = [slot for _, slot in self._placed(new)]
        copies = [_Copying(memory, slot, memory) for memory, slot in zip(new, slots, strict=True)]
        wire.send_all(self.connection, self._carried(copies))
        return _outcomes(wanted, self._said_with_spare(len(blocks)))

    def get(self, blocks: Sequence[Block]) -> list[bool | None]:
        """See `Link.get`."""
        self._check_alive()
        shown = [self._shown(name, memory.nbytes) for name, memory in blocks]
        copies = [
            _Copying(self._slot(place[1], memory), memory, memory)
            for (_, memory), place in zip(blocks, shown, strict=True)
            if place is not None
        ]
        sums = iter(self._carried(copies))
        whole = [place is not None and next(sums) == place[0] for place in shown]
        missing = [block for block, is_whole in zip(blocks, whole, strict=True) if not is_whole]
        came = iter(self._asked_for(missing) if missing else [])
        return [is_whole or next(came) for is_whole in whole]

    def _shown(self, name: BlockHash, size_bytes: int) -> tuple[bytes, int] | None:
        """What the board says of a block. None: ask, also where it says what cannot be."""
        place = self._lent.blocks.find(name)
        return place if place is not None and place[1] + size_bytes <= self._lent.memory.nbytes else None

    def _filled(self, name: BlockHash, memory: memoryview, offset: int) -> int:
        """Copy a block into our spare slot, and only then tell the node. Returns what became of it."""
        self._check_alive()  # else it is not ours any more
        sums = self._carried([_Copying(memory, self._slot(offset, memory), memory)])
        wire.send_all(self.connection, [wire.REQUEST.pack(wire.FILL, 1), name, *sums])
        return self._said_with_spare(1)[0]

    def _asked_for(self, blocks: Sequence[Block]) -> list[bool | None]:
        """Get blocks whose slots nobody gives away meanwhile."""
        flags = _asked(self.connection, wire.GET, blocks)
        memories = [memory for (_, memory), flag in zip(blocks, flags, strict=True) if flag]
        placed = self._placed(memories)
        copies = [_Copying(slot, memory, memory) for memory, (_, slot) in zip(memories, placed, strict=True)]
        sums = self._carried(copies)
        if memories:
            wire.send_all(self.connection, [wire.DONE])
        whole = iter([total == expected for total, (expected, _) in zip(sums, placed, strict=True)])
        return [next(whole) if flag else None for flag in flags]

    def _check_alive(self) -> None:
        """What a node lends outlives it, but is not to be used then. Raises OSError."""
        if has_ended(self.connection):
            raise ConnectionResetError("the node has ended the connection")

    def _said_with_spare(self, count: int) -> bytes:
        """Receive an answer of `count` bytes, and which slot we may fill next."""
        said = wire.receive(self.connection, count + wire.SPARE.size)
        (offset,) = wire.SPARE.unpack_from(said, count)
        self._spare = None if offset == wire.NOWHERE else offset
        return said[:count]

    def _slot(self, offset: int, block: memoryview) -> memoryview:
        slot = self._lent.memory[offset : offset + len(block)]
        if len(slot) != len(block):
            raise ConnectionAbortedError(f"the node names {offset}, its memory has {len(self._lent.memory)} bytes")
        return slot

    def _placed(self, memories: Sequence[memoryview]) -> list[tuple[bytes, memoryview]]:
        """Receive for each block a checksum, and where its slot is. Returns them with the slots' memory."""
        said = wire.receive(self.connection, len(memories) * wire.PLACE.size)
        places = zip(wire.PLACE.iter_unpack(said), memories, strict=True)
        return [(total, self._slot(offset, memory)) for (total, offset), memory in places]

    def _carried(self, copies: Sequence[_Copying]) -> list[bytes]:
        """Copy blocks, and return their checksums. Parts of blocks are what threads share."""
        parts = [part for copying in copies for part in copying.parts()]

        def carry(share: int) -> list[bytes]:
            mine = parts[share * len(parts) // shares : (share + 1) * len(parts) // shares]
            return [part.carry() for part in mine]

        total_bytes = sum(len(copying.source) for copying in copies)
        shares = max(1, min(self._shares, len(parts), total_bytes // PART_BYTES))
        done = [carry(0)] if shares == 1 else self._threads.map(carry, range(shares))
        sums = iter([total for share in done for total in share])
        return [joined([next(sums) for _ in copying.parts()]) for copying in copies]


def _asked(connection: socket.socket, verb: bytes, blocks: Sequence[Block]) -> bytes:
    """Name blocks. Returns a flag for each."""
    wire.send_all(connection, [wire.REQUEST.pack(verb, len(blocks)), *(name for name, _ in blocks)])
    return wire.receive(connection, len(blocks))


def _outcomes(wanted: bytes, kept: bytes) -> list[int]:
    """What became of blocks of which the node wanted some, and keeps some."""
    new = [wire.KEPT if is_wanted else wire.THERE for is_wanted in wanted]
    return [outcome if is_kept else wire.REFUSED for outcome, is_kept in zip(new, kept, strict=True)]


@dataclass(frozen=True, slots=True)
class _Copying:
    """A block, or a part of one, on its way."""

    source: memoryview
    target: memoryview
    summed: memoryview
    """One of the two: its checksum is wanted."""

    def parts(self) -> list[_Copying]:
        return [
            _Copying(*(memory[start : start + PART_BYTES] for memory in (self.source, self.target, self.summed)))
            for start in range(0, len(self.source), PART_BYTES)
        ]

    def carry(self) -> bytes:
        """Copy, and sum up while the cache has it."""
        ours, theirs = np.frombuffer(self.target, np.uint8), np.frombuffer(self.source, np.uint8)
        state = xxhash.xxh3_128()
        for start in range(0, len(self.source), _HOT_BYTES):
            np.copyto(ours[start : start + _HOT_BYTES], theirs[start : start + _HOT_BYTES])
            state.update(self.summed[start : start + _HOT_BYTES])
        return state.digest()


class Dialer:
    """Connects to one node: by its memory where it lends it to us, else over TCP."""

    def __init__(self, address: tuple[str, int], hello: bytes, threads: Executor, *, shares: int) -> None:
        """`shares`: threads among which the copies of one call are shared out; 0: always over TCP."""
        self._where = "pool://{}:{}".format(*address)
        self._address = address
        self._hello = hello
        self._threads = threads
        self._shares = shares
        self._lock = threading.Lock()
        self._lent: Lent | None = None
        self.is_near = False
        """The last connection was to memory that is lent."""

    def connect(self) -> Link:
        """Raises OSError where nobody answers, and StoreError where the node keeps blocks of another layout."""
        try:
            far, name = self._far()
        except (OSError, StoreError):
            with self._lock:
                self._lent = None  # the memory of a node that has ended is kept by nobody but us
            raise
        near = self._near(name) if self._shares and shares_machine(name) else None
        self.is_near = near is not None
        if near is None:
            return FarLink(far)
        far.close()
        return near

    def _far(self) -> tuple[socket.socket, str]:
        """Connect over TCP. Returns where the node lends its memory, too."""
        far = socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S)
        try:
            wire.bound_waits(far, ANSWER_TIMEOUT_S)
            wire.send_all(far, [self._hello])
            return far, self._answered(wire.receive(far, wire.ANSWER.size))
        except (OSError, StoreError):
            far.close()
            raise

    def _near(self, name: str) -> NearLink | None:
        """Ask to be lent the node's memory. None: it is lent to other users only, or the node has just ended."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            wire.bound_waits(connection, ANSWER_TIMEOUT_S)
            connection.connect("\0" + name.partition("/")[2])
            if not is_ours(connection):
                raise PermissionError("the node belongs to another user")
            wire.send_all(connection, [self._hello])
            said, descriptors, _, _ = socket.recv_fds(connection, wire.ANSWER.size, 2, socket.MSG_WAITALL)
            return NearLink(connection, self._lent_by(name, said, descriptors), self._threads, self._shares)
        except (OSError, ValueError, StoreError):
            connection.close()
            return None

    def _lent_by(self, name: str, said: bytes, descriptors: Sequence[int]) -> Lent:
        """What the node lends, mapped once for all connections to one process."""
        try:
            if len(said) != wire.ANSWER.size or len(descriptors) != 2:
                raise ConnectionAbortedError("the node lends nothing")
            self._answered(said)
            with self._lock:
                if self._lent is None or self._lent.name != name:
                    slots = mapped(descriptors[0], mmap.PROT_READ | mmap.PROT_WRITE)
                    self._lent = Lent(name, slots, PostedBlocks(mapped(descriptors[1], mmap.PROT_READ)))
                return self._lent
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answered(self, said: bytes) -> str:
        """Read the node's answer. Returns where it lends its memory."""
        welcome, _, _, theirs, name = wire.ANSWER.unpack(said)
        if welcome != wire.WELCOME:
            _, _, ours = wire.HELLO.unpack(self._hello)
            raise StoreError(
                f"{self._where} keeps blocks of another layout ({theirs} bytes each, ours have {ours}): "
                "give each model and KV precision a node of its own"
            )
        return name.rstrip(b"\0").decode("ascii", "replace")
