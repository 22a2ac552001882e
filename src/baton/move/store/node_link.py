"""Connections of a client to a pool node: over TCP, or through the node's memory on the same machine."""

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
from baton.move.ipc.challenge import WrongSecretError, prove
from baton.move.ipc.cluster_tls import ClusterTls
from baton.move.ipc.connections import receive_views, send_views
from baton.move.ipc.dialing import Dialer
from baton.move.ipc.shared_memory import is_same_user, map_sealed, shares_machine, unix_address
from baton.move.store import node_wire as wire
from baton.move.store.checksum import CHECKSUM_BYTES, PART_BYTES, checksum_in_parts, joined

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 1.0, 5.0
_HOT_BYTES = 256 << 10
"""Bytes copied at a time: their checksum is computed while a core's cache still holds them."""

Block = tuple[BlockHash, memoryview]


class NodeLink(Protocol):
    """One connection. A method that raises OSError leaves the connection unusable."""

    connection: socket.socket

    def put(self, blocks: Sequence[Block]) -> tuple[bytes, bytes]:
        """Send the blocks that the node lacks. Return two flags per block: it was missing, and it is kept now."""
        ...

    def get(self, blocks: Sequence[Block]) -> list[bool | None]:
        """Fill the memories. Return for each block whether its checksum matches, or None if the node lacks it."""
        ...


class TcpLink:
    """Send blocks from the arena into the socket, and receive them from the socket into the arena."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def put(self, blocks: Sequence[Block]) -> tuple[bytes, bytes]:
        wanted = _ask(self.connection, wire.PUT, blocks)
        new = [memory for (_, memory), is_wanted in zip(blocks, wanted, strict=True) if is_wanted]
        send_views(self.connection, [part for memory in new for part in (checksum_in_parts(memory), memory)])
        return wanted, wire.receive(self.connection, len(blocks))

    def get(self, blocks: Sequence[Block]) -> list[bool | None]:
        flags = _ask(self.connection, wire.GET, blocks)
        coming = [(bytearray(CHECKSUM_BYTES), memory) for (_, memory), flag in zip(blocks, flags, strict=True) if flag]
        receive_views(self.connection, [part for total, memory in coming for part in (memoryview(total), memory)])
        whole = iter([checksum_in_parts(memory) == bytes(total) for total, memory in coming])
        return [next(whole) if flag else None for flag in flags]


class SharedMemoryLink:
    """Copy blocks to and from the node's mapped memory. The node tells the slot of each block."""

    def __init__(self, connection: socket.socket, memory: memoryview, threads: Executor, shares: int) -> None:
        """Divide large copies into up to `shares` parts for the `threads`."""
        self.connection = connection
        self._memory = memory
        self._threads = threads
        self._shares = shares

    def put(self, blocks: Sequence[Block]) -> tuple[bytes, bytes]:
        wanted = _ask(self.connection, wire.PUT, blocks)
        new = [memory for (_, memory), is_wanted in zip(blocks, wanted, strict=True) if is_wanted]
        copies = [_BlockCopy(memory, slot, memory) for memory, (_, slot) in zip(new, self._places(new), strict=True)]
        send_views(self.connection, self._run(copies))
        return wanted, wire.receive(self.connection, len(blocks))

    def get(self, blocks: Sequence[Block]) -> list[bool | None]:
        flags = _ask(self.connection, wire.GET, blocks)
        memories = [memory for (_, memory), flag in zip(blocks, flags, strict=True) if flag]
        places = self._places(memories)
        sums = self._run([_BlockCopy(slot, memory, memory) for memory, (_, slot) in zip(memories, places, strict=True)])
        if memories:
            send_views(self.connection, [wire.DONE])  # the node unpins the slots
        whole = iter([total == expected for total, (expected, _) in zip(sums, places, strict=True)])
        return [next(whole) if flag else None for flag in flags]

    def _places(self, memories: Sequence[memoryview]) -> list[tuple[bytes, memoryview]]:
        """Receive a checksum and a slot for each block. Return them with the slots' memory."""
        found: list[tuple[bytes, memoryview]] = []
        places = wire.receive(self.connection, len(memories) * wire.PLACE.size)
        for (total, offset), memory in zip(wire.PLACE.iter_unpack(places), memories, strict=True):
            slot = self._memory[offset : offset + len(memory)]
            if len(slot) != len(memory):
                raise ConnectionAbortedError(
                    f"the node names a slot at {offset}, and its memory has {len(self._memory)} bytes"
                )
            found.append((total, slot))
        return found

    def _run(self, copies: Sequence[_BlockCopy]) -> list[bytes]:
        """Copy blocks, several threads sharing the parts of large ones. Return the checksum of each block."""
        parts = [part for copy in copies for part in copy.parts()]

        def run_share(share: int) -> list[bytes]:
            mine = parts[share * len(parts) // shares : (share + 1) * len(parts) // shares]
            return [part.run() for part in mine]

        total_bytes = sum(len(copy.source) for copy in copies)
        shares = max(1, min(self._shares, len(parts), total_bytes // PART_BYTES))
        done = [run_share(0)] if shares == 1 else self._threads.map(run_share, range(shares))
        sums = iter([total for share in done for total in share])
        return [joined([next(sums) for _ in copy.parts()]) for copy in copies]


def _ask(connection: socket.socket, verb: bytes, blocks: Sequence[Block]) -> bytes:
    """Send a request (`verb`) for blocks, which lists their hashes. Return the node's flag for each block."""
    send_views(connection, [wire.REQUEST.pack(verb, len(blocks)), *(block_hash for block_hash, _ in blocks)])
    return wire.receive(connection, len(blocks))


@dataclass(frozen=True, slots=True)
class _BlockCopy:
    """A copy of one block, or of a part of it."""

    source: memoryview
    target: memoryview
    summed: memoryview
    """`source` or `target`, whichever belongs to this process: the checksum is computed over it."""

    def parts(self) -> list[_BlockCopy]:
        return [
            _BlockCopy(*(memory[start : start + PART_BYTES] for memory in (self.source, self.target, self.summed)))
            for start in range(0, len(self.source), PART_BYTES)
        ]

    def run(self) -> bytes:
        """Copy, and return the checksum."""
        into, source = np.frombuffer(self.target, np.uint8), np.frombuffer(self.source, np.uint8)
        state = xxhash.xxh3_128()
        for start in range(0, len(self.source), _HOT_BYTES):
            np.copyto(into[start : start + _HOT_BYTES], source[start : start + _HOT_BYTES])
            state.update(self.summed[start : start + _HOT_BYTES])
        return state.digest()


class NodeDialer:
    """Connect to one pool node: through its memory if the node lends it to this process, otherwise over TCP."""

    def __init__(
        self, address: tuple[str, int], hello: bytes, threads: Executor, *, shares: int, secret: bytes = b""
    ) -> None:
        """`shares`: number of threads that divide the copies of one call. 0: always connect over TCP.

        `secret`: both ends must prove that they know it, and TCP is encrypted. Empty: the node must not ask for one.
        """
        self._where = "pool://{}:{}".format(*address)
        self._dialer = Dialer(*address)
        self._hello = hello
        self._threads = threads
        self._shares = shares
        self._secret = secret
        self._tls = ClusterTls(secret) if secret else None
        self._lock = threading.Lock()
        self._lent: tuple[str, memoryview] | None = None
        """Name of the node's process and its mapped memory. A restarted node has another name."""
        self.is_near = False
        """True if the last connection was to mapped memory."""

    def connect(self) -> NodeLink:
        """Connect. Raises OSError if the node does not answer, StoreError if it holds blocks of another layout."""
        try:
            connection, name = self._connect_tcp()
        except (OSError, StoreError):
            with self._lock:
                self._lent = None  # unmap: otherwise the pages of a dead node would stay in memory
            raise
        near = self._connect_near(name) if self._shares and shares_machine(name) else None
        self.is_near = near is not None
        if near is None:
            return TcpLink(connection)
        connection.close()
        return near

    def _connect_tcp(self) -> tuple[socket.socket, str]:
        """Connect over TCP. Return the connection and the name under which the node lends its memory."""
        connection = self._dialer.connect(CONNECT_TIMEOUT_S)
        try:
            wire.bound_waits(connection, ANSWER_TIMEOUT_S)
            send_views(connection, [self._hello])
            if self._asks_for_secret(connection):
                connection = self._encrypted(connection)
                send_views(connection, [self._hello])
            return connection, self._check_answer(wire.receive(connection, wire.ANSWER.size))
        except (OSError, StoreError):
            connection.close()
            raise

    def _connect_near(self, name: str) -> SharedMemoryLink | None:
        """Map the node's memory. Return None if the node belongs to another user or has just ended."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            wire.bound_waits(connection, ANSWER_TIMEOUT_S)
            connection.connect(unix_address(name.partition("/")[2]))
            if not is_same_user(connection):
                raise PermissionError("the node belongs to another user")
            send_views(connection, [self._hello])
            if self._asks_for_secret(connection):
                prove(connection, self._secret)
            answer, descriptors, _, _ = socket.recv_fds(connection, wire.ANSWER.size, 1, socket.MSG_WAITALL)
            memory = self._map(name, answer, descriptors)
            return SharedMemoryLink(connection, memory, self._threads, self._shares)
        except (OSError, ValueError, StoreError):
            connection.close()
            return None

    def _map(self, name: str, answer: bytes, descriptors: Sequence[int]) -> memoryview:
        """Return the node's memory, mapped once for all connections to the same process."""
        try:
            if len(answer) != wire.ANSWER.size or not descriptors:
                raise ConnectionAbortedError("the node sent no descriptor of its memory")
            self._check_answer(answer)
            with self._lock:
                if self._lent is None or self._lent[0] != name:
                    self._lent = name, map_sealed(descriptors[0], mmap.PROT_READ | mmap.PROT_WRITE)
                return self._lent[1]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _asks_for_secret(self, connection: socket.socket) -> bool:
        """Return whether the node asks for the secret. Raises StoreError unless both have a secret, or none."""
        try:
            first = connection.recv(1, socket.MSG_PEEK)  # a descriptor of the node's memory may be beside the answer
        except BlockingIOError:  # the limit of `bound_waits`
            raise TimeoutError("no bytes came in time") from None
        asks = first == wire.PROVE_SECRET
        if asks and not self._secret:
            raise StoreError(f"{self._where} asks for a secret: add secret_file=FILE to its URL")
        if first and not asks and self._secret:
            raise StoreError(f"{self._where} asks for no secret: start it with baton pool --secret-file FILE")
        if asks:
            wire.receive(connection, wire.ANSWER.size)
        return asks

    def _encrypted(self, connection: socket.socket) -> socket.socket:
        assert self._tls is not None, "the node was asked for TLS without a secret"
        try:
            return self._tls.connect(connection)
        except WrongSecretError:
            raise StoreError(f"{self._where} has another secret: give both the same file") from None

    def _check_answer(self, answer: bytes) -> str:
        """Return the name under which the node lends its memory. Raises StoreError if the layouts differ."""
        welcome, _, _, theirs, name = wire.ANSWER.unpack(answer)
        if welcome != wire.WELCOME:
            _, _, ours = wire.HELLO.unpack(self._hello)
            raise StoreError(
                f"{self._where} keeps blocks of another layout ({theirs} bytes each, ours have {ours}): "
                "give each model and KV precision a node of its own"
            )
        return name.rstrip(b"\0").decode("ascii", "replace")
