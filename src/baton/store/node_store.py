"""Blocks on a pool node, over a few TCP streams, straight from and into the arena."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.store.checksum import CHECKSUM_BYTES, checksum, fingerprint_digest
from baton.store.node_wire import (
    DROP,
    GET,
    HELD,
    HELLO,
    MAGIC,
    NAME_BYTES,
    NAMES_MAX,
    NUMBER,
    PUT,
    REQUEST,
    WELCOME,
    bound_waits,
    receive,
    receive_into,
    receive_names,
    send_all,
)
from baton.store.port import StoreCounters
from baton.store.reach import Reach

STREAMS = 4
PART_BYTES = 4 << 20
"""A call is cut into parts for several streams where each gets at least this much."""
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 1.0, 5.0

Block = tuple[BlockHash, memoryview]
Answer = TypeVar("Answer")


class NodeStore:
    """The node is memory: what it held is gone when it restarts, and comes back as misses."""

    name = "pool"
    capacity_blocks: int | None = None

    def __init__(
        self, host: str, port: int, *, layout_fingerprint: str, block_bytes: int, streams: int = STREAMS
    ) -> None:
        """Connect. Raises StoreError where nobody answers, or the node keeps blocks of another layout."""
        self._where = f"pool://{host}:{port}"
        self._address = (host, port)
        self._block_bytes = block_bytes
        self._hello = HELLO.pack(MAGIC, fingerprint_digest(layout_fingerprint), block_bytes)
        self._streams = streams
        self._idle: queue.LifoQueue[socket.socket] = queue.LifoQueue()
        self._reach = Reach(self._where, self._ask, (OSError, StoreError))
        try:
            self._ask()
        except OSError as error:
            raise StoreError(f"no pool node answers at {self._where} ({error}): start it with baton pool") from None
        self._threads = ThreadPoolExecutor(streams, thread_name_prefix="baton-pool")

    @property
    def counters(self) -> StoreCounters:
        return self._reach.counters

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        new = {name: memory.cast("B") for name, memory in blocks if self._fits(name, memory)}
        kept = dict(zip(new, self._in_parts(self._put_part, list(new.items())), strict=True))
        answers = [self._fits(name, memory) and kept[name] for name, memory in blocks]
        self._reach.count(refused=answers.count(False))
        return answers

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        wanted = [(name, memory.cast("B")) for name, memory in blocks if self._fits(name, memory)]
        outcomes = iter(self._in_parts(self._get_part, wanted))
        found = [self._fits(name, memory) and next(outcomes) for name, memory in blocks]
        self._reach.count(hits=found.count(True), misses=found.count(False))
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        names = [name for name in dict.fromkeys(hashes) if len(name) == NAME_BYTES]

        def ask(connection: socket.socket) -> int:
            send_all(connection, [REQUEST.pack(DROP, len(names)), *names])
            return NUMBER.unpack(receive(connection, NUMBER.size))[0]

        self._reach.count(dropped=(self._call(ask) or 0) if names else 0)

    def held(self) -> list[BlockHash]:
        """List what the node keeps, of all hosts."""
        try:
            connection = self._connect()
            with connection:
                send_all(connection, [REQUEST.pack(HELD, 0)])
                return receive_names(connection, NUMBER.unpack(receive(connection, NUMBER.size))[0])
        except OSError as error:
            raise StoreError(f"{self._where} does not list its blocks: {error}") from None

    def close(self) -> None:
        self._reach.close()
        self._threads.shutdown()
        self._hang_up()

    def _fits(self, name: BlockHash, memory: memoryview) -> bool:
        return memory.nbytes == self._block_bytes and len(name) == NAME_BYTES

    def _ask(self) -> None:
        self._connect().close()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S)
        try:
            bound_waits(connection, ANSWER_TIMEOUT_S)
            send_all(connection, [self._hello])
            answer = receive(connection, len(WELCOME) + HELLO.size)
        except OSError:
            connection.close()
            raise
        if answer[: len(WELCOME)] == WELCOME:
            return connection
        connection.close()
        _, _, theirs = HELLO.unpack(answer[len(WELCOME) :])
        raise StoreError(
            f"{self._where} keeps blocks of another layout ({theirs} bytes each, ours have {self._block_bytes}): "
            "give each model and KV precision a node of its own"
        )

    def _hang_up(self) -> None:
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def _call(self, ask: Callable[[socket.socket], Answer]) -> Answer | None:
        """Ask over an idle connection, or over a new one where there is none or it has died since. None: no answer."""
        if not self._reach.is_open:
            return None
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            pass
        else:
            try:
                return self._asked(connection, ask)
            except OSError:
                self._hang_up()  # the node has restarted, or closed what was idle: the others are no better
        try:
            return self._asked(self._connect(), ask)
        except (OSError, StoreError) as error:
            self._reach.lost(error)
            return None

    def _asked(self, connection: socket.socket, ask: Callable[[socket.socket], Answer]) -> Answer:
        try:
            answer = ask(connection)
        except OSError:
            connection.close()
            raise
        self._idle.put(connection)
        return answer

    def _in_parts(self, call: Callable[[Sequence[Block]], list[bool]], blocks: list[Block]) -> list[bool]:
        """Cut blocks for the streams; an answer for each, in order."""
        total_bytes = len(blocks) * self._block_bytes
        parts = max(1, min(self._streams, total_bytes // PART_BYTES, len(blocks)))
        size = min(NAMES_MAX, max(1, -(-len(blocks) // parts)))
        cut = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        if not self._reach.is_open:
            return [False] * len(blocks)
        done = map(call, cut) if len(cut) == 1 else self._threads.map(call, cut)
        return [answer for part in done for answer in part]

    def _put_part(self, blocks: Sequence[Block]) -> list[bool]:
        def ask(connection: socket.socket) -> list[bool]:
            send_all(connection, [REQUEST.pack(PUT, len(blocks)), *(name for name, _ in blocks)])
            wanted = receive(connection, len(blocks))
            chosen = [memory for (_, memory), is_wanted in zip(blocks, wanted, strict=True) if is_wanted]
            send_all(connection, [part for memory in chosen for part in (checksum(memory), memory)])
            kept = receive(connection, len(blocks))
            self._reach.count(put=sum(1 for pair in zip(wanted, kept, strict=True) if all(pair)))
            return [bool(flag) for flag in kept]

        return self._call(ask) or [False] * len(blocks)

    def _get_part(self, blocks: Sequence[Block]) -> list[bool]:
        sums = [memoryview(bytearray(CHECKSUM_BYTES)) for _ in blocks]

        def ask(connection: socket.socket) -> list[bool]:
            send_all(connection, [REQUEST.pack(GET, len(blocks)), *(name for name, _ in blocks)])
            there = [bool(flag) for flag in receive(connection, len(blocks))]
            coming = [
                part
                for (_, memory), total, is_there in zip(blocks, sums, there, strict=True)
                if is_there
                for part in (total, memory)
            ]
            receive_into(connection, coming)
            return there

        there = self._call(ask) or [False] * len(blocks)
        whole = [
            is_there and checksum(memory) == total
            for (_, memory), total, is_there in zip(blocks, sums, there, strict=True)
        ]
        damaged = [
            name for (name, _), is_there, good in zip(blocks, there, whole, strict=True) if is_there and not good
        ]
        if damaged:
            self._reach.count(damaged=len(damaged))
            self.drop(damaged)
        return whole
