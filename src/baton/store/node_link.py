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
from baton.machine.lending import is_ours, mapped, shares_machine
from baton.store import node_wire as wire
from baton.store.checksum import CHECKSUM_BYTES, PART_BYTES, checksum_in_parts, joined

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 1.0, 5.0
_HOT_BYTES = 256 << 10
"""Copied, and summed up while a core's own cache has it."""

Block = tuple[BlockHash, memoryview]


class Link(Protocol):
    """One connection. Every method raises OSError where the node fails it; then it is of no use any more."""

    connection: socket.socket

    def give(self, blocks: Sequence[Block]) -> None:
        """Bring blocks that the node has said it wants, and their checksums."""
        ...

    def take(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill the memories of blocks that the node has said it has. Returns for each whether it is what was put."""
        ...


class FarLink:
    """Blocks travel: from the arena into the socket, and from the socket into the arena."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def give(self, blocks: Sequence[Block]) -> None:
        """See `Link.give`."""
        wire.send_all(self.connection, [part for _, memory in blocks for part in (checksum_in_parts(memory), memory)])

    def take(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Link.take`."""
        sums = [bytearray(CHECKSUM_BYTES) for _ in blocks]
        places = [part for total, (_, memory) in zip(sums, blocks, strict=True) for part in (memoryview(total), memory)]
        wire.receive_into(self.connection, places)
        return [checksum_in_parts(memory) == bytes(total) for total, (_, memory) in zip(sums, blocks, strict=True)]


class NearLink:
    """The node lends its memory: who asks is told where a block lies, or may lie, and copies it."""

    def __init__(self, connection: socket.socket, memory: memoryview, threads: Executor, shares: int) -> None:
        """`memory` is the node's; large copies are shared out to so many of the `threads`."""
        self.connection = connection
        self._memory = memory
        self._threads = threads
        self._shares = shares

    def give(self, blocks: Sequence[Block]) -> None:
        """See `Link.give`."""
        copies = [_Copying(memory, slot, memory) for (_, memory), (_, slot) in self._placed(blocks)]
        wire.send_all(self.connection, self._carried(copies))

    def take(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Link.take`."""
        placed = self._placed(blocks)
        sums = self._carried([_Copying(slot, memory, memory) for (_, memory), (_, slot) in placed])
        if blocks:
            wire.send_all(self.connection, [wire.DONE])
        return [total == expected for total, (_, (expected, _)) in zip(sums, placed, strict=True)]

    def _placed(self, blocks: Sequence[Block]) -> list[tuple[Block, tuple[bytes, memoryview]]]:
        """Receive for each block a checksum and where its slot is. Returns them with the slots' memory."""
        found: list[tuple[Block, tuple[bytes, memoryview]]] = []
        said = wire.receive(self.connection, len(blocks) * wire.PLACE.size)
        for (total, offset), block in zip(wire.PLACE.iter_unpack(said), blocks, strict=True):
            slot = self._memory[offset : offset + len(block[1])]
            if len(slot) != len(block[1]):
                raise ConnectionAbortedError(f"the node names {offset}, its memory has {len(self._memory)} bytes")
            found.append((block, (total, slot)))
        return found

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
        self._lent: tuple[str, memoryview] | None = None
        """By whom, and what. Another name is another node process."""
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
            said, descriptors, _, _ = socket.recv_fds(connection, wire.ANSWER.size, 1, socket.MSG_WAITALL)
            return NearLink(connection, self._memory_of(name, said, descriptors), self._threads, self._shares)
        except (OSError, ValueError, StoreError):
            connection.close()
            return None

    def _memory_of(self, name: str, said: bytes, descriptors: Sequence[int]) -> memoryview:
        """The node's memory, mapped once for all connections to one process."""
        try:
            if len(said) != wire.ANSWER.size or not descriptors:
                raise ConnectionAbortedError("the node lends nothing")
            self._answered(said)
            with self._lock:
                if self._lent is None or self._lent[0] != name:
                    self._lent = name, mapped(descriptors[0], mmap.PROT_READ | mmap.PROT_WRITE)
                return self._lent[1]
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
